"""What an algorithm is given and what it makes: a `Sample` of every trajectory in, `Streams` for the blind learner out.

A sample is a trajectory, where it comes from, and what models say of it. Streams are one number per token and
component, made by an algorithm (`compose.py`) or by `supervised.py`, normalised over one optimiser update by
`aggregate.py` and packed by `learner/batching.py`. NumPy only.
Axis letters: N groups, G attempts per group, T tokens, K top-k tokens.

The learner's loss is, with nothing hidden,

    sum over sequences and tokens of   policy_weights * objective(logprob, old logprob, advantage)
                                     + kl_weights     * KL estimate(logprob, reference logprob)
                                     - entropy_weights * entropy
                                     + z_weights      * (log Z)^2
                                     + ce_weights     * (-logprob)                      at temperature 1
                                     + nll_weights    * (-logprob)                      at the sampling temperature
                                     + distill_weights * divergence to the teacher      (distill.py)
                                     + value_weights  * value loss(value, old value, return)      (critic)

so every mean, mask, coefficient and denominator is inside the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxagent import contract
from jaxagent.algorithms.distill import Scores, Support
from jaxagent.config import RLConfig
from jaxagent.types import Episode, Group, StopReason, TokenKind, Trajectory


@dataclasses.dataclass(frozen=True)
class ModelScores:
    """What models say of `sampled_trajectories(groups)`, one array each; None where no choice reads it."""

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
    """The samples of a batch, in the order of `sampled_trajectories(groups)`; scores are one per trajectory."""
    walked = list(_walk(groups))
    columns = (scores.reference, scores.old, scores.values, scores.teacher, scores.students)
    rows = zip(*([None] * len(walked) if column is None else column for column in columns), strict=True)
    return [
        Sample(trajectory, episode, group, attempt, action_mask(trajectory), *row)
        for (group, attempt, episode, trajectory), row in zip(walked, rows, strict=True)
    ]


def sampled_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
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
    """Total rewards f64[N, G] and the mask bool[N, G] of attempts that did not fail."""
    shape = (len(groups), max((len(group.episodes) for group in groups), default=0))
    values, valid = np.zeros(shape), np.zeros(shape, bool)
    for g, group in enumerate(groups):
        for s, episode in enumerate(group.episodes):
            values[g, s], valid[g, s] = episode.total_reward, not episode.stop_reason.is_failure
    return values, valid


def shaped(group: Group, rl: RLConfig) -> Group:
    """The group with the rewards that `rl.group_reward` gives, scaled where an attempt ran out of tokens.

    What a group reward gives takes the place of all that an attempt earned, its turns' rewards included. A factor for
    running out of tokens, `rl.shaping.truncated_factor`, is ProRL's and ToolOrchestra's stop_properly_penalty. It
    scales the attempt's rewards unless their sum is negative: scaled, that would be a prize for running out of tokens.
    """
    episodes = list(group.episodes)
    if rl.group_reward is not None:
        episodes = [
            dataclasses.replace(episode, reward=reward, turn_rewards=())
            for episode, reward in zip(episodes, _group_rewards(rl.group_reward, group), strict=True)
        ]
    if rl.shaping is not None:
        episodes = [_scaled(episode, rl.shaping.truncated_factor) for episode in episodes]
    failed = [episode.stop_reason.is_failure for episode in group.episodes]
    chosen = zip(group.episodes, episodes, failed, strict=True)
    return dataclasses.replace(group, episodes=[old if out else new for old, new, out in chosen])


def _scaled(episode: Episode, factor: float) -> Episode:
    if episode.stop_reason is not StopReason.TOKEN_LIMIT or episode.total_reward <= 0:
        return episode
    turns = tuple(reward * factor for reward in episode.turn_rewards)
    return dataclasses.replace(episode, reward=episode.reward * factor, turn_rewards=turns)


def _group_rewards(reward: Any, group: Group) -> list[float]:
    """What a group reward says of each episode. Raises ConfigError where that is no finite number for each."""
    answer = contract.call(reward, group)
    listed = answer.tolist() if getattr(answer, "ndim", 0) == 1 else answer
    if not isinstance(listed, (list, tuple)) or len(listed) != len(group.episodes):
        came = (
            f"{len(listed)} rewards" if isinstance(listed, (list, tuple)) else f"rewards {contract.described(answer)}"
        )
        raise contract.wrong(reward, came, f"a list of one per episode of the group, {len(group.episodes)},")
    failed = [episode.stop_reason.is_failure for episode in group.episodes]
    return [0.0 if no else contract.number(reward, r, "a reward") for r, no in zip(listed, failed, strict=True)]


WEIGHTS = (
    "policy_weights", "kl_weights", "entropy_weights", "z_weights", "ce_weights", "nll_weights", "distill_weights",
    "value_weights",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Streams:
    """Per-token numbers of one trajectory, all f32[T] and 0 where they mean nothing.

    Weights made by an algorithm are relative (1 per token that counts, times a coefficient);
    `aggregate.normalise` turns them into the factors of the sum above.
    """

    trajectory: Trajectory
    episode: int  # which one of the rollout batch it belongs to; -1 = one of its own
    advantages: np.ndarray  # f32[T] of action tokens
    returns: np.ndarray  # f32[T] the critic's regression target
    old_values: np.ndarray  # f32[T] the critic's value when the advantage was estimated
    old_logprobs: np.ndarray  # f32[T] log-prob of the policy that the objective's ratio is taken to
    reference_logprobs: np.ndarray  # f32[T] log-prob under the frozen reference
    corrections: np.ndarray  # f32[T] factors of policy_weights that do not count in any denominator
    policy_weights: np.ndarray  # f32[T]
    kl_weights: np.ndarray  # f32[T]
    entropy_weights: np.ndarray  # f32[T]
    z_weights: np.ndarray  # f32[T]
    ce_weights: np.ndarray  # f32[T]
    nll_weights: np.ndarray  # f32[T]
    distill_weights: np.ndarray  # f32[T]
    value_weights: np.ndarray  # f32[T]
    support: Support | None = None  # where the teacher is compared, unless that is the whole vocabulary
    reward: float = 0.0  # the episode's, for objectives that read it

    @classmethod
    def of(
        cls, trajectory: Trajectory, episode: int = -1, support: Support | None = None, reward: float = 0.0,
        **streams: np.ndarray,
    ) -> Streams:  # fmt: skip
        """Streams of a trajectory; those not named are 0, corrections 1, old log-probs those recorded when sampled.

        Raises ValueError for a stream that is not a vector as long as the trajectory.
        """
        length = len(trajectory)
        for name, stream in streams.items():
            if np.shape(stream) != (length,):
                raise ValueError(f"stream '{name}' has shape {np.shape(stream)}, the trajectory has {length} tokens")
        zero = np.zeros(length, np.float32)
        apart = ("trajectory", "episode", "support", "reward")
        names = [field.name for field in dataclasses.fields(cls) if field.name not in apart]
        arrays = {name: np.asarray(stream, np.float32) for name, stream in streams.items()}
        arrays = dict(old_logprobs=trajectory.logprobs, corrections=zero + 1) | arrays
        return cls(trajectory, episode, support=support, reward=reward, **({name: zero for name in names} | arrays))

    @property
    def targets(self) -> np.ndarray:
        """bool[T]: tokens whose log-prob the loss needs."""
        return np.any([getattr(self, name) != 0 for name in WEIGHTS], axis=0)
