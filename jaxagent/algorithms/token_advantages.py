"""Advantages along tokens of a whole batch: ragged trajectories padded to one shape, and one program for all of them.

The formulas are the entries of `estimators.py` that extend `TokenAdvantage`. Axis letter: T tokens.
"""

from __future__ import annotations

import functools

import chex
import jax
import numpy as np

from jaxagent import contract
from jaxagent.algorithms.estimators import Estimate, TokenAdvantage, TokenPath, estimated
from jaxagent.config import RLConfig

_DTYPES = TokenPath(np.float32, np.float32, bool, np.int32, np.float32)
_ROWS = 64  # trajectories per call: a static shape, so that nothing compiles twice


def warm_up(rl: RLConfig) -> None:
    """Compiles what the advantage runs on the device."""
    if isinstance(rl.advantage, TokenAdvantage):
        zero = np.zeros(1, np.float32)
        estimates([TokenPath(zero, zero, np.zeros(1, bool), np.zeros(1, np.int32), zero)], rl)


@functools.partial(jax.jit, static_argnames="advantage")
def _estimate_rows(rows: TokenPath, advantage: TokenAdvantage) -> Estimate:
    return jax.vmap(functools.partial(estimated, advantage))(rows)


def estimates(paths: list[TokenPath], rl: RLConfig) -> list[Estimate]:
    """Estimates of ragged trajectories, f32[T] each."""
    # One row more than a packed row: the last token of a trajectory is a target, never an input.
    width = rl.batch.row_tokens + 1
    out = []
    for start in range(0, len(paths), _ROWS):
        block = paths[start : start + _ROWS]
        padded = TokenPath(*(np.zeros((_ROWS, width), dtype) for dtype in _DTYPES))
        for row, path in enumerate(block):
            chex.assert_equal_shape(list(path))
            for target, stream in zip(padded, path, strict=True):
                used = min(len(stream), width)  # the tail behind the last action may be longer than a row
                target[row, :used] = stream[:used]
        with jax.transfer_guard("disallow"):
            rows = jax.device_get(_estimate_rows(jax.device_put(padded), advantage=rl.advantage))
        for row, path in enumerate(block):
            full = [np.zeros(len(path.mask), np.float32) for _ in rows]
            used = min(len(path.mask), width)
            for target, row_of in zip(full, rows, strict=True):
                target[:used] = row_of[row, :used]
            out.append(Estimate(*full))
            for name in ("advantages", "returns"):
                numbers, like = (
                    getattr(out[-1], name),
                    contract.Array(name, "one number per token, [T]", path.mask.shape),
                )
                contract.numbers(rl.advantage, numbers, like, path.mask, of=[path.rewards, path.values])
    return out
