"""How a recurrent block's rows follow one another: in packed training rows, and behind memories that are kept.

A block that keeps a memory of fixed size asks for two things (`Recurrence`): what the few rows before each row were,
for a short convolution, and the delta rule along each sequence. `packed` answers from the rows alone, in the form that
has a fast gradient; `kept` goes token by token from the memories of the rows' sequences, so that a row gets the same
bits however its sequence was cut into tiles.

Axis letters: B packed rows, T tokens, N flat rows, M memories, W inputs of the convolution, C channels.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jaxagent.models import delta_rule, sharding
from jaxagent.models.sharding import merge_rows, split_rows


class Recurrence(Protocol):
    """Which rows follow which; `memory` is of all sequences, None where nothing is kept."""

    def window(self, memory: jax.Array | None, x: jax.Array, count: int) -> tuple[list[jax.Array], jax.Array | None]:
        """x[N, C], the row before each in its sequence, and so on: `count` arrays, zeros before the first row.

        `memory` [M, count - 1, C] holds the last rows of each sequence, the newest last.
        """

    def fold(self, memory: jax.Array | None, rows: delta_rule.Inputs) -> tuple[jax.Array, jax.Array | None]:
        """The delta rule along each sequence: f32[N, H, V], with memories f32[M, H, K, V]."""


@dataclasses.dataclass(frozen=True)
class packed:  # noqa: N801 (called as a function, as `attention.packed` is)
    """Of packed training rows: every segment of segments i32[B, T] begins anew."""

    segments: jax.Array

    def window(self, memory: None, x: jax.Array, count: int) -> tuple[list[jax.Array], None]:
        """By shifting the rows."""
        b, t = self.segments.shape
        rows = split_rows(x, b, t)

        def earlier(by: int) -> jax.Array:
            same = self.segments[:, by:] == self.segments[:, : t - by]
            shifted = jnp.where(same[:, :, None], rows[:, : t - by], 0)
            return merge_rows(jnp.pad(shifted, ((0, 0), (by, 0), (0, 0))))

        return [x, *(earlier(by) if by < t else jnp.zeros_like(x) for by in range(1, count))], None

    def fold(self, memory: None, rows: delta_rule.Inputs) -> tuple[jax.Array, None]:
        """By `delta_rule.chunked`."""
        rows = delta_rule.Inputs(*(split_rows(x, *self.segments.shape) for x in rows))
        if not sharding.in_mesh():
            return merge_rows(delta_rule.chunked(rows, self.segments)), None
        by_rows = jax.P(sharding.row_axes(rows.q))
        mapped = jax.shard_map(delta_rule.chunked, in_specs=by_rows, out_specs=by_rows)
        return merge_rows(mapped(rows, jax.reshard(self.segments, by_rows))), None


class kept:  # noqa: N801
    """Of rows behind memories: those of one sequence stand in ascending order, and position 0 begins with zeros.

    Args:
      numbers: i32[N], the memory of each row's sequence, counted in the row's shard; 0 is nobody's.
      positions: i32[N].
    """

    def __init__(self, numbers: jax.Array, positions: jax.Array):
        chex.assert_equal_shape([numbers, positions])
        self._rows = jax.P(sharding.row_axes(positions))
        self._numbers, self._positions = numbers, positions
        self._order = self._locally(_order)(numbers)

    def window(self, memory: jax.Array, x: jax.Array, count: int) -> tuple[list[jax.Array], jax.Array]:
        """From the same tile where the row before is in it, else from the memory."""
        local = self._locally(lambda *args: _window(count, *args))
        return local(memory, x, self._numbers, self._positions, self._order)

    def fold(self, memory: jax.Array, rows: delta_rule.Inputs) -> tuple[jax.Array, jax.Array]:
        """Row after row."""
        return self._locally(_fold)(memory, rows, self._numbers, self._positions)

    def _locally(self, function: Any) -> Any:
        """Each shard by itself."""
        if not sharding.in_mesh():
            return function
        return jax.shard_map(function, in_specs=self._rows, out_specs=self._rows)


def _order(numbers: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each row the row before it of the same memory, how many there are, and whether none comes behind it."""
    n = len(numbers)
    index = jnp.arange(n, dtype=jnp.int32)
    same = numbers[:, None] == numbers[None, :]
    earlier = same & (index[None, :] < index[:, None])
    before = jnp.max(jnp.where(earlier, index[None, :], 0), axis=1)
    return before, jnp.sum(earlier, axis=1, dtype=jnp.int32), ~jnp.any(same & (index[None, :] > index[:, None]), axis=1)


def _window(
    count: int, memory: jax.Array, x: jax.Array, numbers: jax.Array, positions: jax.Array, order: tuple
) -> tuple[list[jax.Array], jax.Array]:
    before, rank, final = order
    rows, source = [x], jnp.arange(len(x), dtype=jnp.int32)
    for by in range(1, count):
        source = before[source]
        kept = memory[numbers, jnp.clip(count - 1 - by + rank, 0, count - 2)]
        row = jnp.where((by <= rank)[:, None], x[source], kept.astype(x.dtype))
        rows.append(jnp.where((by <= positions)[:, None], row, 0))
    last = jnp.stack(rows[-2::-1], axis=1).astype(memory.dtype)
    return rows, memory.at[jnp.where(final, numbers, len(memory))].set(last, mode="drop")


def _fold(
    memory: jax.Array, rows: delta_rule.Inputs, numbers: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    live = jnp.max(jnp.where(numbers > 0, jnp.arange(1, len(numbers) + 1), 0))  # the rest is nobody's

    def row(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        memory, out = carry
        state = jnp.where(positions[i] > 0, memory[numbers[i]], 0)
        state, new = delta_rule.step(state, jax.tree.map(lambda x: x[i], rows))
        return lax.dynamic_update_index_in_dim(memory, state, numbers[i], 0), lax.dynamic_update_index_in_dim(
            out, new, i, 0
        )

    memory, out = lax.fori_loop(0, live, row, (memory, jnp.zeros_like(rows.v)))
    return out, memory
