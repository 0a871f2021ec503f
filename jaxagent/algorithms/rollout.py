"""What an algorithm sees: one batch of groups, and its trajectories in one fixed order. NumPy only.

Axis letters: N groups, G samples per group, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxagent.algorithms.distill import Scores
from jaxagent.types import Episode, Group, TokenKind, Trajectory


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One rollout batch. Lists run in the order of `trajectories(groups)`."""

    groups: Sequence[Group]
    progress: float  # of the stage, in [0, 1)
    reference: Sequence[np.ndarray] | None  # f32[T] each: log-probs under the reference, when one is kept
    old: Sequence[np.ndarray] | None  # f32[T] each: log-probs under the learner's policy now, when a choice reads them
    values: Sequence[np.ndarray] | None  # f32[T] each: the critic's values, when the advantage reads them
    teacher: Sequence[Scores] | None = None  # with rl.distill
    students: Sequence[np.ndarray] | None = None  # i32[T, K] each: the policy's top-k tokens, when the support has them


def walk(groups: Sequence[Group]) -> Iterator[tuple[int, int, Episode, Trajectory]]:
    """(group index, index inside the group, episode, trajectory) of every trajectory with an action token."""
    for g, group in enumerate(groups):
        for s, episode in enumerate(group.episodes):
            for trajectory in episode.trajectories:
                if action_mask(trajectory).any():
                    yield g, s, episode, trajectory


def trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """The trajectories that algorithms see, in their order: those with at least one action token."""
    return [trajectory for _, _, _, trajectory in walk(groups)]


def action_mask(trajectory: Trajectory) -> np.ndarray:
    """f32[T]: 1 for tokens the policy is trained on."""
    mask = (trajectory.kinds == TokenKind.ACTION).astype(np.float32)
    mask[:1] = 0.0  # nothing predicts the first token
    return mask


def rewards(groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray]:
    """Rewards f64[N, G] and the mask bool[N, G] of attempts that did not fail."""
    shape = (len(groups), max((len(group.episodes) for group in groups), default=0))
    values, counted = np.zeros(shape), np.zeros(shape, bool)
    for g, group in enumerate(groups):
        for s, episode in enumerate(group.episodes):
            values[g, s], counted[g, s] = episode.reward, not episode.stop_reason.is_failure
    return values, counted
