"""Tasksets of the package verifiers 0.4: rows, refusals, every end of an attempt beside the package's own; runs."""

import asyncio
import json
import pathlib
import subprocess
import sys
import time

import pytest

from jaxagent import main as cli
from jaxagent.config import ConfigError
from jaxagent.envs.base import Opening
from jaxagent.envs.verifiers import playing, tasksets
from jaxagent.envs.verifiers.tasksets import Taskset
from jaxagent.gateway.harness import HarnessRollout
from jaxagent.gateway.server import Gateway
from jaxagent.rollout.templates import CHAT_DATE, Chat
from jaxagent.types import StopReason, Task
from tests import tiny_run
from tests.envs.verifiers_versions import interpreter
from tests.gateway import world
from tests.gateway.scripted import Scripted

pytestmark = pytest.mark.slow  # installs packages

HERE = pathlib.Path(__file__).parent
VERSION = "0.4.0"
LIMIT_S = 120


@pytest.fixture(scope="module")
def python():
    return str(interpreter(VERSION))


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE / "verifiers_tasksets"))


# ------------------------------------------------------------------------------------------------------------- rows


def described(python, requests):
    """The answer to each named request for tasks, all by one process: name -> (settings, split)."""
    envs, several = {}, {}
    for name, config in requests.items():
        several |= {f"{name}/{split}": split for split in config.envs()}
        envs |= {f"{name}/{split}": env for split, env in config.envs().items()}
    settings = {"envs": envs, "num_tasks": 8, "max_turns": 4, "run_s": 300.0}
    lines = "\n".join(json.dumps({"do": "tasks", "split": name}) for name in several)
    argv = [python, "-P", playing.PROGRAM, json.dumps(settings)]
    done = subprocess.run(argv, input=lines, capture_output=True, text=True, timeout=LIMIT_S)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(several), done.stderr[-2000:]
    return dict(zip(several, answers, strict=True))


def test_rows_and_held_out_rows(python, monkeypatch):
    """Their own, where a taskset has such; the last ones where it has none; never training rows."""
    split = {name: json.dumps({"split": name}) for name in ("test", "both")}
    cases = {
        "plain": Taskset(taskset="letters_tasks"),
        "split": Taskset(taskset="letters_tasks", heldout=split["test"]),
        "shared": Taskset(taskset="letters_tasks", heldout=split["both"]),
        "endless": Taskset(taskset="guess_tasks"),
    }
    answers = described(python, cases)

    def tasks(name, num_heldout):
        told = lambda interpreter, settings, split, timeout_s: answers[f"{name}/{split}"]["tasks"]  # noqa: E731
        monkeypatch.setattr(tasksets, "described_tasks", told)
        return cases[name].tasks(num_heldout)

    plain = tasks("plain", 3)
    assert [row["id"] for row in plain["train"]] == [f"train-{i}" for i in range(5)]
    assert [row["prompt"] for row in plain["heldout"]] == ["Say f.", "Say g.", "Say h."]
    assert plain["train"][0]["metadata"] == {"split": "train", "row": 0, "name": "letter a"}
    own = tasks("split", 3)
    assert len(own["train"]) == 8 and [row["id"] for row in own["heldout"]] == [f"heldout-{i}" for i in range(4)]
    with pytest.raises(ConfigError, match="2 of its 4 held-out rows are training rows"):
        tasks("shared", 3)
    assert [len(rows) for rows in tasks("endless", 2).values()] == [6, 2]


# --------------------------------------------------------------------------------------------------- what is refused

# Every field of the package's schema is the package's own to honour, but those: what has no meaning here, by its name.
REFUSED = {
    "a taskset that is not there": ({"taskset": "no_such_tasks"}, "no_such_tasks"),
    "an unknown key": ({"settings": '{"taskst": {}}'}, "taskst"),
    "sampling": ({"settings": '{"agent": {"sampling": {"temperature": 0.5}}}'}, "agent.sampling: rl.sampling"),
    "a model": ({"settings": '{"agent": {"model": "gpt"}}'}, "agent.model: the policy"),
    "a client": ({"settings": '{"agent": {"client": {"type": "eval"}}}'}, "0 of its roles"),
    "retries": ({"settings": '{"agent": {"retries": {"max_retries": 1}}}'}, "agent.retries"),
    "retries of episodes": ({"settings": '{"retries": {"max_retries": 1}}'}, "retries"),
    "code on this machine": ({"settings": '{"agent": {"harness": {"id": "bash"}}}'}, "agent.runtime"),
    "too much time": ({"settings": '{"agent": {"timeout": {"rollout": 1000}}}'}, "env.run_s=300"),
    "several policies": (
        {"settings": '{"id": "user-sim"}'},
        "roles ['assistant', 'user'] are the policy",
    ),
}


