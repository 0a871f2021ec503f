"""The real package nemo-gym: its resources servers train, its request is covered, its agent is given what we are.

JAXAGENT_NEMO_GYM_PYTHON names a Python that has it.
"""

import dataclasses
import json
import pathlib
import subprocess

import numpy as np
import pytest

from jaxagent import main as cli
from jaxagent.config import SamplingConfig
from jaxagent.data import rows as data_rows
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.nemo_gym import rows
from jaxagent.envs.nemo_gym.environment import NemoGym
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.types import StopReason
from tests import tiny_run
from tests.envs import served
from tests.rollout.scripted import ScriptedPolicy

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
CLASSES = {
    "example_multi_step": "ExampleMultiStepResourcesServer",
    "example_session_state_mgmt": "StatefulCounterResourcesServer",
}


def python():
    return served.python_of("JAXAGENT_NEMO_GYM_PYTHON", "nemo_gym", "resources_servers")


def asked(code):
    """What a line of Python says in the package's own Python, as JSON."""
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def server_of(name):
    return f"resources_servers.{name}.app:{CLASSES[name]}"


def published(name):
    """The rows that the package has of a server."""
    place = asked(f"import json, resources_servers.{name}.app as a; print(json.dumps(a.__file__))")
    return [json.loads(line) for line in (pathlib.Path(place).parent / "data/example.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", CLASSES)
def test_a_resources_server_trains(name, tmp_path):
    (tmp_path / "data").mkdir()
    lines = []
    for i, row in enumerate(published(name)):
        for message in row[rows.PARAMS]["input"]:
            message["content"] = message["content"][:400]  # a policy that is small knows few words
        lines.append(json.dumps({**row, "id": i}) + "\n")
    (tmp_path / "data/train.jsonl").write_text("".join(lines[1:]))
    (tmp_path / "data/heldout.jsonl").write_text(lines[0])
    flags = [
        "--config.stages=rl",
        "--config.rl.steps=2",
        "--config.env=nemo_gym",
        f"--config.env.server={server_of(name)}",
    ]
    flags += [
        f"--config.env.python={python()}",
        f"--config.data.source={tmp_path / 'data'}",
        "--config.data.num_eval=1",
    ]
    flags += ["--config.env.context_tokens=3072", "--config.rl.batch.row_tokens=3072", "--config.engine.pages=450"]
    flags += ["--config.engine.prefill_tokens=1024"]
    assert cli.main(tiny_run.argv(tmp_path / "run", *flags)) == 0
    tiny_run.ended(tmp_path / "run")


def call(name, **arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


ADD = call("increment_counter", count=1)
LOOK = ["get_counter_value", {}]
ONE = ["increment_counter", {"count": 1}]
LONG = "I have counted with great care, and what I have found is that the answer must be: " + "three " * 40
# What the policy writes, how it ends, the messages of the model that NeMo-Gym's agent sees, and the steps it may take.
CASES = {
    "stop": ([ADD, ADD, "Done."], {}, StopReason.ANSWER, [["", [ONE], ""]] * 2 + [["Done.", [], ""]], 9),
    "too few": ([ADD, "Done."], {}, StopReason.ANSWER, [["", [ONE], ""], ["Done.", [], ""]], 9),
    "thoughts": (["<think>One</think>I add." + ADD + ADD, "<think>ok</think>"], {}, StopReason.ANSWER,
                 [["<think>One</think>I add.", [ONE, ONE], ""], ["<think>ok</think>", [], ""]], 9),
    "turn limit": ([ADD, ADD, "Done."], {"max_turns": 2}, StopReason.TURN_LIMIT, [["", [ONE], ""]] * 2, 2),
    "length": ([ADD, ADD, LONG], {"turn_tokens": 100}, StopReason.TOKEN_LIMIT,
               [["", [ONE], ""]] * 2 + [["CUT", [], "length"]], 9),
    "context full": ([ADD, ADD, "Done."], {"context_tokens": 0}, StopReason.TOKEN_LIMIT,
                     [["", [ONE], ""], ["", [], "length"]], 9),
    "wrong arguments": ([call("increment_counter", n=1), ADD, ADD, "Done."], {}, StopReason.ANSWER,
                        [["", [["increment_counter", {"n": 1}]], ""], *[["", [ONE], ""]] * 2, ["Done.", [], ""]], 9),
    "broken": ([ADD], {"broken": True}, StopReason.ENV_ERROR, [], 9),
}  # fmt: skip


def test_at_every_end_the_packages_agent_is_given_the_same():
    """The counter of the package must be at two; rewards and the response's items are compared."""
    row = next(row for row in published("example_session_state_mgmt"))
    row = {**row, "id": 0, "initial_count": 0, "expected_count": 2}
    environment = NemoGym(
        server=server_of("example_session_state_mgmt"),
        python=python(),
        max_turns=8,
        turn_tokens=400,
        context_tokens=6000,
    )
    tokenizer = Tokenizer.train([ADD] * 20, 400, ["</tool_call>"])
    episodes, plays, responses = {}, [], {}
    with served.opened(environment) as (attempt_at, run):
        for name, (script, settings, _, messages, most) in CASES.items():
            own = {key: value for key, value in row.items() if key != "initial_count" or "broken" not in settings}
            settings = {key: value for key, value in settings.items() if key != "broken"}
            if "context_tokens" in settings:  # full behind the first observation
                sampled = np.flatnonzero(episodes["stop"].trajectories[0].action_mask)
                settings = {"context_tokens": int(sampled[1:][np.diff(sampled) > 1][0])}
            config = dataclasses.replace(environment, episode_timeout_s=30, **settings)

            def begin(task, config=config, name=name):
                attempt = responses[name] = attempt_at(task)
                attempt._config = config
                return attempt

            policy = ScriptedPolicy(tokenizer, lambda task, sample, script=script: script)
            rollout = MultiTurn(begin, policy, tokenizer, Plain(), config, SamplingConfig(1.0, 1.0, 0, 0.0), 5.0)
            episodes[name] = run(rollout(data_rows.to_task(own, False), 0))
            output = responses[name]._output
            cut = output[-1]["content"][0]["text"] if name == "length" else ""
            plays.append([own, [[cut if text == "CUT" else text, *rest] for text, *rest in messages], most])
        url = responses["stop"]._url
        command = [python(), str(HERE / "nemo_agent.py"), url, json.dumps(plays)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
    for (name, case), theirs in zip(CASES.items(), json.loads(done.stdout.splitlines()[-1]), strict=True):
        episode, ends = episodes[name], case[2]
        assert episode.stop_reason is ends, (name, episode.stop_reason, episode.error)
        if ends is StopReason.ENV_ERROR:  # no reward, there and here
            assert theirs["error"] and "/seed_session answered" in episode.error, name
            continue
        assert not theirs["error"] and episode.reward == theirs["reward"], (name, theirs)
        assert [_shape(item) for item in responses[name]._output] == [_shape(item) for item in theirs["items"]], name
    assert [episodes[name].reward for name in ("stop", "too few", "turn limit")] == [1.0, 0.0, 1.0]


def _shape(item):
    content = item.get("content")
    return item["type"], item.get("name"), item.get("output"), content[0]["text"] if content else None


def test_every_parameter_of_a_request_is_known():
    """The request's model, the base requests, and how a verdict says that it measures nothing."""
    fields = asked(
        "import json; from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming as R; "
        "import nemo_gym.base_resources_server as b; "
        "of = lambda c: sorted(c.model_fields); "
        "print(json.dumps([of(R), of(b.BaseRunRequest), of(b.BaseVerifyRequest), of(b.BaseVerifyResponse), "
        "of(b.BaseMultiRewardVerifyResponse), of(b.BaseSeedSessionRequest)]))"
    )
    assert set(fields[0]) == {*rows.USED, *rows.UNUSED, *rows.REFUSED}
    run = {rows.PARAMS, "capture_rollout_id"}
    verdict = {"reward", "mask_sample", "failure_kind", "failure_reason"}
    assert set(fields[1]) == run and set(fields[2]) == run | {"response"}
    assert set(fields[3]) == run | {"response"} | verdict
    assert set(fields[4]) == run | {"response", "reward_components"} | verdict and fields[5] == []


def test_published_rows_are_read_or_refused_by_name():
    """The first example of every server of the package."""
    place = pathlib.Path(
        asked("import json, resources_servers.example_multi_step.app as a; print(json.dumps(a.__file__))")
    )
    read, refused = [], []
    for file in sorted(place.parents[1].glob("*/data/example.jsonl")):
        row = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
        if rows.PARAMS not in row:
            continue
        try:
            read.append(data_rows.to_task(row, False, data_rows.Reading("nemo_gym")))
        except data_rows.RowError as error:
            assert rows.PARAMS in error.column, (file, error)
            refused.append(error.column)
    assert len(read) >= 110 and len(refused) <= 20, (len(read), refused)
