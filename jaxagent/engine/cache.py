"""The dense slot cache of keys and values: arrays [S,K,M,D] per layer, and the copies in and out of it.

A (slot, kv head) is one contiguous [M,D] block, the way decode reads it. Slots are sharded over (data, fsdp) and kv
heads over tensor; each device moves only what lies on it (`shard_map`), so the same code runs on one device and on
many. Nothing is ever cleared: a position is always written before it is attended.

Axis letters: S slots, K kv heads, M cached positions, D head dim, b prefill rows, C tokens per row, L layers.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxagent.engine.model import SLOTS

SPEC = jax.P(*SLOTS, "tensor", None, None)  # of [S,K,M,D] and of prefix rows [b,K,C,D]
_BY_HEAD = jax.P(None, "tensor", None, None)
_AXES = SLOTS[0]


@flax.struct.dataclass
class LayerCache:
    """One layer's keys (rotated) and values."""

    keys: jax.Array  # [S,K,M,D]
    values: jax.Array  # [S,K,M,D]


def init(layers: int, slots: int, kv_heads: int, context: int, head_dim: int, dtype: str) -> tuple[LayerCache, ...]:
    """Zeros, one LayerCache per layer: separate arrays, so that a donated decode updates each in place."""
    shape = (slots, kv_heads, context, head_dim)
    return tuple(
        LayerCache(jnp.zeros(shape, dtype, out_sharding=SPEC), jnp.zeros(shape, dtype, out_sharding=SPEC))
        for _ in range(layers)
    )


def layer(stacked: LayerCache, index: int) -> LayerCache:
    """One layer of a LayerCache whose arrays have a leading L axis."""
    return jax.tree.map(lambda x: x[index], stacked)


def write_token(cache: LayerCache, keys: jax.Array, values: jax.Array, position: jax.Array) -> LayerCache:
    """Writes one token per slot: keys, values [S,K,D] at position i32[S]."""

    def write(cache: LayerCache, keys: jax.Array, values: jax.Array, position: jax.Array) -> LayerCache:
        slots = jnp.arange(position.shape[0])
        put = lambda old, new: old.at[slots, :, position].set(new.astype(old.dtype), mode="drop")  # noqa: E731
        return LayerCache(put(cache.keys, keys), put(cache.values, values))

    token = jax.P(*SLOTS, "tensor", None)
    return jax.shard_map(write, in_specs=(SPEC, token, token, SLOTS), out_specs=SPEC)(cache, keys, values, position)


def read_rows(cache: LayerCache, slot: jax.Array) -> LayerCache:
    """The cache of slot i32[b], as rows [b,K,M,D] sharded like slots."""

    def read(cache: LayerCache, slot: jax.Array) -> LayerCache:
        local = slot - _first_slot(cache)
        mine = (local >= 0) & (local < cache.keys.shape[0])

        def take(x: jax.Array) -> jax.Array:
            rows = jnp.where(mine[:, None, None, None], x[jnp.where(mine, local, 0)], 0)
            return jax.lax.psum_scatter(rows, _AXES, tiled=True)  # one device has each row; the others add 0

        return jax.tree.map(take, cache)

    def read_here(cache: LayerCache, slot: jax.Array) -> LayerCache:
        return jax.tree.map(lambda x: x[slot], cache)

    read = read_here if _shards() == 1 else read
    return jax.shard_map(read, in_specs=(SPEC, jax.P()), out_specs=SPEC)(cache, jax.reshard(slot, jax.P()))


def write_span(rows: LayerCache, keys: jax.Array, values: jax.Array, start: jax.Array) -> LayerCache:
    """Writes keys, values [b,K,C,D] into rows [b,K,M,D] from position start i32[b] on; what passes M is dropped."""

    def write(rows: LayerCache, keys: jax.Array, values: jax.Array, start: jax.Array) -> LayerCache:
        row = jnp.arange(start.shape[0])
        return LayerCache(
            _put_spans(rows.keys, keys, row, start),
            _put_spans(rows.values, values, row, start),
        )

    return jax.shard_map(write, in_specs=(SPEC, SPEC, SPEC, SLOTS), out_specs=SPEC)(rows, keys, values, start)


def insert(
    cache: tuple[LayerCache, ...],
    prefix: tuple[LayerCache, ...],
    row: jax.Array,
    slot: jax.Array,
    start: jax.Array,
) -> tuple[LayerCache, ...]:
    """Copies row i32[n] of prefix [b,K,C,D] into slot i32[n] from position start i32[n] on; slot S is dropped."""

    def put(cache: tuple, prefix: tuple, row: jax.Array, slot: jax.Array, start: jax.Array) -> tuple:
        first, count = _first_slot(cache[0]), cache[0].keys.shape[0]
        local = slot - first
        local = jnp.where((local >= 0) & (local < count), local, count)  # a negative index would wrap around
        return jax.tree.map(lambda old, new: _put_spans(old, new[row], local, start), cache, prefix)

    specs = (SPEC, _BY_HEAD, jax.P(), jax.P(), jax.P())
    prefix = jax.reshard(prefix, _BY_HEAD)  # any device may own the slot
    return jax.shard_map(put, in_specs=specs, out_specs=SPEC)(cache, prefix, row, slot, start)


def _put_spans(cache: jax.Array, spans: jax.Array, slot: jax.Array, start: jax.Array) -> jax.Array:
    """cache [S,K,M,D] with spans [n,K,C,D] at (slot, start) [n]; out of bounds is dropped."""
    position = start[:, None] + jnp.arange(spans.shape[2])
    spans = spans.swapaxes(1, 2).astype(cache.dtype)  # [n,C,K,D]: indexed axes come first
    return cache.at[slot[:, None], :, position].set(spans, mode="drop")


def _first_slot(cache: LayerCache) -> jax.Array:
    return jax.lax.axis_index(_AXES) * cache.keys.shape[0]


def _shards() -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape["data"] * mesh.shape["fsdp"]
