"""The real package openenv: its environments train, its schemas are covered, its client is paid what we are.

JAXAGENT_OPENENV_PYTHON names a Python that has it, and the environments echo_env, grid_world_env, maze_env,
connect4_env, reasoning_gym_env and coding_env of its repository.
"""

import asyncio
import dataclasses
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess

import numpy as np
import pytest

from jaxagent import main as cli
from jaxagent.config import SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.openenv import manifest, wire
from jaxagent.envs.openenv.environment import OpenEnv
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.types import StopReason, Task
from tests import tiny_run
from tests.envs import served
from tests.rollout.scripted import ScriptedPolicy

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
GAME = HERE / "openenv_signals"
SERVERS = ("echo_env", "grid_world_env", "maze_env", "connect4_env", "reasoning_gym_env", "coding_env")


def python(*modules):
    return served.python_of("JAXAGENT_OPENENV_PYTHON", "openenv", *modules)


def asked(code):
    """What a line of Python says in the package's own Python, as JSON."""
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SERVERS)
def test_an_environment_of_the_repository_trains(name, tmp_path):
    flags = ["--config.stages=rl", "--config.rl.steps=2", "--config.env=openenv", "--config.data.source=seeds"]
    flags += [f"--config.env.server={name}.server.app:app", f"--config.env.python={python(name)}"]
    flags += [
        "--config.env.context_tokens=1024",
        "--config.rl.batch.row_tokens=1024",
        "--config.env.step_timeout_s=120",
    ]
    flags += ["--config.engine.prefill_tokens=1024", "--config.engine.pages=160", "--config.data.source.num_heldout=8"]
    flags += ["--config.env.action=message"] if name != "echo_env" else []
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags)) == 0
    tiny_run.ended(tmp_path / "run")


# Resets, what the policy writes, how it ends, and what of its actions the server has seen.
RIGHT = ["<action>south</action>", "<action>west</action>", "<action>south</action>"]  # of train, 3
EXPLAINED = "This one is red, I think, so I go to the place where it is cold: <action>north</action>"
CASES = {
    "stop": ({}, RIGHT, {}, StopReason.ANSWER, 3),
    "paid at the end": ({"late_reward": True}, RIGHT, {}, StopReason.ANSWER, 3),
    "wrong": ({}, ["<action>north</action>"] * 3, {}, StopReason.ANSWER, 3),
    "turn limit": ({}, RIGHT, {"max_turns": 2}, StopReason.TURN_LIMIT, 2),
    "length": ({}, [RIGHT[0], EXPLAINED], {"turn_tokens": 20}, StopReason.TOKEN_LIMIT, 1),
    "context full": ({}, RIGHT, {"context_tokens": 0}, StopReason.TOKEN_LIMIT, 1),
    "time limit": ({"slow_s": 1.2}, RIGHT, {}, StopReason.TIME_LIMIT, 1),
    "no answer": ({"slow_s": 1.5}, RIGHT, {"step_timeout_s": 0.5}, StopReason.TIMEOUT, 3),
    "broken": ({"crash_at": 1}, RIGHT, {}, StopReason.ENV_ERROR, 3),
}


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    """The game with a time limit of its own, as a server of ours and its attempts; and the tokenizer."""
    folder = shutil.copytree(GAME, tmp_path_factory.mktemp("game") / "signals")
    told = (folder / manifest.FILE).read_text().replace("episode_timeout_s: 60.0", "episode_timeout_s: 1.0")
    (folder / manifest.FILE).write_text(told)
    tokenizer = Tokenizer.train(["".join(RIGHT)] * 20, 300, ["</action>"])
    environment = OpenEnv(server=str(folder), python=python(), max_turns=8, turn_tokens=200, context_tokens=2000)
    yield environment, tokenizer


