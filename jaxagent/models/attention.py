"""Attention over keys that the caller lays out, in two forms.

`attend_dense`: all keys of a row at once, for packed training rows below a length. `attend_pages`: page after page of
each query's own sequence with a running softmax, for the engine's cache and for exact scoring: what a query gets then
depends on its own sequence alone, bit for bit, not on what else is in the batch (docs/design.md, "Exact numerics").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxagent.models import blockwise, gpu_kernels, kernels, layers, tpu_kernels
from jaxagent.models.layers import MASKED, contract
from jaxagent.models.sharding import ROWS, in_mesh, merge_rows, row_axes, split_rows

# A layer's attention: (this layer's cache, q[N, H, D], k[N, K, D], v[N, K, D]) -> (out[N, H, D], new cache).
Attend = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

_HEADS = P(ROWS, None, "tensor", None)

QUERY_BLOCK = 64  # queries per block of packed attention, at least
GROUP_ROWS = 32  # rows of paged attention that share a loop over pages; part of the exact numerics
_PAGED = {"triton": gpu_kernels, "mosaic": tpu_kernels}
MAX_BLOCKS = 8  # per row: more blocks skip little more and compile longer


@flax.struct.dataclass
class LayerCache:
    """One layer's keys (rotated) and values: of P pages, or of P packed rows, each one long page."""

    keys: jax.Array  # [P, K, D, page_tokens]
    values: jax.Array  # [P, K, page_tokens, D]


