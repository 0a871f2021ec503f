"""Environments of the verifiers interface as ours: rows, turns, tools, rubrics; what is wrong with them."""

import asyncio
import contextlib

import pytest

from jaxagent.config import ConfigError
from jaxagent.data.sources import load_tasks
from jaxagent.data_pipelines.sources import Rows
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.verifiers.environment import Verifiers
from jaxagent.envs.verifiers.playing import Player
from jaxagent.sandbox.base import SandboxError
from jaxagent.types import StopReason, Task, TokenKind

HERE = "tests.envs.verifiers_env"
GUESS = Verifiers(make=f"{HERE}:load_guess", max_turns=9)
TOOLS = Verifiers(make=f"{HERE}:load_tools", max_turns=5, solved_reward=2.0)


def row(number=1, split="train"):
    return Task(f"{split}-{number}", "", (), metadata={"split": split, "row": number})


def opened(environment, tasks=()):
    return environment.open(Opening(None, tasks, None, lambda line: None))


def play(environment, actions, task=None, judged=True):
    """(prompt, steps, verdict, counters) of one attempt."""

    async def run():
        with opened(environment) as attempt_at:
            attempt = attempt_at(task or row())
            prompt = await attempt.start()
            steps = [await attempt.step(action) for action in actions]
            verdict = judged and await attempt.verify(Transcript("", tuple((action, "") for action in actions)))
            await attempt.close()
            return prompt, steps, verdict, attempt

    return asyncio.run(run())


def test_turns_and_rubric():
    prompt, steps, verdict, attempt = play(GUESS, ["3", "6", "5"])
    assert [(m.role, m.content) for m in prompt] == [("system", "Guess a number."), ("user", "number 1")]
    assert steps[0].observation.parts == (("\nhigher\n", TokenKind.OBSERVATION),)
    assert steps[1].observation.text == "\nlower\n" and steps[1].observation.role == "user"
    assert steps[2].stop_reason == StopReason.ANSWER
    assert verdict.components == {"correct": 1.0, "quick": 1 / 3, "shout": 2.0, "solved": 1.0}
    assert verdict.reward == 1.0 + 0.5 / 3
    assert attempt.stop_strings == ()


def test_its_own_turn_limit_holds():
    _, steps, verdict, _ = play(GUESS, ["1"] * 4)
    assert [step.stop_reason for step in steps] == [None, None, None, StopReason.TURN_LIMIT]
    assert verdict.reward == 0.5 / 4 and verdict.components["solved"] == 0.0


def test_attempts_share_nothing():
    async def run():
        with opened(GUESS) as attempt_at:
            one, two, again = attempt_at(row(0)), attempt_at(row(2)), attempt_at(row(0))
            await one.start(), await two.start()
            shown = [await attempt.step("5") for attempt in (one, two)]
            for attempt in (one, two):
                await attempt.verify(Transcript("", (("5", "lower"),), ended=StopReason.TOKEN_LIMIT))
                await attempt.close()
            await again.start()
            assert "asked" in one._seat.state["info"] and "asked" not in again._row["info"]
            await again.close()
        return [step.observation.text.strip() for step in shown], one._seat.state["low"], two._seat.state["low"]

    assert asyncio.run(run()) == (["lower", "higher"], [False], [True])


def test_tools():
    call = 'So: <tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    prompt, steps, verdict, attempt = play(TOOLS, [call, "It is 42."])
    assert prompt[0].role == "system" and '"name": "multiply"' in prompt[0].content
    assert attempt.stop_strings == ("</tool_call>",)
    assert steps[0].observation.role == "tool" and steps[0].observation.text == "\n42\n"
    assert steps[1].stop_reason == StopReason.ANSWER
    assert verdict.reward == 2.0 and verdict.components == {"right": 1.0, "solved": 1.0}
    assert attempt.counters == {"calls": 1.0, "invalid_actions": 0.0}


def test_a_call_that_cannot_be_read_is_text_as_servers_leave_it():
    """The environment takes it for an answer, and so ends."""
    _, steps, _, attempt = play(TOOLS, ["<tool_call>multiply</tool_call>"], judged=False)
    assert steps[0].stop_reason == StopReason.ANSWER and attempt.counters["invalid_actions"] == 1.0
    assert attempt._seat.state["completion"][-1]["content"] == "<tool_call>multiply</tool_call>"


def test_a_crash_is_an_exception_and_no_reward():
    with pytest.raises(RuntimeError, match="out of numbers"):
        play(GUESS, ["crash"])


def test_rows_become_tasks(tmp_path):
    Rows(num_heldout=1).write(tmp_path / "guess", 0, GUESS)
    Rows().write(tmp_path / "tools", 0, TOOLS)

    def read(name, split):
        source = load_tasks(tmp_path / name, split, False)
        return [source[i] for i in range(len(source))]

    assert [one.metadata for one in read("guess", "train")] == [{"split": "train", "row": i} for i in range(2)]
    (held,) = read("guess", "heldout")
    assert held.metadata == {"split": "train", "row": 2} and held.answers == ("7",) and held.prompt == "number 2"
    assert play(GUESS, ["7"], held)[2].components["correct"] == 1.0
    assert [one.metadata["split"] for one in read("tools", "heldout")] == ["heldout"]
    assert len(read("tools", "train")) == 3


def test_arguments_reach_the_function():
    environment = Verifiers(make=GUESS.make, arguments='{"numbers": [1, 2]}')
    assert len(environment.tasks(1)["train"]) == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"make": f"{HERE}:missing"}, "missing"),
        ({"make": f"{HERE}:load_nothing"}, "no env_response"),
        ({"make": f"{HERE}:load_for_groups"}, "whole groups"),
        ({"make": f"{HERE}:load_guess", "arguments": "[1]"}, "JSON object"),
        ({"make": f"{HERE}:load_guess", "arguments": '{"number": 1}'}, "number"),
        ({"make": ""}, "is empty"),
    ],
)
def test_what_cannot_be_made_is_refused_at_start(settings, told):
    with pytest.raises(ConfigError, match=told):
        opened(Verifiers(**settings)).__enter__()


@pytest.mark.parametrize("task", [Task("t", "", ()), row(3), row(0, "heldout")])
def test_tasks_that_are_no_rows_are_refused_at_start(task):
    with pytest.raises(ConfigError, match="row"):
        opened(GUESS, (task,)).__enter__()


PLAYERS = {
    "what is no answer": "echo nonsense; exec sleep 60",
    "its end": "echo out of memory >&2; exit 3",
    "nothing, and it reads nothing": "exec sleep 60",
}


@pytest.mark.parametrize("says", PLAYERS)
def test_attempts_wait_for_no_player_that_cannot_answer(tmp_path, says):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{PLAYERS[says]}\n")
    program.chmod(0o755)

    async def run():
        player = Player(str(program), {})
        try:
            async with asyncio.timeout(20):
                if "nothing" in says:
                    play = asyncio.create_task(player.play({"text": "x" * 2**22}))  # more than a pipe takes
                    await asyncio.sleep(0.3)
                    play.cancel()
                    await asyncio.gather(play, return_exceptions=True)
                else:
                    with pytest.raises(SandboxError, match="has ended: .*" + ("memory" if "end" in says else "")):
                        await player.play({})
        finally:
            with contextlib.suppress(ProcessLookupError):
                player._process.kill()
            await player.close()

    asyncio.run(run())
