"""Aggregation: how per-token losses of an optimiser update become one number. Always an explicit choice.

In: masks, or relative weights, of ALL sequences of one optimiser update. Out: weights such that
`loss = sum(weights * per_token_loss)`, whatever the packing, micro-batching and sharding that follow.
`sequence_scales` runs on NumPy and, jitted, on JAX arrays. Axis letter: n sequences.

  token_mean     every token counts the same: w = m / sum(m)                          (DAPO, arXiv 2503.14476, eq. 8)
  sequence_mean  every sequence counts the same: w = m / (sum_t(m) * sequences)       (GRPO, arXiv 2402.03300, eq. 3)
  rollout_mean   every episode counts the same, and in it every trajectory: w = m / (sum_t(m) * trajectories of the
                 episode * episodes); an attempt that fills many sequences weighs no more than others     (slime, Polar)
  constant       no length in the divisor: w = m / (constant * sequences)             (Dr. GRPO, arXiv 2503.20783)

"sequences" are those with at least one token in the mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import chex
import numpy as np

from jaxagent.algorithms.streams import Streams

Array = Any  # numpy.ndarray or jax.Array

MODES = ("token_mean", "sequence_mean", "rollout_mean", "constant")


def sequence_scales(counts: Array, mode: str, constant: float, episodes: Array | None = None) -> Array:
    """The factor of every token of a sequence.

    Args:
      counts: int or float [n], tokens in the mask of each sequence.
      mode: one of `MODES`.
      constant: tokens; only read by "constant".
      episodes: int [n], the episode of each sequence; only read by "rollout_mean". None: each has one of its own.

    Returns:
      float [n]; 0 for a sequence without tokens.

    Raises:
      ValueError: unknown mode.
    """
    chex.assert_rank(counts, 1)
    if episodes is not None:
        chex.assert_equal_shape([counts, episodes])
    xp = counts.__array_namespace__()
    some = counts > 0
    sequences = xp.maximum(xp.sum(some), 1)
    if mode == "token_mean":
        divisor = xp.maximum(xp.sum(counts), 1) * xp.ones_like(counts)
    elif mode == "sequence_mean":
        divisor = xp.maximum(counts, 1) * sequences
    elif mode == "rollout_mean":
        owners: Array = xp.arange(len(counts)) if episodes is None else episodes
        same = (owners[:, None] == owners) & some  # [n, n]
        trajectories = xp.maximum(xp.sum(same, axis=1), 1)
        rollouts = xp.sum(xp.where(some, 1.0 / trajectories, 0.0))
        divisor = xp.maximum(counts, 1) * trajectories * xp.where(rollouts > 0, rollouts, 1.0)
    elif mode == "constant":
        divisor = constant * sequences * xp.ones_like(counts)
    else:
        raise ValueError(f"unknown aggregation '{mode}'")
    return xp.where(some, 1.0 / divisor, 0.0)


def normalise(streams: Sequence[Streams], names: Sequence[str], mode: str, constant: float) -> list[Streams]:
    """Scales relative weights to the factors of the loss.

    Args:
      streams: all sequences of ONE optimiser update.
      names: the weight streams to scale, each over its own non-zero tokens.
      mode, constant: see `sequence_scales`.

    Returns:
      The same sequences in the same order with the named weights scaled (float64 inside, float32 out).
    """
    # Sequences that belong to no episode get one of their own.
    episodes = np.array([s.episode if s.episode >= 0 else -1 - i for i, s in enumerate(streams)])
    scaled: list[dict[str, np.ndarray]] = [{} for _ in streams]
    for name in names:
        counts = np.array([np.count_nonzero(getattr(s, name)) for s in streams], np.float64)
        for out, s, scale in zip(scaled, streams, sequence_scales(counts, mode, constant, episodes), strict=True):
            out[name] = (getattr(s, name).astype(np.float64) * scale).astype(np.float32)
    return [dataclasses.replace(s, **changes) for s, changes in zip(streams, scaled, strict=True)]
