"""Outcome models: a scalar per finished episode, trained to tell success from failure, and how well it does.

  binary         mean over episodes of  softplus(z) - y z         (cross-entropy of sigmoid(z); Cobbe et al. 2110.14168)
  bradley_terry  mean over pairs of     -log sigmoid(z_chosen - z_rejected)      (Ouyang et al. 2203.02155, eq. 1)

A pair's loss couples two sequences. Its gradient is that of the linear loss sum(c z) with c = -+sigmoid(-(z_chosen -
z_rejected)) / pairs, computed from scores under the same parameters (supervised.py): exact with one update per scoring.
Z is read where the episode ends: `through_end` appends a token that stands for the end, whose "value" is that of the
state after the last token. In: episodes. Out: `Streams` (`value_weights`, `returns`) of one update, and held-out
metrics.
Axis letters: N episodes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxagent.algorithms.streams import Streams, action_mask
from jaxagent.algorithms.supervised import Pair
from jaxagent.contract import check_arrays
from jaxagent.types import Episode, TokenKind, Trajectory

# z f32[...], y f32[...] -> loss f32[...] per episode, before its weight.
LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "binary": lambda z, y: jax.nn.softplus(z) - y * z,
    "bradley_terry": lambda z, y: z,
}


def through_end(episode: Episode) -> Trajectory:
    """The last trajectory that holds an action, and one token more for the end (never an input, only a place)."""
    t = [t for t in episode.trajectories if action_mask(t).any()][-1]
    return Trajectory(
        tokens=np.append(t.tokens, 0).astype(np.int32),
        kinds=np.append(t.kinds, TokenKind.ACTION).astype(np.uint8),
        logprobs=np.append(t.logprobs, 0).astype(np.float32),
        policy_versions=np.append(t.policy_versions, -1).astype(np.int32),
        turns=np.append(t.turns, t.turns[-1]).astype(np.int32),
    )


def after(tokens: Sequence[int], then: int = 0) -> Trajectory:
    """Tokens that nobody sampled, and one more, as if the policy had said it: to be scored, or for its place alone."""
    kinds = np.array([TokenKind.PROMPT] * len(tokens) + [TokenKind.ACTION], np.uint8)
    zero = np.zeros(len(kinds), np.int32)
    return Trajectory(np.array([*tokens, then], np.int32), kinds, zero.astype(np.float32), zero - 1, zero)


def binary(episodes: Sequence[Episode], min_reward: float) -> list[Streams]:
    """Streams of one update: label 1 for a reward of `min_reward` or more, all episodes alike."""
    return [_at_end(through_end(e), 1.0 / len(episodes), float(e.total_reward >= min_reward)) for e in episodes]


def bradley_terry(pairs: Sequence[Pair], scores: Sequence[tuple[float, float]]) -> list[Streams]:
    """Streams of one update: per pair chosen, then rejected; `scores` are theirs under the current parameters."""
    streams = []
    for pair, (chosen, rejected) in zip(pairs, scores, strict=True):
        pull = float(np.exp(-np.logaddexp(0.0, np.float64(chosen) - rejected))) / len(pairs)
        streams += [_at_end(through_end(pair.chosen), -pull, 0.0), _at_end(through_end(pair.rejected), pull, 0.0)]
    return streams


def split(episodes: Sequence[Episode], held_out_frac: float) -> tuple[list[Episode], list[Episode]]:
    """(training, held-out) episodes: whole tasks, chosen by a hash of their ids."""

    def held_out(episode: Episode) -> bool:
        digest = hashlib.blake2b(f"outcome/{episode.task.id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < held_out_frac * 2**64

    chosen = [held_out(e) for e in episodes]
    return [e for e, out in zip(episodes, chosen, strict=True) if not out], [
        e for e, out in zip(episodes, chosen, strict=True) if out
    ]


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve of scores f[N] and labels bool[N]: how often a success (label True) outscores a failure.

    Ties count half. NaN without both.
    """
    _check(scores, labels)
    good, bad = np.sort(scores[labels]), np.sort(scores[~labels])
    if not len(good) or not len(bad):
        return float("nan")
    below = np.searchsorted(bad, good, "left") + np.searchsorted(bad, good, "right")
    return float(below.sum() / 2 / len(good) / len(bad))


def accuracy(scores: np.ndarray, labels: np.ndarray, threshold: float) -> float:
    """The fraction of f[N] scores on their label's side of the threshold."""
    _check(scores, labels)
    return float(np.mean((scores > threshold) == labels))


def best_threshold(scores: np.ndarray, labels: np.ndarray) -> float:
    """The threshold with the best accuracy on these (training) episodes: Bradley-Terry scores have no zero."""
    _check(scores, labels)
    order = np.sort(scores)
    candidates = np.concatenate([[order[0] - 1], (order[1:] + order[:-1]) / 2, [order[-1] + 1]])
    return float(candidates[np.argmax([accuracy(scores, labels, c) for c in candidates])])


def _check(scores: np.ndarray, labels: np.ndarray) -> None:
    check_arrays(scores, labels, types=[float, bool], rank=1)


def _at_end(trajectory: Trajectory, weight: float, label: float) -> Streams:
    end = np.zeros(len(trajectory), np.float32)
    end[-1] = 1.0
    return dataclasses.replace(Streams.of(trajectory), value_weights=end * weight, returns=end * label)
