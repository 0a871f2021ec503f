"""Packed rows whose tokens are split over the mesh's context axis: for sequences that no single device could train.

Queries stay where they are and meet the keys and values of the whole row, gathered once per layer (as Llama 3 does,
arXiv 2407.21783, section 3.3.2); everything else of a layer works token by token. A row is cut into twice as many
stripes as there are devices, and device i has stripes i and 2n - 1 - i: an early one whose queries see few keys and a
late one whose queries see many, so that causal attention is the same work on each.

Axis letters: B rows, T tokens per row, R targets per row, N = B * T; b, t and r on one device; n devices of the axis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxagent.models import blockwise, delta_rule, gpu_kernels, kernels, recurrence
from jaxagent.models.attention import Attend
from jaxagent.models.sharding import CONTEXT, FLAT, ROWS

STRIPES = 2  # per device
_ROWS = P(ROWS, None)
_HEADS = P(FLAT, "tensor", None)


def flat(x: jax.Array) -> jax.Array:
    """[B, T, ...] -> [N, ...], each device its own stripes of its rows."""

    def local(x: jax.Array) -> jax.Array:
        return jnp.take(x, _columns(x.shape[1]), axis=1).reshape(-1, *x.shape[2:])

    return jax.shard_map(local, in_specs=_ROWS, out_specs=P(FLAT))(jax.reshard(x, _ROWS))


def packed(segments: jax.Array) -> Attend:
    """Attention of packed training rows, causal and only inside a segment, for q, k, v as `flat` lays them out.

    Args:
      segments: i32[B, T], equal where tokens belong together, and those lie side by side; T a multiple of 2n.
    """
    chex.assert_rank(segments, 2)
    chex.assert_type(segments, int)
    t = segments.shape[1]
    first = jax.shard_map(gpu_kernels.first_of_segment, in_specs=_ROWS, out_specs=_ROWS)(jax.reshard(segments, _ROWS))

    def attend(cache: None, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        kernel = _KERNELS[kernels.packed(kernels.platform(), str(q.dtype), t, split=True).name]
        local = functools.partial(_attend, kernel, t)
        # The kernels' loops run as long as a device's own rows are, which jax's check of varying values does not take.
        mapped = jax.shard_map(local, in_specs=(_ROWS, *[_HEADS] * 3), out_specs=_HEADS, check_vma=False)
        return mapped(first, q, k, v), None

    return attend


@dataclasses.dataclass(frozen=True)
class SplitRows:
    """`recurrence.PackedRows` of rows as `flat` lays them out.

    The devices of a row exchange tokens for heads (or channels) before, and back behind: each goes through whole rows
    with a part of the heads. Heads that do not divide are gathered, and every device goes through all.
    """

    segments: jax.Array  # i32[B, T], as of `packed`

    def window(self, memory: None, x: jax.Array, count: int) -> tuple[list[jax.Array], None]:
        """See `recurrence.Recurrence`."""

        def rows(x: jax.Array, segments: jax.Array) -> list[jax.Array]:
            return [recurrence.earlier(x, segments, by) for by in range(count)]

        return self._of_whole_rows(rows, x, None), None

    def fold(self, memory: None, rows: delta_rule.Inputs) -> tuple[jax.Array, None]:
        """See `recurrence.Recurrence`."""
        heads = recurrence.heads_axis(rows.q.shape[1])
        out = self._of_whole_rows(delta_rule.chunked, rows, heads)
        return jax.reshard(out, P(FLAT)), None

    def _of_whole_rows(self, function: Callable[..., Any], tokens: Any, heads: str | None) -> Any:
        def local(tokens: Any, segments: jax.Array) -> Any:
            parts, t = jax.lax.axis_size(CONTEXT), segments.shape[1]
            exchanged = all(x.shape[1] % parts == 0 for x in jax.tree.leaves(tokens))

            def whole(x: jax.Array) -> jax.Array:
                x = x.reshape(len(segments), -1, *x.shape[1:])  # [b, t, H, ...]
                if not exchanged:
                    return _gather(x)
                return _in_order(jax.lax.all_to_all(x[None], CONTEXT, 3, 0, tiled=True))

            def own(x: jax.Array) -> jax.Array:
                if exchanged:
                    x = jax.lax.all_to_all(_stripes(x, parts), CONTEXT, 0, 3, tiled=True)[0]
                else:
                    x = jnp.take(x, _columns(t), axis=1)
                return x.reshape(-1, *x.shape[2:])

            return jax.tree.map(own, function(jax.tree.map(whole, tokens), segments))

        by_heads = P(FLAT, heads)
        mapped = jax.shard_map(local, in_specs=(by_heads, _ROWS), out_specs=by_heads)
        return mapped(jax.reshard(tokens, by_heads), jax.reshard(self.segments, _ROWS))


def at(x: jax.Array, tokens: int, places: jax.Array) -> jax.Array:
    """Hidden states [B, R, E] at `places` i32[B, R] of each row, R split over context, of x[N, E] laid out by `flat`.

    A place may lie on any device: each gives its own, zeros for the others, and the sum is what they have together.
    """
    chex.assert_rank([x, places], 2)
    chex.assert_type([x, places], [float, int])

    def local(x: jax.Array, places: jax.Array) -> jax.Array:
        x = x.reshape(len(places), -1, x.shape[1])  # [b, t, E]
        owner, where = _place(tokens, places)
        own = jnp.take_along_axis(x, where[:, :, None], axis=1)
        own = jnp.where((owner == jax.lax.axis_index(CONTEXT))[:, :, None], own, 0)
        return jax.lax.psum_scatter(own, CONTEXT, scatter_dimension=1, tiled=True)

    mapped = jax.shard_map(local, in_specs=(P(FLAT, None), _ROWS), out_specs=P(ROWS, CONTEXT, None))
    return mapped(x, jax.reshard(places, _ROWS))


def _attend(kernel, tokens: int, first: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """On one device: q[b * t, H, D], k, v[b * t, K, D] of its stripes; first i32[b, T] of whole rows."""
    columns = _columns(tokens)
    q, k, v = (x.reshape(len(first), len(columns), *x.shape[1:]) for x in (q, k, v))
    last = jnp.broadcast_to(columns, q.shape[:2])
    out = kernel(q, _gather(k), _gather(v), jnp.take(first, columns, axis=1), last)
    return out.reshape(-1, *out.shape[2:])


def _gather(x: jax.Array) -> jax.Array:
    """[b, t, ...] of each device's stripes -> [b, T, ...] of the whole row, in its order."""
    return _in_order(jax.lax.all_gather(x, CONTEXT))


