"""What an algorithm sees: the trajectories of a batch of groups in one fixed order, each with what models say of it.

NumPy only. Axis letters: N groups, G attempts per group, T tokens, K top-k tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxagent.algorithms.distill import Scores
from jaxagent.types import Episode, Group, TokenKind, Trajectory


@dataclasses.dataclass(frozen=True)
class ModelScores:
    """What models say of `trajectories(groups)`, one array each; None where no choice of the algorithm reads it."""

    reference: Sequence[np.ndarray] | None = None  # f32[T] log-probs under the reference
    old: Sequence[np.ndarray] | None = None  # f32[T] log-probs under the learner's policy before its first update
    values: Sequence[np.ndarray] | None = None  # f32[T] the critic's
    teacher: Sequence[Scores] | None = None
    students: Sequence[np.ndarray] | None = None  # i32[T, K] the policy's most likely tokens


NO_SCORES = ModelScores()  # for an algorithm that reads none


@dataclasses.dataclass(frozen=True)
class Sample:
    """One trajectory with an action token, where it comes from, and its part of `ModelScores`."""

    trajectory: Trajectory
    episode: Episode
    group: int  # index of its group
    attempt: int  # index of its episode inside the group
    mask: np.ndarray  # f32[T] its `action_mask`
    reference: np.ndarray | None
    old: np.ndarray | None
    values: np.ndarray | None
    teacher: Scores | None
    student: np.ndarray | None


def samples(groups: Sequence[Group], scores: ModelScores) -> list[Sample]:
    """The samples of a batch, in the order of `trajectories(groups)`.

    Raises:
      ValueError: scores that are not one per trajectory.
    """
    walked = list(_walk(groups))
    columns = (scores.reference, scores.old, scores.values, scores.teacher, scores.students)
    rows = zip(*([None] * len(walked) if column is None else column for column in columns), strict=True)
    return [
        Sample(trajectory, episode, group, attempt, action_mask(trajectory), *row)
        for (group, attempt, episode, trajectory), row in zip(walked, rows, strict=True)
    ]


def trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """The trajectories that algorithms see, in their order: those with at least one action token."""
    return [trajectory for _, _, _, trajectory in _walk(groups)]


def _walk(groups: Sequence[Group]) -> Iterator[tuple[int, int, Episode, Trajectory]]:
    for g, group in enumerate(groups):
        for s, episode in enumerate(group.episodes):
            for trajectory in episode.trajectories:
                if action_mask(trajectory).any():
                    yield g, s, episode, trajectory


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
