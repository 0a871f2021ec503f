"""Whole episodes of software tasks: by an agent program through the gateway, and by the policy's own commands."""

import asyncio
import contextlib

import pytest

from jaxagent.agents.shell import Shell
from jaxagent.gateway.harness import HarnessRollout
from jaxagent.gateway.server import Gateway
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import CHAT_DATE, Chat
from jaxagent.types import StopReason
from tests.envs.coding import tiny
from tests.gateway import world
from tests.gateway.episodes import says
from tests.gateway.scripted import Scripted

LIMITS = {"turn_tokens": 400, "context_tokens": 4000, "max_turns": 6}
FIX = f"<cmd>{tiny.FIX}</cmd>"


def episode(play, kind, config, reply):
    """An episode, and the policy that played it."""
    policy = Scripted(world.tokenizer(), reply)

    async def scene():
        async with Gateway() if kind is HarnessRollout else contextlib.nullcontext() as gateway:
            rollout = kind(
                begin=lambda task: play.begin(config, task),
                policy=policy,
                tokenizer=world.tokenizer(),
                template=Chat(world.TEMPLATE, world.tokenizer().special_strings, CHAT_DATE),
                config=config,
                sampling=world.SAMPLING,
                request_timeout_s=30.0,
                **({"shared": gateway} if gateway else {}),
            )
            return await rollout(tiny.unittest_task(), 0)

    return play.run(asyncio.wait_for(scene(), tiny.TIMEOUT_S), tiny.TIMEOUT_S), policy


@pytest.mark.parametrize(("said", "reward"), [(FIX, 1.0), ("<cmd>touch calc.py</cmd>", 0.0)], ids=["fix", "nothing"])
def test_both_ways_to_play_are_worth_the_same(play, said, reward):
    agent = tiny.make_config(play="agent", agent=Shell(python="/usr/bin/python3"), **LIMITS)
    program, policy = episode(play, HarnessRollout, agent, says("<cmd>cat PROBLEM_STATEMENT.md</cmd>", said, "<done>"))
    assert (program.stop_reason, program.reward, program.error) == (StopReason.ANSWER, reward, "")
    assert "add(2, 3) gives -1." in world.tokenizer().decode(policy.turns[1].context)
    assert len(program.trajectories) == 1 and program.metrics["requests"] == 3
    own, _ = episode(play, MultiTurn, tiny.make_config(**LIMITS), says(said, "<done>"))
    assert (own.stop_reason, own.reward, own.error) == (StopReason.ANSWER, reward, "")
    assert own.metrics["commands"] == 1 and own.rewards == program.rewards == {"resolved": reward}