def test_a_taskset_that_blocks_does_not_outlive_the_run(python, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = (HERE / "verifiers_tasksets/letters_tasks.py").read_text()
    blocking = text.replace("def load(self):\n", "def load(self):\n        __import__('time').sleep(300)\n")
    (tmp_path / "blocking_tasks.py").write_text(blocking)
    settings = {"envs": {"train": {"taskset": {"id": "blocking_tasks"}, "agent": {"harness": {"id": "null"}}}}}
    argv = [python, "-P", str(playing.PROGRAM), json.dumps(settings | {"num_tasks": 8, "max_turns": 4, "run_s": 9.0})]
    request = json.dumps({"id": 1, "do": "play", "split": "train", "row": 0, "url": "http://127.0.0.1:9", "token": "x"})
    run = "import subprocess, sys\np = subprocess.Popen(sys.argv[2:], stdin=-1, stdout=-3, stderr=-3)\n"
    run += "p.stdin.write(sys.argv[1].encode() + b'\\n')\np.stdin.flush()\nprint(p.pid)\n__import__('time').sleep(5)"
    done = subprocess.run([sys.executable, "-c", run, request, *argv], capture_output=True, text=True, timeout=LIMIT_S)
    process = pathlib.Path(f"/proc/{int(done.stdout)}/cmdline")  # of a process that has ended and has no parent: empty
    deadline = time.monotonic() + 30.0
    while process.exists() and process.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_what_has_no_meaning_is_refused_by_its_name(python):
    answers = described(
        python, {name: Taskset(**{"taskset": "letters_tasks", **more}) for name, (more, _) in REFUSED.items()}
    )
    for name, (_, told) in REFUSED.items():
        error = answers[f"{name}/train"].get("error", "nothing is wrong")
        assert told in error and "\n" not in error, f"{name}: {error}"


def test_what_is_refused_before_anything_starts(python):
    for more, told in (
        ({"taskset": ""}, "taskset is empty"),
        ({"settings": "[]"}, "must be a JSON object"),
        ({"settings": "{"}, "is no JSON"),
        ({"settings": '{"taskset": {"id": "other"}}'}, "taskset.id is config.env.taskset"),
        ({"run_s": 10_000.0}, "env.run_s=10000"),
        ({"interpreter": "/no/such/python"}, "does not start"),
        ({"interpreter": sys.executable}, "has no verifiers 0.4"),
    ):
        with pytest.raises(ConfigError, match=told):
            Taskset(**{"taskset": "letters_tasks", "interpreter": python, **more}).tasks(2)


SCHEMA = """
import json, verifiers.v1 as vf
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.envs.single_agent.env import SingleAgentEnvConfig as Single
print(json.dumps({c.__name__: sorted(c.model_fields) for c in (Single, AgentConfig, vf.TaskData, vf.TasksetConfig)}))
"""
# What becomes of each field of the package's types: the package's own play honours it ("honoured"), it is refused, or a
# field of ours says it. A version with another field fails here until somebody has looked.
FIELDS = {
    "SingleAgentEnvConfig": {
        "refused": {"retries"},
        "ours": set(),
        "honoured": {"agent", "id", "interception", "max_concurrent_agents", "taskset", "timeout"},
    },
    "AgentConfig": {
        "refused": {"client", "model", "retries", "sampling"},
        "ours": {"max_turns"},  # the less of it and env.max_turns
        "honoured": {
            *("harness", "max_input_tokens", "max_output_tokens", "max_total_tokens", "network_notice", "runtime"),
            "timeout",
        },
    },
    "TaskData": {
        "refused": set(),
        "ours": set(),
        "honoured": {
            *("agent_user", "artifact_max_bytes", "artifacts", "description", "id", "idx", "image", "name"),
            *("network_allow", "network_block", "prompt", "resources", "skills", "system_prompt", "timeout", "workdir"),
        },
    },
    "TasksetConfig": {"refused": set(), "ours": {"id"}, "honoured": {"system_prompt", "task"}},
}


def test_every_field_of_its_schema_is_looked_at(python):
    done = subprocess.run([python, "-c", SCHEMA], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    schema = json.loads(done.stdout.splitlines()[-1])
    assert schema == {name: sorted(set().union(*kinds.values())) for name, kinds in FIELDS.items()}


# -------------------------------------------------------------------------------------------------------------- ends

RUN_S = 8.0
LIMITS = dict(run_s=RUN_S, verify_s=30.0, max_turns=3, turn_tokens=40, context_tokens=700)
# name -> (what the policy writes, N is the number; how it ends; what is told where it is no verdict)
ENDS = {
    "the harness ends": (["It is 99", "It is N, done"], StopReason.ANSWER, None),
    "the taskset's own stop": (["It is N", "never"], StopReason.ANSWER, None),
    "turn limit": (["It is 99", "It is 98", "It is N"], StopReason.TURN_LIMIT, None),
    "length": (["It is N" + " and more" * 60, "done"], StopReason.ANSWER, None),
    "time": (["It is N, sleep"], StopReason.TIME_LIMIT, None),
    "context full, and handled": (["It is N, handled, fill"], StopReason.TOKEN_LIMIT, None),
    "context full": (["It is N, fill"], StopReason.TOKEN_LIMIT, 0.0),
    "the harness fails": (["It is N, crash"], StopReason.ENV_ERROR, "the harness is broken"),
    "a reward fails": (["It is N, divide, done"], StopReason.ENV_ERROR, "division by zero"),
}


@pytest.fixture(scope="module")
def played(python, tmp_path_factory):
    """name -> (episode, policy, what the reward saw, the same by the package alone), one process for each side."""
    folder = tmp_path_factory.mktemp("seen")
    config = Taskset(taskset="guess_tasks", interpreter=python, num_tasks=20, **LIMITS)
    policies = {
        name: Scripted(world.tokenizer(), lambda context, turn, said=said, n=n: said[turn].replace("N", str(n)))
        for n, (name, (said, *_)) in enumerate(ENDS.items())
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE / "verifiers_tasksets"))
        patch.setenv("SEEN", str(folder / "ours"))
        episodes = asyncio.run(asyncio.wait_for(play(config, policies), LIMIT_S))
        # The package alone is sent what the policy sampled.
        end = "<|im_end|>"
        replies = {
            name: [
                [
                    world.tokenizer().decode(turn.sampled).removesuffix(end),
                    "length" if turn.finish == "length" else "stop",
                ]
                for turn in policy.turns
            ]
            for name, policy in policies.items()
        }
        patch.setenv("SEEN", str(folder / "theirs"))
        agent = {"max_turns": config.max_turns, "timeout": {"rollout": config.run_s}}
        cases = {name: [n, replies[name]] for n, name in enumerate(ENDS)}
        argv = [python, HERE / "verifiers_original.py", config.taskset, json.dumps(agent), json.dumps(cases)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = json.loads(done.stdout.splitlines()[-1])

    def seen(side, n):
        path = folder / f"{side}.{n}"
        return json.loads(path.read_text()) if path.exists() else None

    return {
        name: (episodes[name], policies[name], seen("ours", n), seen("theirs", n), wanted[name])
        for n, name in enumerate(ENDS)
    }


async def play(config, policies):
    """name -> episode, each of one attempt behind the gateway, by one process of the package's."""
    closing, episodes = [], {}

    def run(coroutine, timeout_s):  # `open` closes on the loop of the attempts, which is this one
        closing.append(asyncio.get_running_loop().create_task(coroutine))

    async with Gateway("policy") as gateway:
        with config.open(Opening(None, (), run, lambda line: None)) as begin:
            for n, (name, policy) in enumerate(policies.items()):
                rollout = HarnessRollout(
                    begin=begin,
                    policy=policy,
                    tokenizer=world.tokenizer(),
                    template=Chat(world.TEMPLATE, world.tokenizer().special_strings, CHAT_DATE),
                    config=config,
                    sampling=world.SAMPLING,
                    request_timeout_s=30.0,
                    shared=gateway,
                )
                object.__setattr__(rollout, "renderer", world.renderer())  # its template has been looked into
                task = Task(f"train-{n}", "", (), metadata={"split": "train", "row": n})
                episodes[name] = await rollout(task, 0)
        await asyncio.gather(*closing)
    return episodes


@pytest.mark.parametrize("name", ENDS)
def test_what_rewards_see_is_what_the_package_alone_shows_them(played, name):
    _, reason, told = ENDS[name]
    episode, policy, ours, theirs, wanted = played[name]
    assert episode.stop_reason is reason, episode.error
    assert ours == theirs
    world.check(policy, episode.trajectories, episode.task.id)
    if told is None:
        assert episode.reward == wanted["reward"] and ours is not None
        components = {one: value for one, value in episode.rewards.items() if one != "solved"}
        assert components == wanted["scores"] and not wanted["errors"]
    elif told == 0.0:
        assert episode.reward == wanted["reward"] == 0.0 and wanted["errors"]
    else:
        assert told in episode.error and told in wanted["errors"][0]


# ---------------------------------------------------------------------------------------------------------- training

TRAINED = {
    "letters_tasks": ['--config.env.heldout={"split": "test"}'],
    "guess_tasks": ["--config.env.num_tasks=12"],
    "judged_tasks": [],
}


@pytest.mark.parametrize("name", TRAINED)
def test_tasksets_train(python, name, tmp_path):
    """Two steps each by one flag; no attempt fails, and log-probs are the engine's."""
    flags = (
        "--config.stages=rl --config.data.source=verifiers --config.data.source.num_heldout=2 --config.data.num_eval=2"
    )
    flags += " --config.rl.steps=2 --config.eval.every=2 --config.env=verifiers_v1 --config.env.turn_tokens=6"
    own = [f"--config.env.taskset={name}", f"--config.env.interpreter={python}", *TRAINED[name]]
    assert cli.main(tiny_run.argv(tmp_path / name, *flags.split(), *own)) == 0
    _, last = tiny_run.ended(tmp_path / name)
    assert last["logprob_gap/max"] == 0.0 and last["episode/turns"] >= 1
