"""Attention of packed training rows that are trees: the common beginning of sequences is stored in a row once.

Columns are in depth-first order, so one number per key is the whole mask: the column behind the last query that may see
the key. Of the columns before a block of queries, the block may see those that its first query may see: the path from
the root to that query, which is never longer than a sequence. So a block gathers this path and attends to it and to
itself, and the cost of a token depends on the length of sequences, not on that of rows.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxagent.models.attention import QUERY_BLOCK, Attend, attend_dense
from jaxagent.models.sharding import merge_rows, split_rows

MAX_BLOCKS = 16  # per row: more blocks see less that is masked, and compile longer


def shared(ends: jax.Array, longest: int) -> Attend:
    """Causal attention along the paths of a tree. Keeps no cache.

    Args:
      ends: i32[B, T], a query at column q sees the key at column k if k <= q < ends[k].
      longest: no sequence of a row has more tokens. Static.

    Returns:
      An `Attend` over the flat rows N = B * T. A query that sees no key (padding) gets something finite.
    """
    chex.assert_rank(ends, 2)
    chex.assert_type(ends, int)
    b, t = ends.shape
    size = max(QUERY_BLOCK, -(-t // MAX_BLOCKS))
    spans = [(start, min(start + size, t)) for start in range(0, t, size)]
    paths = [_path(ends, start, longest) for start, _ in spans]
    masks = [_visible(ends, path, *span) for path, span in zip(paths, spans, strict=True)]

    def attend(cache: None, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        q, k, v = (split_rows(x, b, t) for x in (q, k, v))
        outs = []
        for (start, stop), path, mask in zip(spans, paths, masks, strict=True):
            keys, values = (_block_inputs(x, path, start, stop) for x in (k, v))
            outs.append(attend_dense(q[:, start:stop], keys, values, mask))
        return merge_rows(jnp.concatenate(outs, axis=1)), None

    return attend


def _path(ends: jax.Array, start: int, longest: int) -> jax.Array | None:
    """i32[B, L]: the columns before `start` that the query there may see, in order, then others; None: all of them."""
    if start < longest:  # the query's path includes itself
        return None
    hidden = ends[:, :start] <= start
    return jnp.argsort(hidden, axis=1, stable=True)[:, : longest - 1]


def _block_inputs(x: jax.Array, path: jax.Array | None, start: int, stop: int) -> jax.Array:
    """[B, M, K, D]: keys or values of the path, and of the block itself."""
    if path is None:
        return x[:, :stop]
    return jnp.concatenate([jnp.take_along_axis(x, path[:, :, None, None], axis=1), x[:, start:stop]], axis=1)


def _visible(ends: jax.Array, path: jax.Array | None, start: int, stop: int) -> jax.Array:
    """bool[B, stop - start, M]: which of `_block_inputs` each query of the block may see."""
    queries = jnp.arange(start, stop)[:, None]
    first = 0 if path is None else start
    own = (jnp.arange(first, stop) <= queries) & (queries < ends[:, None, first:stop])
    if path is None:
        return own
    # What the first query may not see either ends before the block: no query of it is let in.
    before = queries < jnp.take_along_axis(ends, path, axis=1)[:, None]
    return jnp.concatenate([before, own], axis=2)
