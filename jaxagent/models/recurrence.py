"""How a recurrent block's rows follow one another: in packed training rows, and behind memories that are kept.

A block that keeps a memory of fixed size asks for two things (`Recurrence`): what the few rows before each row were,
for a short convolution, and the delta rule along each sequence. `PackedRows` answers from the rows alone, in the form
that has a fast gradient; `Memories` goes token by token from the memories of the rows' sequences, so that a row gets
the same bits however its sequence was cut into tiles.

Axis letters: B packed rows, T tokens, N flat rows, M memories, W inputs of the convolution, C channels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import chex
import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxagent.models import delta_rule, sharding
from jaxagent.models.sharding import merge_rows, split_rows


class Recurrence(Protocol):
    """Which rows follow which; `memory` is of all sequences, None where nothing is kept."""

    def window(self, memory: Any, x: jax.Array, count: int) -> tuple[list[jax.Array], Any]:
        """x[N, C], the row before each in its sequence, and so on: `count` arrays, zeros before the first row.

        `memory` [M, count - 1, C] holds the last rows of each sequence, the newest last.
        """
        ...

    def fold(self, memory: Any, rows: delta_rule.Inputs) -> tuple[jax.Array, Any]:
        """The delta rule along each sequence: f32[N, H, V], with memories f32[M, H, K, V]."""
        ...


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Of packed training rows: every segment of segments i32[B, T] begins anew."""

    segments: jax.Array

    def window(self, memory: None, x: jax.Array, count: int) -> tuple[list[jax.Array], None]:
        """By shifting the rows."""
        rows = split_rows(x, *self.segments.shape)
        return [x, *(merge_rows(earlier(rows, self.segments, by)) for by in range(1, count))], None

    def fold(self, memory: None, rows: delta_rule.Inputs) -> tuple[jax.Array, None]:
        """By `delta_rule.chunked`."""
        rows = delta_rule.Inputs(*(split_rows(x, *self.segments.shape) for x in rows))
        if not sharding.in_mesh():
            return merge_rows(delta_rule.chunked(rows, self.segments)), None
        by_rows = jax.P(sharding.row_axes(rows.q))
        by_heads = jax.P(*by_rows, None, heads_axis(rows.q.shape[2]))
        mapped = jax.shard_map(delta_rule.chunked, in_specs=(by_heads, by_rows), out_specs=by_heads)
        out = mapped(jax.reshard(rows, by_heads), jax.reshard(self.segments, by_rows))
        return merge_rows(jax.reshard(out, by_rows)), None


def heads_axis(heads: int) -> str | None:
    """The axis of the mesh over which a rule's heads are split, so that each device goes through a part of them."""
    return "tensor" if heads % jax.sharding.get_abstract_mesh().shape["tensor"] == 0 else None


def earlier(rows: jax.Array, segments: jax.Array, by: int) -> jax.Array:
    """rows[B, T, C] moved on by some tokens inside their segments i32[B, T], zeros before each segment's first."""
    shift = lambda x: jnp.pad(x, ((0, 0), (by, 0), *((0, 0),) * (x.ndim - 2)))[:, : x.shape[1]]  # noqa: E731
    same = (shift(segments) == segments) & (jnp.arange(segments.shape[1]) >= by)
    return jnp.where(same[:, :, None], shift(rows), 0)


@flax.struct.dataclass
class _Order:
    """How the N rows of one shard follow one another."""

    number: jax.Array  # i32[N]
    position: jax.Array  # i32[N]
    origin: jax.Array  # i32[N], the row itself, or the one that it repeats
    before: jax.Array  # i32[N], the row before it in its sequence, if `rank` > 0
    rank: jax.Array  # i32[N], how many rows of its memory come before it
    last: jax.Array  # bool[N], whether none comes behind it
    live: jax.Array  # i32[N], the rows that change memories, then others
    count: jax.Array  # i32[1], how many these are


class Memories:
    """Of rows behind memories: those of one sequence stand in ascending order, and position 0 begins with zeros.

    A row that repeats the one before it gets what that one got.

    Args:
      numbers: i32[N], the memory of each row's sequence, counted in the row's shard; 0 is nobody's.
      positions: i32[N].
    """

    def __init__(self, numbers: jax.Array, positions: jax.Array):
        chex.assert_equal_shape([numbers, positions])
        self._rows = jax.P(sharding.row_axes(positions))
        self._order = self._on_each_device(_order)(numbers, positions)

    def window(self, memory: jax.Array, x: jax.Array, count: int) -> tuple[list[jax.Array], jax.Array]:
        """From the same tile where the row before is in it, else from the memory."""
        return self._on_each_device(functools.partial(_window, count))(memory, x, self._order)

    def fold(self, memory: jax.Array, rows: delta_rule.Inputs) -> tuple[jax.Array, jax.Array]:
        """Row after row."""
        return self._on_each_device(_fold)(memory, rows, self._order)

    def _on_each_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not sharding.in_mesh():
            return function
        return jax.shard_map(function, in_specs=self._rows, out_specs=self._rows)


def _order(number: jax.Array, position: jax.Array) -> _Order:
    index = jnp.arange(len(number), dtype=jnp.int32)
    # At position 0 a repeated row needs no care, and another sequence may have its first token behind it.
    repeats = (number[1:] == number[:-1]) & (position[1:] == position[:-1]) & (position[1:] > 0)
    live = (number > 0) & ~jnp.pad(repeats, (1, 0))
    same = live[None, :] & (number[:, None] == number[None, :])
    earlier = same & (index[None, :] < index[:, None])
    return _Order(
        number=number,
        position=position,
        origin=jax.lax.cummax(jnp.where(live, index, 0)),
        before=jnp.max(jnp.where(earlier, index[None, :], 0), axis=1),
        rank=jnp.sum(earlier, axis=1, dtype=jnp.int32),
        last=live & ~jnp.any(same & (index[None, :] > index[:, None]), axis=1),
        live=jnp.argsort(~live, stable=True).astype(jnp.int32),
        count=jnp.sum(live, dtype=jnp.int32)[None],
    )


def _window(count: int, memory: jax.Array, x: jax.Array, order: _Order) -> tuple[list[jax.Array], jax.Array]:
    rows, source = [x], jnp.arange(len(x), dtype=jnp.int32)
    for by in range(1, count):
        source = order.before[source]
        kept = memory[order.number, jnp.clip(count - 1 - by + order.rank, 0, count - 2)]
        row = jnp.where((by <= order.rank)[:, None], x[source], kept.astype(x.dtype))
        rows.append(jnp.where((by <= order.position)[:, None], row, 0))
    newest = jnp.stack(rows[-2::-1], axis=1).astype(memory.dtype)
    memory = memory.at[jnp.where(order.last, order.number, len(memory))].set(newest, mode="drop")
    return [row[order.origin] for row in rows], memory


def _fold(memory: jax.Array, rows: delta_rule.Inputs, order: _Order) -> tuple[jax.Array, jax.Array]:
    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        memory, out = carry
        row = order.live[i]
        number = order.number[row]
        state = jnp.where(order.position[row] > 0, memory[number], 0)
        state, new = delta_rule.step(state, jax.tree.map(lambda x: x[row], rows))
        replace = lax.dynamic_update_index_in_dim
        return replace(memory, state, number, 0), replace(out, new, row, 0)

    memory, out = lax.fori_loop(0, order.count[0], step, (memory, jnp.zeros_like(rows.v)))
    return out[order.origin], memory
