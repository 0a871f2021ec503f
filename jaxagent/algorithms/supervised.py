"""Learning from episodes that are there already: demonstrations, one's own successes, and pairs of attempts. NumPy.

Supervised fine-tuning (`sft`) is cross-entropy on the demonstrated tokens, those of kind ACTION. Rejection sampling
(Yuan et al., arXiv 2308.01825) imitates one's own distinct `successes` by the same streams.

Direct preference optimisation (Rafailov et al., arXiv 2305.18290, eq. 7) on whole episodes:

    L = mean over pairs of  -log sigmoid(m)  +  alpha * NLL(chosen) / its tokens
    m = beta * (D(chosen) - D(rejected)),   D(y) = sum over the action tokens of y of  log p - log p_ref

Observations never count, in no sum: the policy did not choose them. D is over all trajectories of an episode. With
`length_normalised`, D is divided by its episode's action tokens. The NLL term is that of Pang et al. (arXiv 2404.19733,
eq. 1).

The loss couples two sequences, the learner's sum does not. But dL/dtheta = -beta sigmoid(-m) (grad log p(chosen) -
grad log p(rejected)), where sigmoid(-m) is a number: so the caller scores both sequences under the parameters that are
about to be updated, and a weighted NLL with weights +-beta sigmoid(-m) has exactly the gradient of L there. One update
per scoring: nothing is approximated, and a pair's sequences may lie in any rows and micro-batches.
Axis letters: P pairs, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import chex
import numpy as np

from jaxagent.algorithms import aggregate
from jaxagent.algorithms.streams import Streams, action_mask
from jaxagent.types import Episode, Group, TokenKind, Trajectory


def sft(demonstrations: Sequence[Trajectory], observations: bool, mode: str = "token_mean") -> list[Streams]:
    """Mean cross-entropy, by tokens or by sequences, over the demonstrated tokens of one optimiser update.

    `observations`: also over those that the environment wrote (the warm start's curriculum).
    """
    kinds = [TokenKind.ACTION, TokenKind.OBSERVATION, TokenKind.WARNING] if observations else [TokenKind.ACTION]
    streams = []
    for demonstration in demonstrations:
        mask = np.isin(demonstration.kinds, kinds)
        mask[:1] = False  # nothing predicts the first token
        streams.append(Streams.of(demonstration, ce_weights=mask.astype(np.float32)))
    return aggregate.normalise(streams, ["ce_weights"], aggregate.AGGREGATIONS[mode]())


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two attempts at one task. The first was rewarded more."""

    chosen: Episode
    rejected: Episode

    @property
    def trajectories(self) -> list[Trajectory]:
        """Those of the chosen episode, then those of the rejected one."""
        return [*self.chosen.trajectories, *self.rejected.trajectories]


def distinct(episodes: Sequence[Episode]) -> list[Episode]:
    """The attempts that did not fail and have an action token; of those with the same tokens the first."""
    first_episodes: dict[tuple[bytes, ...], Episode] = {}
    for episode in episodes:
        if not episode.stop_reason.is_failure and any(action_mask(t).any() for t in episode.trajectories):
            first_episodes.setdefault(tuple(t.tokens.tobytes() for t in episode.trajectories), episode)
    return list(first_episodes.values())


def pairs(groups: Sequence[Group], per_task: int, min_gap: float) -> list[Pair]:
    """The best attempt at a task with the worst, the second best with the second worst, ...: at most `per_task` pairs.

    Rewards differ by `min_gap` or more; whatever it is, equal rewards make no pair. Forks are left out: what they have
    sampled themselves follows another context.
    """
    chosen = []
    for group in groups:
        episodes = distinct(group.roots.episodes)
        ranked = sorted(episodes, key=lambda e: -e.total_reward)  # stable: ties in attempts' order
        for i in range(min(per_task, len(ranked) // 2)):
            best, worst = ranked[i], ranked[-1 - i]
            if (gap := best.total_reward - worst.total_reward) > 0 and gap >= min_gap:
                chosen.append(Pair(best, worst))
    return chosen


def dpo_streams(
    batch: Sequence[Pair],
    logprobs: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    beta: float,
    length_normalised: bool,
    nll_coefficient: float,
) -> tuple[list[Streams], dict[str, float]]:
    """The weighted NLL that has DPO's gradient, normalised streams per trajectory of one update's pairs; and metrics.

    `logprobs`: f32[T] per trajectory of the pairs in order, under the parameters that the update starts from;
    `reference`: the same under the reference. `nll_coefficient` is alpha. "dpo/accuracy": pairs with m > 0.
    """
    masks = [action_mask(t).astype(np.float64) for pair in batch for t in pair.trajectories]
    for of_trajectory in zip(masks, logprobs, reference, strict=True):
        chex.assert_equal_shape(of_trajectory)
    counts = [mask.sum() for mask in masks]
    gains = [float(np.sum(m * (np.asarray(p, np.float64) - r)))
             for m, p, r in zip(masks, logprobs, reference, strict=True)]  # fmt: skip
    weights: list[float] = []  # of every action token of a trajectory
    losses, nlls, margins = [], [], []
    at = 0
    for pair in batch:
        middle = at + len(pair.chosen.trajectories)
        sides = slice(at, middle), slice(middle, middle + len(pair.rejected.trajectories))
        at = sides[1].stop
        tokens = [sum(counts[side]) for side in sides]
        scales = [1.0 / n if length_normalised else 1.0 for n in tokens]
        margin = beta * (scales[0] * sum(gains[sides[0]]) - scales[1] * sum(gains[sides[1]]))
        pull = beta * float(np.exp(-np.logaddexp(0.0, margin))) / len(batch)  # beta sigmoid(-margin), mean over pairs
        push = nll_coefficient / tokens[0] / len(batch)
        weights += [pull * scales[0] + push] * len(pair.chosen.trajectories)
        weights += [-pull * scales[1]] * len(pair.rejected.trajectories)
        margins.append(margin)
        losses.append(np.logaddexp(0.0, -margin))
        chosen = zip(masks[sides[0]], logprobs[sides[0]], strict=True)
        nlls.append(-sum(float(np.sum(m * p)) for m, p in chosen) / tokens[0])
    every = [t for pair in batch for t in pair.trajectories]
    out = [Streams.of(t, nll_weights=mask * weight) for t, mask, weight in zip(every, masks, weights, strict=True)]
    return out, {
        "dpo/loss": float(np.mean(losses)),
        "dpo/nll": float(np.mean(nlls)),
        "dpo/accuracy": float(np.mean(np.array(margins) > 0)),
        "dpo/margin": float(np.mean(margins)),
    }


def successes(groups: Sequence[Group], min_reward: float, per_task: int) -> list[Episode]:
    """At most `per_task` distinct attempts with a reward of `min_reward` or more, the first of each task."""
    good = ([e for e in distinct(group.roots.episodes) if e.total_reward >= min_reward] for group in groups)
    return [episode for attempts in good for episode in attempts[:per_task]]
