"""Two plays of an episode: the first number that differs is the one that is named."""

import dataclasses

import numpy as np
import pytest

from jaxagent.gateway.harness import HarnessRollout
from jaxagent.gateway.threads import conversation_key
from jaxagent.replay.record_diff import compare
from jaxagent.replay.resample import conversations, turns
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.play import Play
from jaxagent.types import Episode, Heard, StopReason, Task, Trajectory


def trajectory(length: int = 8) -> Trajectory:
    kinds = np.array([0, 0, 1, 1, 2, 1, 1, 1], np.uint8)[:length]
    logprobs = np.where(kinds == 1, -np.arange(1, length + 1) / 7, 0).astype(np.float32)
    versions, turn = np.where(kinds == 1, 2, -1).astype(np.int32), np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32)
    return Trajectory(np.arange(length, dtype=np.int32), kinds, logprobs, versions, turn[:length])


EPISODE = Episode(
    Task("t", "p", ()), 5, (trajectory(), trajectory()), 1.0, {"em": 1.0, "f1": 0.5}, StopReason.ANSWER, 2,
    turn_rewards=(0.5, 0.5), heard=(Heard("user", (("a", "b"),), None, 1), Heard("judge", (), trajectory(), 2)),
)  # fmt: skip


def changed(number: int, **columns) -> Episode:
    """One number of a trajectory changed: column=(position, value)."""
    several = list(EPISODE.trajectories)
    for name, (position, value) in columns.items():
        column = getattr(several[number], name).copy()
        column[position] = value
        several[number] = dataclasses.replace(several[number], **{name: column})
    return dataclasses.replace(EPISODE, trajectories=tuple(several))


def test_equal_plays_are_equal_and_counted():
    found = compare(EPISODE, dataclasses.replace(EPISODE, metrics={"env_s": 1.0}, text="x"), "here")
    assert (found.first, found.tokens, found.logprobs, found.gap) == (None, 16, 10, 0.0)


BIT = np.nextafter(np.float32(-3 / 7), np.float32(0))


@pytest.mark.parametrize(
    ("again", "told"),
    [
        (changed(1, tokens=(5, 99)), "here, trajectory 1, position 5: tokens is 5 in the record, and 99 now"),
        (changed(0, kinds=(2, 3)), "here, trajectory 0, position 2: kinds is 1 in the record, and 3 now"),
        (changed(0, turns=(7, 2)), "here, trajectory 0, position 7: turns is 1 in the record, and 2 now"),
        (changed(0, policy_versions=(2, 1)), "position 2: policy_versions is 2 in the record, and 1 now"),
        (
            changed(0, logprobs=(2, BIT)),
            "position 2: logprobs is -0.42857143 (0xbedb6db7) in the record, and -0.4285714",
        ),
        (
            changed(0, logprobs=(0, -0.0)),
            "logprobs is 0.0 (0x00000000) in the record, and -0.0 (0x80000000)",
        ),
        (changed(0, tokens=(6, 1), logprobs=(3, 0)), "position 3: logprobs"),  # the first place, not the first column
        (changed(0, logprobs=(3, 0), tokens=(3, 1)), "position 3: tokens"),
        (dataclasses.replace(EPISODE, reward=0.0), "here: reward is 1.0 in the record, and 0.0 now"),
        (dataclasses.replace(EPISODE, rewards={"em": 1.0, "f1": 0.25}), "here: rewards.f1 is 0.5"),
        (dataclasses.replace(EPISODE, rewards={"em": 1.0}), "here: rewards.f1 is 0.5 in the record, and None now"),
        (dataclasses.replace(EPISODE, turn_rewards=()), "turn_rewards is [0.5, 0.5] in the record, and [] now"),
        (dataclasses.replace(EPISODE, stop_reason=StopReason.TURN_LIMIT), "stop_reason is answer"),
        (dataclasses.replace(EPISODE, stop_reason=StopReason.TIMEOUT, trajectories=(), error="slow"), "timeout (slow)"),
        (dataclasses.replace(EPISODE, trajectories=EPISODE.trajectories[:1]), "trajectories is 2"),
        (dataclasses.replace(EPISODE, trajectories=(trajectory(7), trajectory())), "position 7: tokens is 7"),
        (dataclasses.replace(EPISODE, heard=(EPISODE.heard[0],)), "heard is 2"),
        (
            dataclasses.replace(EPISODE, heard=(Heard("user", (("a", "c"),), None, 1), EPISODE.heard[1])),
            "heard 0 (user)",
        ),
        (
            dataclasses.replace(EPISODE, heard=(EPISODE.heard[0], Heard("judge", (), trajectory(6), 2))),
            "heard 1 (judge), position 6",
        ),
    ],
)
def test_the_first_difference_is_named(again, told):
    first = compare(EPISODE, again, "here").first
    assert first is not None and told in str(first)


def test_of_a_recorded_environment_only_the_policys_side_is_compared():
    other = dataclasses.replace(EPISODE, reward=0.0, stop_reason=StopReason.TURN_LIMIT, heard=())
    assert compare(EPISODE, other, "here", recorded=True).first is None
    assert compare(EPISODE, changed(0, tokens=(3, 9)), "here", recorded=True).first is not None


def test_the_largest_gap_is_of_the_beginning_that_is_equal():
    other = changed(0, logprobs=(2, -0.5), tokens=(5, 99))
    assert compare(EPISODE, other, "here").gap == pytest.approx(0.5 - 3 / 7)
    assert compare(EPISODE, changed(0, tokens=(2, 99), logprobs=(6, -9.0)), "here").gap == 0


def test_turns_are_found_by_kind_and_number():
    assert turns(trajectory()) == [(2, 4), (5, 8)]
    together = dataclasses.replace(trajectory(), kinds=np.ones(8, np.uint8))
    assert turns(together) == [(0, 4), (4, 8)]  # nothing was said between them


def test_conversations_have_the_numbers_that_key_them():
    assert conversations(dataclasses.replace(EPISODE, trajectories=EPISODE.trajectories[:1]), MultiTurn) == [0]
    # begun in this order: the policy, the user (after 1), the policy, the judge (after 2)
    assert conversations(EPISODE, Play) == [0, 2]
    context = [0, 1]
    keys = [conversation_key(context, occurrence) for occurrence in (0, 1)]
    assert conversations(EPISODE, HarnessRollout) == keys and keys[0] != keys[1]
