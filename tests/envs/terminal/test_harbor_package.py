"""Harbor against its real package: every key of its schema, how it combines rewards, and what each ending is worth.

JAXAGENT_HARBOR_PYTHON names an interpreter that has `harbor` (it needs Python 3.12); without it the stored names of the
keys of 0.26.0 are walked, and what needs the package skips.
"""

import dataclasses
import itertools
import json
import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from jaxagent.config import ConfigError
from jaxagent.envs.base import Transcript
from jaxagent.envs.terminal import folders, judging, rows, verify
from jaxagent.envs.terminal.environment import Terminal, TerminalAttempt
from jaxagent.types import StopReason, Task
from tests.envs.opened import opened_sandboxes
from tests.envs.terminal import harbor_tasks, terminal_folders

PYTHON = os.environ.get("JAXAGENT_HARBOR_PYTHON", "")
needs_package = pytest.mark.skipif(not PYTHON, reason="JAXAGENT_HARBOR_PYTHON names no interpreter with `harbor`")
STORED = Path(__file__).with_name("harbor_keys.json")
KEYS = """
import importlib.metadata, json
from harbor.models.task.config import TaskConfig
schema = TaskConfig.model_json_schema()

def keys(node, path):
    for part in node.get("anyOf", [node]):
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        for name, inner in part.get("properties", {}).items():
            yield f"{path}{name}"
            yield from keys(inner, f"{path}{name}.")
        if "items" in part:
            yield from keys(part["items"], path)

found = dict.fromkeys(keys(schema, ""))
print(json.dumps({"version": importlib.metadata.version("harbor"), "keys": list(found)}))
"""


def package(*arguments, timeout=120):
    ran = subprocess.run([PYTHON, *arguments], capture_output=True, text=True, timeout=timeout)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1].removeprefix("RESULTS "))


# A value for every kind of key, and those that say nothing of how a task is played.
VALUES = {
    **dict.fromkeys(("timeout_sec", "interval_sec", "start_period_sec", "start_interval_sec", "build_timeout_sec"), 7),
    **{
        "user": "worker",
        "command": "true",
        "env": {"A": "b"},
        "cpus": 3,
        "memory_mb": 5,
        "storage_mb": 5,
        "retries": 9,
    },
    **{
        "docker_image": "busybox",
        "workdir": "/srv",
        "skills_dir": "/skills",
        "os": "windows",
        "gpus": 1,
        "tpu": {"type": "v4"},
    },
    **{
        "gpu_types": ["H100"],
        "network_mode": "public",
        "allowed_hosts": ["a.b"],
        "allow_internet": True,
        "service": "db",
    },
    **{"environment_mode": "separate", "min_reward": 0.5, "multi_step_reward_strategy": "final", "exclude": ["*.log"]},
    **{
        "transport": "sse",
        "url": "http://a",
        "args": ["-x"],
        "headers": {"A": "b"},
        "artifacts": ["/made"],
        "name": "other",
    },
    **{"healthcheck": {"command": "true"}, "mcp_servers": [{"name": "a", "transport": "stdio", "command": "b"}]},
    **{"collect": [{"command": "true"}], "environment": {"cpus": 2}, "source": "/other", "schema_version": "1.2"},
    **{"steps": [{"name": "other"}], "type": "v4", "topology": "2x2"},
}
WORDS = ("schema_version", "source", "task", "metadata", "artifacts.destination", "environment.mcp_servers.name")


def _said(tree, path, value):
    """The tree with a value at a dotted path; lists hold one table."""
    first, _, rest = path.partition(".")
    inner = tree.get(first)
    if not rest:
        return {**tree, first: value}
    if isinstance(inner, list):
        table = inner[0] if inner and isinstance(inner[0], dict) else {}
        return {**tree, first: [_said(table, rest, value)]}
    return {**tree, first: _said(inner or {}, rest, value)}


def _toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def _read(folder, tree):
    terminal_folders.write(folder / "task.toml", "".join(f"{json.dumps(k)} = {_toml(v)}\n" for k, v in tree.items()))
    return folders.read_task(folder)


# Where a key stands in company: the least that makes its table one.
COMPANY = {
    "environment.mcp_servers": {"name": "a", "transport": "stdio", "command": "b"},
    "environment.healthcheck": {"command": "false"},
    "verifier.collect": {"command": "false"},
    "steps.verifier.collect": {"command": "false"},
    "steps.healthcheck": {"command": "false"},
    "verifier.environment": {"os": "linux"},
    "steps.verifier.environment": {"os": "linux"},
    "artifacts": {"source": "/made"},
    "steps.artifacts": {"source": "/made"},
    "steps": {"name": "first"},
}