@jax.named_scope("attend_dense")
def attend_dense(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v, scores and softmax in float32.

    Query heads that share a key head are folded into its query axis, [b, K, G*C, D] against [b, K, M, D]: plain
    batched matrix products, and keys are never copied H / K times.

    Args:
      q: [b, C, H, D] queries; H a multiple of K.
      k: [b, M, K, D] keys, already rotated.
      v: [b, M, K, D] values.
      mask: bool[b, C, M], True where query c may see key m.

    Returns:
      [b, C, H, D] in the dtype of `q`.
    """
    chex.assert_rank(q, 4)
    chex.assert_shape(k, (q.shape[0], None, None, q.shape[3]))
    chex.assert_equal_shape([k, v])
    chex.assert_shape(mask, (*q.shape[:2], k.shape[1]))
    chex.assert_type([q, k, v, mask], [float, float, float, bool])
    if not in_mesh():
        return _attend_dense(q, k, v, mask)
    # Each device by itself: how a reshape splits an axis of length one is inferred differently by versions of JAX.
    rows = row_axes(q)  # None where every device has all of them
    heads = P(rows, None, "tensor", None)
    arguments = [*(jax.reshard(x, heads) for x in (q, k, v)), jax.reshard(mask, P(rows, None, None))]
    return jax.shard_map(_attend_dense, in_specs=(*[heads] * 3, P(rows, None, None)), out_specs=heads)(*arguments)


def _attend_dense(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    b, c, h, d = q.shape
    kv_heads, group = k.shape[2], h // k.shape[2]
    q = (q * d**-0.5).reshape(b, c, kv_heads, group, d).transpose(0, 2, 3, 1, 4)  # [b, K, G, C, D]
    q = q.reshape(b, kv_heads, group * c, d)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [b, K, M, D]
    scores = contract("bkcd,bkmd->bkcm", q, k, dtype=jnp.float32).reshape(b, kv_heads, group, c, -1)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    # Softmax, divided after the product with the values: D divisions per query, not M, and less to do in backward.
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights.astype(v.dtype).reshape(b, kv_heads, group * c, -1)
    out = contract("bkcm,bkmd->bkcd", weights, v, dtype=jnp.float32).reshape(b, kv_heads, group, c, d) / total
    return out.astype(v.dtype).transpose(0, 3, 1, 2, 4).reshape(b, c, h, d)


@jax.named_scope("attend_pages")
def attend_pages(
    q: jax.Array,
    positions: jax.Array,
    page_tokens: int,
    keys: jax.Array,
    values: jax.Array,
    blocks: jax.Array,
    starts: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v with a running softmax (Milakov and Gimelshein, arXiv 1805.02867) over pages of keys.

    A page that a query may not see at all changes none of its bits: its maximum stays, it is scaled by exp(0) = 1 and
    gets 0 added. So queries of different lengths share one loop, which runs to the end of the longest; rows go in small
    groups, so that few pay for one that is long.

    Args:
      q: [N, H, D] one query per row; H a multiple of K.
      positions: i32[N], the query's place in its own sequence; it sees keys 0..position.
      page_tokens: keys per page.
      keys, values: [B, K, D, C] and [B, K, C, D]: blocks of C keys. What lies past a position may be anything finite.
      blocks: i32[M, Q], the block of each page of a sequence, which N / M rows in a row share; the last one also of all
        further pages. Rows that share read a page once, in one product: other roundings than one by one.
      starts: i32[M], where in its block page 0 begins, page j then page_tokens * j further on; or i32[M, J], where page
        j begins (plain code only). None: at 0, every page.

    Returns:
      [N, H, D] in the dtype of `q`.
    """
    chex.assert_rank([q, positions, keys, values, blocks], [3, 1, 4, 4, 2])
    chex.assert_equal_shape_prefix([q, positions], 1)
    chex.assert_shape(values, (*keys.shape[:2], keys.shape[3], keys.shape[2]))
    chex.assert_type([q, keys, values, positions, blocks], [float, float, float, int, int])
    n, h, d = q.shape
    m = len(blocks)
    kernel = _PAGED.get(kernels.paged(kernels.platform(), d, page_tokens).name)
    if kernel is not None:
        return kernel.attend_pages(q, positions, page_tokens, keys, values, blocks, starts)
    q, positions = q.reshape(m, n // m, h, d), positions.reshape(m, n // m)
    size = math.gcd(m, GROUP_ROWS)

    def group(i: jax.Array, out: jax.Array) -> jax.Array:
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size)  # noqa: E731
        own_blocks, own_starts = cut(blocks), None if starts is None else cut(starts)

        def read(j: jax.Array) -> tuple[jax.Array, jax.Array]:
            block = jax.lax.dynamic_index_in_dim(own_blocks, j, axis=1, keepdims=False)  # the last one past the end
            if own_starts is None:
                return keys[block], values[block]
            if own_starts.ndim == 2:
                begins = jax.lax.dynamic_index_in_dim(own_starts, j, axis=1, keepdims=False)
                return layers.cut(keys, values, block, begins, page_tokens)
            return layers.cut(keys, values, block, own_starts + j * page_tokens, page_tokens)

        new = _attend_group(cut(q), cut(positions), page_tokens, keys.shape[1], read)
        return jax.lax.dynamic_update_slice_in_dim(out, new, i * size, 0)

    return jax.lax.fori_loop(0, m // size, group, jnp.zeros_like(q)).reshape(n, h, d)


def write_pages(
    keys: jax.Array, values: jax.Array, k: jax.Array, v: jax.Array, page: jax.Array, offset: jax.Array, page_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Writes one token per row, in place where the pages are given up.

    Args:
      keys, values: [P, K, D, C] and [P, K, C, D]: pages of C tokens, or packed rows as `attend_pages` takes them.
      k, v: [N, K, D].
      page, offset: i32[N]. A row with a page past the last one is not written.
      page_tokens: keys per page, by which the kernel is chosen.

    Returns:
      The pages.
    """
    kernel = _PAGED.get(kernels.paged(kernels.platform(), k.shape[-1], page_tokens).name)
    if kernel is gpu_kernels or (kernel is tpu_kernels and keys.shape[-1] == page_tokens):
        return kernel.write(keys, values, k, v, page, offset)
    keys = keys.at[page, :, :, offset].set(k.astype(keys.dtype), mode="drop")
    return keys, values.at[page, :, offset].set(v.astype(values.dtype), mode="drop")


def _attend_group(
    q: jax.Array,
    positions: jax.Array,
    page_tokens: int,
    kv_heads: int,
    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """[m, r, H, D] for queries q[m, r, H, D] at positions i32[m, r]; each of the m sequences reads its pages once."""
    m, r, h, d = q.shape
    group = h // kv_heads
    folded = (q * jnp.asarray(d**-0.5, q.dtype)).reshape(m, r, kv_heads, group, d)
    folded = folded.swapaxes(1, 2).reshape(m, kv_heads, r * group, d)
    last = jnp.repeat(positions, group, axis=1)[:, None, :, None]  # [m, 1, r * G, 1]

    def page(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, acc = carry
        keys, values = read(j)
        scores = contract("mkqd,mkdp->mkqp", folded, keys.astype(q.dtype), dtype=jnp.float32)
        visible = (j * page_tokens + jnp.arange(page_tokens)) <= last
        scores = jnp.where(visible, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0.0)
        keep = jnp.exp(peak - new_peak)
        out = contract("mkqp,mkpd->mkqd", weights.astype(q.dtype), values.astype(q.dtype), dtype=jnp.float32)
        return new_peak, total * keep + weights.sum(axis=-1), acc * keep[..., None] + out

    zeros = jnp.zeros_like(folded, jnp.float32)
    start = (zeros[..., 0] + MASKED, zeros[..., 0], zeros)
    _, total, acc = jax.lax.fori_loop(0, jnp.max(positions) // page_tokens + 1, page, start)
    out = (acc / total[..., None]).reshape(m, kv_heads, r, group, d).swapaxes(1, 2)
    return out.reshape(m, r, h, d).astype(q.dtype)


def packed(segments: jax.Array) -> Attend:
    """Attention of packed training rows: causal, and only inside a segment. Keeps no cache.

    In plain code the queries of short rows go in blocks, each against the keys up to its own end: what causality hides
    is mostly not computed, and a block's scores fit in cache (2.6 times faster than one [T, T] product at T = 256 on a
    CPU). Of rows from `kernels.LONG_ROW` tokens on keys go in blocks, too (blockwise.py), and no scores are kept.

    Args:
      segments: i32[B, T], which sequence of the row each token belongs to; 0 is padding.

    Returns:
      An `Attend` over the flat rows N = B * T.
    """
    chex.assert_rank(segments, 2)
    chex.assert_type(segments, int)
    b, t = segments.shape
    block = max(QUERY_BLOCK, -(-t // MAX_BLOCKS))
    spans = [(start, min(start + block, t)) for start in range(0, t, block)]
    masks = [_visible(segments, start, stop) for start, stop in spans]

    def attend(cache: None, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        q, k, v = (split_rows(x, b, t) for x in (q, k, v))
        kernel = _PACKED[kernels.packed(kernels.platform(), str(q.dtype), t).name]
        if kernel is not None:
            if in_mesh():
                specs = (P(ROWS, None), *[_HEADS] * 3)
                kernel = jax.shard_map(kernel, in_specs=specs, out_specs=_HEADS, check_vma=False)
            return merge_rows(kernel(segments, q, k, v)), None
        outs = [
            attend_dense(q[:, start:stop], k[:, :stop], v[:, :stop], mask)
            for (start, stop), mask in zip(spans, masks, strict=True)
        ]
        return merge_rows(jnp.concatenate(outs, axis=1)), None

    return attend


def _in_blocks(segments: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Plain code for long rows; as `gpu_kernels.attend`, of any dtype."""
    last = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    return blockwise.attend(q, k, v, gpu_kernels.first_of_segment(segments), last)


def _visible(segments: jax.Array, start: int, stop: int) -> jax.Array:
    """bool[B, stop - start, stop]: which of the first `stop` tokens the queries start..stop may see."""
    causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
    return (segments[:, start:stop, None] == segments[:, None, :stop]) & causal[None]


# "xla" is what `packed` does itself.
_PACKED = {"xla": None, "tokamax": gpu_kernels.attend, "splash": tpu_kernels.attend, "blocks": _in_blocks}