def test_at_every_end_the_packages_client_is_paid_the_same(game):
    environment, tokenizer = game
    episodes = {}
    with served.opened(environment) as (attempt_at, run):
        for name, (reset, script, settings, _, _) in CASES.items():
            if "context_tokens" in settings:  # full behind the first observation
                sampled = np.flatnonzero(episodes["stop"].trajectories[0].action_mask)
                settings = {"context_tokens": int(sampled[1:][np.diff(sampled) > 1][0])}
            config = dataclasses.replace(environment, episode_timeout_s=30, **settings)
            task = Task(name, "Go.", (), "", {"reset": {"seed": 3, **reset}})

            def begin(task, config=config):
                attempt = attempt_at(task)
                attempt._config = config
                return attempt

            policy = ScriptedPolicy(tokenizer, lambda task, sample, script=script: script)
            rollout = MultiTurn(begin, policy, tokenizer, Plain(), config, SamplingConfig(1.0, 1.0, 0, 0.0), 5.0)
            episodes[name] = run(rollout(task, 0))
        servers = attempt_at(task)._servers
        moves = [{"way": re.search(">(.*)<", text)[1]} for text in RIGHT]
        plays = [
            [{"seed": 3, **reset}, (moves if name != "wrong" else [{"way": "north"}] * 3)[:seen], limit]
            for name, (reset, _, settings, _, seen) in CASES.items()
            for limit in [settings.get("step_timeout_s", 60)]
        ]
        command = [python(), str(HERE / "openenv_client.py"), servers._places[0].url, json.dumps(plays)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
    for (name, case), theirs in zip(CASES.items(), json.loads(done.stdout.splitlines()[-1]), strict=True):
        episode, ends = episodes[name], case[3]
        assert episode.stop_reason is ends, (name, episode.stop_reason, episode.error)
        if ends in (StopReason.TIMEOUT, StopReason.ENV_ERROR):  # no reward, there and here
            assert theirs["error"] and episode.error, name
        else:
            assert not theirs["error"] and episode.reward == sum(r or 0.0 for r in theirs["rewards"]), (name, theirs)
            assert theirs["done"] == (ends is StopReason.ANSWER), name
    assert "the lamp is broken" in episodes["broken"].error and "in 0.5 s" in episodes["no answer"].error
    assert episodes["stop"].reward == 3.0 and episodes["wrong"].reward == 0.0


def test_every_key_of_the_manifest_is_known():
    """The schema that the package publishes, and what its own commands read beside it."""
    schema = asked(
        "import json, pathlib, openenv.validation as v; "
        "print((pathlib.Path(v.__file__).parent / 'schemas/manifest-v2.schema.json').read_text().replace('\\n', ''))"
    )
    known = {*manifest.USED, *manifest.UNUSED}

    def leaves(form, prefix):
        while "$ref" in form:
            form = schema["$defs"][form["$ref"].rpartition("/")[2]]
        branches = [one for one in form.get("anyOf", ()) if one.get("type") != "null"]
        if branches:
            yield from leaves(branches[0], prefix)
        elif prefix in known or not form.get("properties"):
            yield prefix
        else:
            for name, inner in form["properties"].items():
                yield from leaves(inner, f"{prefix}.{name}")

    own = {"manifest_schema_version", "signature"}  # made by the parser
    named = {
        f"validation.{key}" if key not in ("name", "version") else key for key in schema["properties"].keys() - own
    }
    found = {leaf for key in named for leaf in leaves(schema["properties"][key.rpartition(".")[2]], key)}
    assert found - known == set()
    template = asked(
        "import json, pathlib, yaml, openenv.cli as c; p = pathlib.Path(c.__file__).parent; "
        "print(json.dumps(sorted(yaml.safe_load((p / 'templates/openenv_env/openenv.yaml').read_text()))))"
    )
    read = asked(
        "import json, pathlib, re, openenv as o; "
        "texts = [p.read_text() for p in pathlib.Path(o.__file__).parent.rglob('*.py')]; "
        r"""print(json.dumps(sorted({k for t in texts for k in re.findall(r'\bmanifest\.get\("(\w+)"', t)})))"""
    )
    assert {*template, *read} - {"validation"} <= known, (template, read)


def test_every_field_of_the_wire_is_known():
    """A newer version's messages, requests and answers: all fields of all models are those that are handled here."""
    fields = asked(
        "import json, inspect, openenv.core.env_server.types as t, openenv.core.env_server.mcp_types as m; "
        "from pydantic import BaseModel; "
        "of = lambda o: inspect.getmembers(o, inspect.isclass); "
        "print(json.dumps({n: sorted(c.model_fields) for o in (t, m) for n, c in of(o) if issubclass(c, BaseModel) "
        "and c.__module__ == o.__name__}))"
    )
    assert fields == json.loads((HERE / "openenv_wire.json").read_text())
    codes = asked(
        "import json, openenv.core.env_server.types as t; print(json.dumps([one.value for one in t.WSErrorCode]))"
    )
    assert {wire.FULL, wire.INVALID} < set(codes)


def test_actions_of_the_packages_own_models_are_read_and_taken(game):
    environment, _ = game
    notes = []
    with served.opened(environment, notes=notes) as (attempt_at, run):
        attempt = attempt_at(Task("t", "Follow the signals.", (), "", {"seed": 3}))
        (prompt,) = run(attempt.start())
        assert prompt.content == runpy.run_path(str(GAME / "demonstrations.py"))["HEAD"] + "blue 152\n"
        assert attempt._protocol.form.plain == "way" and "one of north, south, east, west" in notes[-1]
        assert run(attempt.step("<action>up</action>")).observation.text.startswith("\nNo action: way must be one of")
        assert run(attempt.step("<action>south</action>")).observation.text.startswith("\n")
        run(attempt.close())
    assert "validation.resources.cpu" in notes[0]


def test_a_server_lists_its_tasks(game):
    environment, _ = game
    tasks = environment.tasks(10)
    assert (len(tasks["train"]), len(tasks["heldout"])) == (2000, 64)
    assert tasks["heldout"][5]["metadata"]["reset"] == {"split": "test", "index": 5}


def test_a_server_that_dies_costs_its_attempts_and_is_started_again(game):
    environment, _ = game
    with served.opened(environment) as (attempt_at, run):
        first, second = (attempt_at(Task("t", "", (), "", {"seed": 3})) for _ in range(2))
        run(first.start())
        os.kill(_server_pid(first), 9)
        with pytest.raises(ConnectionError, match="closed the session"):
            run(first.step("<action>south</action>"))
        run(first.close())
        run(second.start())
        assert run(second.step("<action>south</action>")).observation
        run(second.close())


def _server_pid(attempt):
    """Of the server's own process, below its keeper."""
    keeper = attempt._session[1].process._process.pid
    return int(pathlib.Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])


def test_a_server_that_takes_one_session_gets_another_process_and_a_third_attempt_waits(game):
    environment, _ = game
    environment = dataclasses.replace(environment, variables=("MAX_CONCURRENT_ENVS=1",), processes=2)
    task = Task("t", "", (), "", {"seed": 3})
    with served.opened(environment) as (attempt_at, run):

        async def play():
            first, second, third = (attempt_at(task) for _ in range(3))
            await asyncio.gather(first.start(), second.start())
            assert first._session[1].url != second._session[1].url
            waits = asyncio.create_task(third.start())
            await asyncio.sleep(0.5)
            assert not waits.done()
            await first.close()
            await waits
            assert third._session[1].url == first._session[1].url
            await asyncio.gather(second.close(), third.close())

        run(play())
