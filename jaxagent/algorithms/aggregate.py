"""What `rl.aggregation` can name: how per-token losses of an optimiser update become one number.

In: masks, or relative weights, of ALL sequences of one optimiser update. Out: weights such that
`loss = sum(weights * per_token_loss)`, whatever the packing, micro-batching and sharding that follow.
Axis letter: n sequences; "sequences" are those with at least
one token in the mask. No jax: a config is read without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxagent import contract
from jaxagent.config.ranges import PositiveFloat

if TYPE_CHECKING:
    from jaxagent.algorithms.streams import Streams


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """The factor of every token of a sequence is 1 / `divisor`."""

    def __call__(self, counts: np.ndarray, episodes: np.ndarray | None = None) -> np.ndarray:
        """The factors float[n] of sequences with so many tokens in the mask, int or float [n]; 0 where none are.

        `episodes` int [n]: the episode of each sequence; None: each has one of its own.
        """
        contract.check_arrays(counts, *(() if episodes is None else (episodes,)), types=None, rank=1)
        sequences = np.maximum(np.sum(counts > 0), 1)
        divisor = contract.call(self, counts, sequences, episodes, method="divisor")
        expected = contract.Array("a divisor", "one number per sequence, [n]", counts.shape, "fiu")
        return np.where(counts > 0, 1.0 / contract.array(self, divisor, expected, "divisor"), 0.0)

    def divisor(self, counts: np.ndarray, sequences: np.ndarray, episodes: np.ndarray | None) -> np.ndarray:
        """float[n], not 0 anywhere; `sequences` is their number. Other arguments as above."""
        raise NotImplementedError


class TokenMean(Aggregation):
    """Every token counts the same: w = m / sum(m) (DAPO, arXiv 2503.14476, eq. 8)."""

    def divisor(self, counts: np.ndarray, sequences: np.ndarray, episodes: np.ndarray | None) -> np.ndarray:
        return np.maximum(np.sum(counts), 1) * np.ones_like(counts)


class SequenceMean(Aggregation):
    """Every sequence counts the same: w = m / (sum_t(m) * sequences) (GRPO, arXiv 2402.03300, eq. 3)."""

    def divisor(self, counts: np.ndarray, sequences: np.ndarray, episodes: np.ndarray | None) -> np.ndarray:
        return np.maximum(counts, 1) * sequences


class RolloutMean(Aggregation):
    """Every episode counts the same, and in it every trajectory (slime, Polar).

    w = m / (sum_t(m) * trajectories of the episode * episodes): an attempt of many sequences weighs no more.
    """

    def divisor(self, counts: np.ndarray, sequences: np.ndarray, episodes: np.ndarray | None) -> np.ndarray:
        some = counts > 0
        owners = np.arange(len(counts)) if episodes is None else episodes
        same = (owners[:, None] == owners) & some  # [n, n]
        trajectories = np.maximum(np.sum(same, axis=1), 1)
        rollouts = np.sum(np.where(some, 1.0 / trajectories, 0.0))
        return np.maximum(counts, 1) * trajectories * np.where(rollouts > 0, rollouts, 1.0)


@dataclasses.dataclass(frozen=True)
class Constant(Aggregation):
    """No length in the divisor: w = m / (constant * sequences) (Dr. GRPO, arXiv 2503.20783, section 3.2)."""

    constant: PositiveFloat = 3000.0  # tokens: the most that an episode samples; the paper's own limit

    def divisor(self, counts: np.ndarray, sequences: np.ndarray, episodes: np.ndarray | None) -> np.ndarray:
        return self.constant * sequences * np.ones_like(counts)


AGGREGATIONS: dict[str, type] = {
    "token_mean": TokenMean,
    "sequence_mean": SequenceMean,
    "rollout_mean": RolloutMean,
    "constant": Constant,
}


def normalise(streams: Sequence[Streams], names: Sequence[str], aggregation: Aggregation) -> list[Streams]:
    """All sequences of ONE optimiser update, with the relative weights named scaled to the factors of the loss.

    Each is scaled over its own non-zero tokens (float64 inside, float32 out).
    """
    # Sequences that belong to no episode get one of their own.
    episodes = np.array([s.episode if s.episode >= 0 else -1 - i for i, s in enumerate(streams)])
    scaled: list[dict[str, np.ndarray]] = [{} for _ in streams]
    for name in names:
        counts = np.array([np.count_nonzero(getattr(s, name)) for s in streams], np.float64)
        for out, s, scale in zip(scaled, streams, contract.factors(aggregation, counts, episodes), strict=True):
            out[name] = (getattr(s, name).astype(np.float64) * scale).astype(np.float32)
    return [dataclasses.replace(s, **changes) for s, changes in zip(streams, scaled, strict=True)]