def _in_order(x: jax.Array) -> jax.Array:
    """[n, b, t, ...], the stripes of each of n devices, -> [b, T, ...]."""
    n, b, t = x.shape[:3]
    x = x.reshape(n, b, STRIPES, t // STRIPES, *x.shape[3:])
    early, late = x[:, :, 0], x[::-1, :, 1]
    return jnp.moveaxis(jnp.concatenate([early, late]), 0, 1).reshape(b, n * t, *x.shape[4:])


def _stripes(x: jax.Array, n: int) -> jax.Array:
    """The inverse of `_in_order`."""
    b, size = x.shape[0], x.shape[1] // (STRIPES * n)
    early, late = jnp.split(jnp.moveaxis(x.reshape(b, STRIPES * n, size, *x.shape[2:]), 1, 0), 2)
    return jnp.stack([early, late[::-1]], axis=2).reshape(n, b, STRIPES * size, *x.shape[2:])


def _columns(tokens: int) -> jax.Array:
    """i32[t]: the columns of the row that this device's stripes hold, in their order."""
    n, i = jax.lax.axis_size(CONTEXT), jax.lax.axis_index(CONTEXT)
    size = tokens // (STRIPES * n)
    within = jnp.arange(size, dtype=jnp.int32)
    return jnp.concatenate([i * size + within, (STRIPES * n - 1 - i) * size + within])


def _place(tokens: int, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The device that holds a column, and where among its tokens: the inverse of `_columns`."""
    n = jax.lax.axis_size(CONTEXT)
    size = tokens // (STRIPES * n)
    stripe, within = column // size, column % size
    return jnp.minimum(stripe, STRIPES * n - 1 - stripe), jnp.where(stripe < n, within, size + within)


def _blockwise(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """Stripe by stripe: a block of queries must not reach over two, which lie far apart."""
    parts = [jnp.split(x, STRIPES, axis=1) for x in (q, first, last)]
    outs = [blockwise.attend(q, k, v, first, last) for q, first, last in zip(*parts, strict=True)]
    return jnp.concatenate(outs, axis=1)


_KERNELS = {"blocks": _blockwise, "tokamax": gpu_kernels.attend_between}