@pytest.fixture(scope="module", params=["stored", pytest.param("installed", marks=needs_package)])
def schema(request):
    return json.loads(STORED.read_text()) if request.param == "stored" else package("-c", KEYS)


def test_every_key_of_the_schema_is_honoured_or_refused_by_name(schema, tmp_path):
    """Each is said alone: the task that is read differs, or the key is named in a refusal, or it is one of `WORDS`."""
    for name in ("plain", "steps"):
        harbor_tasks.make(tmp_path / name, "Do it.", "", "true", "true")
    harbor_tasks.of_steps(tmp_path / "steps", "")
    for step in ("first", "other"):
        harbor_tasks.step(tmp_path / "steps", step, f"Do {step}.", "true", "true")
    seen = {"honoured": [], "refused": [], "words": []}
    for key in schema["keys"]:
        of_steps = key.startswith("steps") or key == "multi_step_reward_strategy"
        folder, base = tmp_path / ("steps" if of_steps else "plain"), {"schema_version": "1.4"}
        base |= {"steps": [{"name": "first"}]} if of_steps else {}
        if "artifacts" in key:
            base |= {"verifier": {"environment_mode": "separate"}}
        for place, table in COMPANY.items():
            if key.startswith(f"{place}."):
                for inner, value in table.items():
                    base = _said(base, f"{place}.{inner}", value)
                if place.endswith(("servers", "collect", "artifacts")):
                    base = _said(base, place, [table])
        before = _read(folder, base)
        try:
            after = _read(folder, _said(base, key, VALUES.get(key.rpartition(".")[2], "some text")))
        except ConfigError as error:
            named = re.sub(r"\[\d+\]", "", re.search(r"key '([^']+)'", str(error))[1])
            assert f"{key}.".startswith(f"{named}."), (key, str(error))
            assert "unknown field" not in str(error), f"{key} is a key of {schema['version']} that harbor_keys lacks"
            seen["refused"].append(key)
            continue
        words = any(key == word or key.startswith(f"{word}.") or key == f"steps.{word}" for word in WORDS)
        changed = dataclasses.replace(before, folder=None) != dataclasses.replace(after, folder=None)
        assert changed != words or key.endswith("mcp_servers.name"), (key, "honoured" if changed else "dropped")
        seen["words" if words else "honoured"].append(key)
    print(schema["version"], {name: len(keys) for name, keys in seen.items()})
    assert len(seen["honoured"]) > 40 and len(seen["refused"]) > 20


COMBINED = """
import json, sys
from types import SimpleNamespace as S
from harbor.models.verifier.result import VerifierResult
from harbor.trial.multi_step import MultiStepTrial
from harbor.models.task.config import MultiStepRewardStrategy as Strategy
out = []
for strategy, steps, least in json.load(sys.stdin):
    results = [S(verifier_result=VerifierResult(rewards=rewards)) for rewards in steps]
    trial = S(result=S(step_results=results), task=S(config=S(multi_step_reward_strategy=Strategy(strategy))))
    trial._aggregate_step_rewards = lambda trial=trial: MultiStepTrial._aggregate_step_rewards(trial)
    whole = MultiStepTrial._select_multi_step_reward(trial)
    out.append([whole and whole.rewards, MultiStepTrial._min_reward_failure(steps[-1], least) is not None])
print(json.dumps(out))
"""


@needs_package
def test_rewards_of_steps_are_combined_as_the_package_combines_them():
    draw = random.Random(0)

    def numbers():
        return {
            name: draw.choice([0, 0.25, 1, -2])
            for name in draw.sample(["reward", "speed", "style"], draw.randint(1, 3))
        }

    cases = [
        (draw.choice(["mean", "final"]), [numbers() for _ in range(draw.randint(1, 4))], draw.choice([0.5, numbers()]))
        for _ in range(300)
    ]
    ran = subprocess.run([PYTHON, "-c", COMBINED], input=json.dumps(cases), capture_output=True, text=True, timeout=120)
    for (strategy, steps, least), (whole, short) in zip(cases, json.loads(ran.stdout), strict=True):
        task = dataclasses.replace(
            rows.from_task(GENERATED),
            rewards_of=strategy,
            min_rewards=least if isinstance(least, dict) else {"reward": least},
        )
        assert judging.combined(task, steps) == pytest.approx(whole)
        assert judging.falls_short(task, steps[-1]) == short


