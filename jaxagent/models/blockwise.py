"""Causal attention in blocks of queries and keys with a running softmax, in plain JAX: its memory grows with tokens.

As FlashAttention-2 (arXiv 2307.08691): forward keeps one number per query and head, backward computes the scores of a
block again. A query sees the keys from its `first` to its `last`; blocks that no query of a block sees are skipped, so
that packed sequences and causality save time and not only count.

Axis letters: b rows, t queries, T keys, H heads, K kv heads, G = H / K, C queries of a block, M keys of a block, n
blocks.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxagent.models.layers import KEPT, MASKED, contract

BLOCK = 512  # queries of a block, and keys, at most


@jax.named_scope("attend_blockwise")
def attend(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v over the keys first..last of each query; scores and softmax in float32.

    On one device's arrays, for use inside `jax.shard_map` or without a mesh. Differentiable in q, k and v.

    Args:
      q: [b, t, H, D]; H a multiple of K.
      k, v: [b, T, K, D].
      first, last: i32[b, t], of keys. Best so that neighbouring queries see nearly the same keys.

    Returns:
      [b, t, H, D] in the dtype of `q`; zeros for a query that sees nothing (last < first).
    """
    chex.assert_rank([q, k], 4)
    chex.assert_equal_shape([k, v])
    chex.assert_shape([first, last], q.shape[:2])
    chex.assert_type([q, k, v, first, last], [float, float, float, int, int])
    b, t, h, d = q.shape
    kv_heads, size = k.shape[2], min(BLOCK, t)
    more = -t % size
    q = jnp.pad(q * jnp.asarray(d**-0.5, q.dtype), ((0, 0), (0, more), (0, 0), (0, 0)))
    q = q.reshape(b, -1, size, kv_heads, h // kv_heads, d).transpose(1, 0, 3, 4, 2, 5)  # [n, b, K, G, C, D]
    # What fills the last block sees what its last query sees, so that it makes no block look further back.
    first, last = (jnp.pad(x, ((0, 0), (0, more)), "edge").reshape(b, -1, size).swapaxes(0, 1) for x in (first, last))
    keys = min(BLOCK, k.shape[1])
    k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % keys), (0, 0), (0, 0))).swapaxes(1, 2) for x in (k, v))
    out = _attend(keys, q, k, v, first, last)
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(b, t + more, h, d)[:, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(size: int, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """[n, b, K, G, C, D] for q of that shape, scaled; k, v [b, K, T, D] in blocks of `size`; first, last [n, b, C]."""
    return _forward(size, q, k, v, first, last)[0]


def _forward(size: int, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array):
    def block(xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, first, last = xs

        def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            peak, total, acc = carry
            scores, visible = _scores(size, j, q, k, first, last)
            new = jnp.maximum(peak, scores.max(axis=-1))
            weights = jnp.where(visible, jnp.exp(scores - new[..., None]), 0.0)
            keep = jnp.exp(peak - new)
            more = contract("bkgcm,bkmd->bkgcd", weights.astype(v.dtype), _cut(v, j, size), dtype=jnp.float32)
            return new, total * keep + weights.sum(axis=-1), acc * keep[..., None] + more

        zeros = jnp.zeros(q.shape, jnp.float32)
        start = (zeros[..., 0] + MASKED, zeros[..., 0], zeros)
        peak, total, acc = jax.lax.fori_loop(*_blocks(size, first, last), step, start)
        total = jnp.where(total > 0, total, 1.0)
        return (acc / total[..., None]).astype(q.dtype), peak + jnp.log(total)

    out, log_total = (checkpoint_name(x, KEPT) for x in jax.lax.map(block, (q, first, last)))
    return out, (q, k, v, first, last, out, log_total)


def _backward(size: int, residuals: tuple[jax.Array, ...], gradient: jax.Array):
    q, k, v, first, last, out, log_total = residuals

    def block(to_kv: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, ...]):
        q, first, last, out, log_total, gradient = xs
        mean = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1, keepdims=True)

        def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            to_q, to_k, to_v = carry
            scores, visible = _scores(size, j, q, k, first, last)
            weights = jnp.where(visible, jnp.exp(scores - log_total[..., None]), 0.0)
            to_weights = contract("bkgcd,bkmd->bkgcm", gradient, _cut(v, j, size), dtype=jnp.float32)
            to_scores = (weights * (to_weights - mean)).astype(q.dtype)
            add_k = contract("bkgcm,bkgcd->bkmd", to_scores, q, dtype=jnp.float32)
            add_v = contract("bkgcm,bkgcd->bkmd", weights.astype(q.dtype), gradient, dtype=jnp.float32)
            to_q += contract("bkgcm,bkmd->bkgcd", to_scores, _cut(k, j, size), dtype=jnp.float32)
            return to_q, _add(to_k, j, add_k), _add(to_v, j, add_v)

        to_q, *to_kv = jax.lax.fori_loop(*_blocks(size, first, last), step, (jnp.zeros(q.shape, jnp.float32), *to_kv))
        return tuple(to_kv), to_q.astype(q.dtype)

    none = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (to_k, to_v), to_q = jax.lax.scan(block, none, (q, first, last, out, log_total, gradient))
    return to_q, to_k.astype(k.dtype), to_v.astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)


def _blocks(size: int, first: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks of keys, from and to, that any query of a block sees."""
    return jnp.min(first) // size, jnp.max(last) // size + 1


def _cut(x: jax.Array, j: jax.Array, size: int) -> jax.Array:
    """Block j of [b, K, T, D]."""
    return jax.lax.dynamic_slice_in_dim(x, j * size, size, axis=2)


def _add(x: jax.Array, j: jax.Array, more: jax.Array) -> jax.Array:
    """[b, K, T, D] with `more` added to block j."""
    at = j * more.shape[2]
    return jax.lax.dynamic_update_slice_in_dim(x, _cut(x, j, more.shape[2]) + more, at, axis=2)


def _scores(
    size: int, j: jax.Array, q: jax.Array, k: jax.Array, first: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """f32[b, K, G, C, M] of a block of queries and block j of keys, MASKED where unseen, and what is seen."""
    scores = contract("bkgcd,bkmd->bkgcm", q, _cut(k, j, size), dtype=jnp.float32)
    column = j * size + jnp.arange(size)
    visible = (first[..., None] <= column) & (column <= last[..., None])  # [b, C, M]
    visible = jnp.broadcast_to(visible[:, None, None], scores.shape)
    return jnp.where(visible, scores, MASKED), visible
