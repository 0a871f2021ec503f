"""The scripted executor, verifier and generator of arithmetic word problems."""

import asyncio

import pytest

from jaxagent.config.choice import Choice
from jaxagent.envs.agentflow import prompts, reading
from jaxagent.envs.agentflow import roles as arithmetic_team
from jaxagent.envs.agentflow.prompts import action
from jaxagent.envs.agentflow.reading import GENERATOR, PYTHON
from jaxagent.envs.base import Message
from jaxagent.types import Task

QUESTION = "Oscar packs 287 lemons into each of 46 boxes and has 118 more. How many lemons are there?"
TASK = Task("t", QUESTION, ("13320",), "two_step/pack_add")


def says(role, asked):
    speaker = Choice("jaxagent.roles:ROLES").make(f"arithmetic_{role}").speaker(TASK, 0, 0)
    return asyncio.run(speaker.reply((Message("user", asked),), (), 100)).text


def test_the_generator_computes_one_operation_and_estimates_more():
    assert says("generator", "287 * 46") == "13202" and says("generator", "7") == "7"
    assert says("generator", "287 * 46 + 118") == "14652"  # 13320 and a tenth of it
    assert says("generator", "( 287 + 118 ) * 46") == str(18630 + 1863)
    assert says("generator", "12 - 9 - 3") == "1"  # 0 is estimated too


@pytest.mark.parametrize(
    "text",
    ["", "How many?", "2 ** 99999", "7 / 2", "1.5 + 1", "f(1)", "True + 1", "1 +", "(" * 5000, "(" * 150, "9" * 5000,
     "-" * 150 + "1", "\0"],
)  # fmt: skip
def test_what_it_does_not_compute_it_does_not_know(text):
    """The text is written by a policy."""
    assert says("generator", text) == arithmetic_team.UNKNOWN


def test_the_executor_writes_a_program_or_hands_on():
    for tool, query in ((PYTHON, "print(287 * 46)"), (GENERATOR, "287 * 46")):
        asked = prompts.prompt("executor", "compact", False, sub_goal="287 * 46", tool=tool)
        assert reading.query(says("executor", asked)) == query
    assert reading.query(says("executor", "Sub-Goal: none")) is None


@pytest.mark.parametrize(
    ("steps", "concluded"),
    [
        ([("287 * 46", "13202")], "CONTINUE"),  # 118 is left
        ([("287 * 46", "13202"), ("13202 + 118", "13320")], "STOP"),
        ([("287 * 46 + 118", "14652")], "STOP"),  # it does not compute
        ([("287 * 46 + 118", "Execution error: SyntaxError")], "CONTINUE"),
        ([("287 * 46 + 118", "13320"), ("what now", "unknown")], "CONTINUE"),  # the last result is no number
        ([("1287 * 46 + 118", "59320")], "CONTINUE"),
        ([("", "")], "CONTINUE"),
    ],
)
def test_the_verifier_stops_when_every_number_is_used(steps, concluded):
    actions = tuple(action(PYTHON, goal, "", result) for goal, result in steps)
    asked = prompts.prompt("verifier", "compact", False, actions, question=QUESTION)
    assert reading.conclusion(says("verifier", asked)) == concluded
