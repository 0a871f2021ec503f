"""The paged cache of keys and values, and attention over it.

Per layer, keys lie as [P, K, D, page_tokens] (the layout in which a CPU multiplies them fastest) and values as
[P, K, page_tokens, D]. Pages are sharded over (data, fsdp, context) and kv heads over tensor; each device touches only
its own (`shard_map`), so the same code runs on one device and on many. Nothing is ever cleared: a position is always
written before it is attended.

Axis letters: P pages, K kv heads, D head dim, N rows, H heads, Q pages per sequence.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxagent.engine.model import ROWS
from jaxagent.models import kernels, paged_tpu
from jaxagent.models.attention import attend_pages

_AXES = ROWS[0]
SPEC = jax.P(_AXES, "tensor", None, None)  # of both arrays
_HEADS = jax.P(_AXES, "tensor", None)  # of [N, H, D]


@flax.struct.dataclass
class LayerCache:
    """One layer's keys (rotated) and values."""

    keys: jax.Array  # [P, K, D, page_tokens]
    values: jax.Array  # [P, K, page_tokens, D]


def init(layers: int, pages: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: str) -> tuple[LayerCache, ...]:
    """Zeros, one LayerCache per layer: separate arrays, so that a donated cache is updated in place."""
    keys, values = (pages, kv_heads, head_dim, page_tokens), (pages, kv_heads, page_tokens, head_dim)
    return tuple(
        LayerCache(jnp.zeros(keys, dtype, out_sharding=SPEC), jnp.zeros(values, dtype, out_sharding=SPEC))
        for _ in range(layers)
    )


def attend(
    cache: LayerCache, q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, positions: jax.Array
) -> tuple[jax.Array, LayerCache]:
    """Writes one token per row, then lets each row attend to its own sequence up to itself.

    Args:
      cache: one layer's.
      q: [N, H, D]; k, v: [N, K, D].
      tables: i32[M, Q] pages of a sequence, which N / M rows in a row share.
      positions: i32[N].

    Returns:
      ([N, H, D], the cache). A token is seen through the cache's dtype, as it will be seen later.
    """

    def local(cache: LayerCache, q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, positions: jax.Array):
        page_tokens = cache.keys.shape[-1]
        share = len(q) // len(tables)
        of_rows = tables if share == 1 else jnp.repeat(tables, share, axis=0)
        page = jnp.take_along_axis(of_rows, (positions // page_tokens)[:, None], axis=1)[:, 0]
        offset = positions % page_tokens
        if kernels.paged(kernels.platform(), q.shape[-1], page_tokens).name == "mosaic":
            keys, values = paged_tpu.write(cache.keys, cache.values, k, v, page, offset)
        else:
            keys = cache.keys.at[page, :, :, offset].set(k.astype(cache.keys.dtype))
            values = cache.values.at[page, :, offset].set(v.astype(cache.values.dtype))
        out = attend_pages(q, positions, page_tokens, keys, values, tables)
        return out, LayerCache(keys, values)

    rows = jax.P(_AXES, None)
    return jax.shard_map(
        local, in_specs=(SPEC, _HEADS, _HEADS, _HEADS, rows, ROWS), out_specs=(_HEADS, SPEC)
    )(cache, q, k, v, tables, positions)  # fmt: skip


def copy_pages(cache: tuple[LayerCache, ...], source: jax.Array, target: jax.Array) -> tuple[LayerCache, ...]:
    """Copies page source[i] to page target[i] of every layer; i32[n], sharded over rows, numbers of the own shard."""

    def local(cache: tuple[LayerCache, ...], source: jax.Array, target: jax.Array) -> tuple[LayerCache, ...]:
        return jax.tree.map(lambda pages: pages.at[target].set(pages[source]), cache)

    return jax.shard_map(local, in_specs=(SPEC, ROWS, ROWS), out_specs=SPEC)(cache, source, target)