_ABOUT = {"setup": "", "initial_test": "pass", "final_test": "pass", "commands": ["true"], "processes": False}
GENERATED = Task("t", "Do it.", (), "k", {"terminal": {**_ABOUT, "level": 1, "template": "t"}})

GOOD = (["echo one > a"], ["cat given made > b"], ["echo three >> a"])


def test_rewards_of_steps_by_hand():
    task, steps = rows.from_task(GENERATED), [{"reward": 1.0, "speed": 0.5}, {"reward": 0.5}]
    assert judging.combined(task, steps) == {"reward": 0.75, "speed": 0.25}  # what a step does not say is 0
    assert judging.combined(dataclasses.replace(task, rewards_of="final"), steps) == {"reward": 0.5}
    least = dataclasses.replace(task, min_rewards={"reward": 0.5, "speed": 0.0})
    assert not judging.falls_short(least, steps[0]) and judging.falls_short(least, steps[1])


ENDINGS = ("stop", "turns", "time", "length", "context")
PLAYS = {  # of each kind of ending, in the first, the second or the last step
    "steps": [
        {"commands": [*GOOD[: number - 1], GOOD[number - 1] if good else []], "ending": ending}
        for (number, good), ending in itertools.product(((1, True), (2, False), (3, True), (1, False)), ENDINGS)
    ],
    "hello": [
        {"commands": [["echo 'Hello, world!' > hello.txt"] if good else []], "ending": ending}
        for good, ending in itertools.product((True, False), ENDINGS)
    ],
    "silent": [{"commands": [[]], "ending": "stop"}],
}
FINISH = "<action>done</action>"


async def ours(attempt_at, task, play):
    """The reward of the same play in our sandbox; None where the episode fails."""
    attempt = attempt_at(task, len([c for step in play["commands"] for c in step]) if play["ending"] == "turns" else 50)
    try:
        await attempt.start()
        ended = None
        for number, commands in enumerate(play["commands"], 1):
            last = number == len(play["commands"])
            for command in commands:
                ended = (await attempt.step(f"<command>{command}</command>")).stop_reason
            if last and play["ending"] in ("length", "context"):
                ended = StopReason.TOKEN_LIMIT
            elif last and play["ending"] == "time":
                attempt._ends_at = 0.0
                ended = (await attempt.step("<command>true</command>")).stop_reason
                if ended is None:  # the next step has begun, in which nothing is done
                    ended = StopReason.TURN_LIMIT
            elif not last or play["ending"] == "stop":
                ended = (await attempt.step(FINISH)).stop_reason
        for _ in range(3):  # a package's agent that has nothing to do in the steps that are left ends them
            if ended is None:
                ended = (await attempt.step(FINISH)).stop_reason
        return (await attempt.verify(Transcript("", (), (), ended))).reward
    except verify.VerifierError:
        return None
    finally:
        await attempt.close()


@pytest.mark.slow
@needs_package
@pytest.mark.skipif(os.geteuid() != 0, reason="the package's trials get a root of their own, which only root can make")
@pytest.mark.parametrize("name", ["hello", "steps-mean", "steps-final", "silent"])
def test_each_ending_is_worth_what_the_package_gives(name, tmp_path):
    """Stop, turn limit, time limit, length, context full and a failed test: the package's own trials beside ours."""
    folder = Path(harbor_tasks.write_one(tmp_path, name))
    plays = PLAYS[name.partition("-")[0]]
    arguments = (str(Path(__file__).with_name("harbor_trials.py")), str(folder), json.dumps(plays))
    theirs = package(*arguments, timeout=500)
    settings = Terminal(agent_timeout_s=0.0, tools="endless")
    task = Task(name, "", (), "", {"terminal": {"folder": str(folder)}})
    with opened_sandboxes(settings.sandbox) as (sandboxes, workers):

        def attempt_at(task, turns):
            config = dataclasses.replace(settings, max_turns=max(1, turns))
            return TerminalAttempt(task, config, lambda own: sandboxes.take(None))

        for play, their in zip(plays, theirs, strict=True):
            found = workers.run(ours(attempt_at, task, play), 120)
            reward = their["rewards"] and their["rewards"].get("reward")
            assert found == pytest.approx(reward) if reward is not None else found is None, (play, their, found)
