"""Attention over keys that the caller lays out: packed training rows here, the engine's cache in the engine.

`attend_dense` is the one place where scores, softmax and weighted values are computed; the layouts differ only in
which keys they bring and which of them each query may see (`mask`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxagent.models.layers import contract
from jaxagent.models.sharding import merge_rows, split_rows

# A layer's attention: (this layer's cache, q[N, H, D], k[N, K, D], v[N, K, D]) -> (out[N, H, D], new cache).
Attend = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

# A finite stand-in for -inf: a row with nothing to see then gives a mean of values instead of NaN.
MASKED = -1e30

QUERY_BLOCK = 64  # queries per block of packed attention, at least
MAX_BLOCKS = 8  # per row: more blocks skip little more and compile longer


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
    b, c, h, d = q.shape
    kv_heads, group = k.shape[2], h // k.shape[2]
    q = (q * d**-0.5).reshape(b, c, kv_heads, group, d).transpose(0, 2, 3, 1, 4)  # [b, K, G, C, D]
    q = q.reshape(b, kv_heads, group * c, d)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [b, K, M, D]
    scores = contract("bkcd,bkmd->bkcm", q, k, dtype=jnp.float32).reshape(b, kv_heads, group, c, -1)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(b, kv_heads, group * c, -1)
    out = contract("bkcm,bkmd->bkcd", weights, v).reshape(b, kv_heads, group, c, d)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, c, h, d)


def packed(segments: jax.Array) -> Attend:
    """Attention of packed training rows: causal, and only inside a segment. Keeps no cache.

    Queries go in blocks, each against the keys up to its own end: what causality hides is mostly not computed, and
    a block's scores fit in cache (2.6 times faster than one [T, T] product at T = 256 on a CPU).

    Args:
      segments: i32[B, T], which sequence of the row each token belongs to; 0 is padding.

    Returns:
      An `Attend` over the flat rows N = B * T.
    """
    b, t = segments.shape
    block = max(QUERY_BLOCK, -(-t // MAX_BLOCKS))
    spans = [(start, min(start + block, t)) for start in range(0, t, block)]
    masks = [_visible(segments, start, stop) for start, stop in spans]

    def attend(cache: None, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        q, k, v = (split_rows(x, b, t) for x in (q, k, v))
        outs = [
            attend_dense(q[:, start:stop], k[:, :stop], v[:, :stop], mask)
            for (start, stop), mask in zip(spans, masks, strict=True)
        ]
        return merge_rows(jnp.concatenate(outs, axis=1)), None

    return attend


def _visible(segments: jax.Array, start: int, stop: int) -> jax.Array:
    """bool[B, stop - start, stop]: which of the first `stop` tokens the queries start..stop may see."""
    causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
    return (segments[:, start:stop, None] == segments[:, None, :stop]) & causal[None]
