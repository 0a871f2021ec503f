"""One RL step's learning, around the edges: updates in which there is nothing to learn."""

import dataclasses
import types

import numpy as np
import pytest

from configs import echo
from jaxagent import config, loop
from jaxagent.learner.batching import Packer
from jaxagent.learner.programs import Programs
from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory

RL = dataclasses.replace(config.parse(echo.get_config()).rl, updates_per_step=2)


def attempt(number: int, reward: float) -> Episode:
    """An attempt that called no tool: nothing observed, nothing for ECHO to predict."""
    kinds = np.array([TokenKind.PROMPT, TokenKind.ACTION, TokenKind.ACTION], np.uint8)
    sampled = kinds == TokenKind.ACTION
    trajectory = Trajectory(
        np.arange(3, dtype=np.int32), kinds, np.where(sampled, -1.0, 0.0).astype(np.float32),
        np.where(sampled, 0, -1).astype(np.int32), np.zeros(3, np.int32),
    )  # fmt: skip
    return Episode(Task("t", "q", ()), number, (trajectory,), reward, {"solved": reward}, StopReason.ANSWER, 1)


@pytest.mark.parametrize(("rewards", "updates"), [((0.0, 0.0), 0), ((1.0, 0.0), 2)])
def test_an_update_without_targets_is_left_out(rewards, updates):
    """All attempts of a group alike, no observation in any: ECHO keeps the sequences, all without weight."""
    seen = []

    def update(state, batches, train_policy, at, teacher):
        assert batches
        seen.append(len(batches))
        return state + 1, {"loss/total": 0.5}

    packer = Packer(RL.batch, 4, 1)
    programs = Programs(RL, packer, update)
    groups = [Group(Task(f"t{g}", "q", ()), [attempt(i, r) for i, r in enumerate(rewards)]) for g in range(2)]
    parts = types.SimpleNamespace(cfg=types.SimpleNamespace(seed=0))
    experience = types.SimpleNamespace(replay=None)
    state, metrics, _ = loop.learn(parts, programs, 0, groups, experience, 0, RL)
    assert state == len(seen) == updates
    assert metrics["groups/zero_signal_frac"] == (0.0 if updates else 1.0)
    assert ("loss/total" in metrics) == bool(updates)
