"""Scoring packed rows exactly as the engine sampled them: the same tiles, page after page, bit for bit.

XLA picks kernels by shape, so a matrix product of 64 rows and one of 1024 round differently, and so do norms and
softmaxes. Here every row goes through programs of one shape, `tile_rows` rows at a time, and attends to its own
sequence in pages that start at its own first token (docs/design.md, "Exact numerics"). What a token gets then depends
on its own sequence alone: not on the rest of the batch, on packing, or on whether it is decoded, prefilled or trained.

Axis letters: B packed rows, T tokens per row, R targets per row, n tiles, N rows of a tile over all shards, E embed.
"""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

from jaxagent.models import kernels, sharding, transformer
from jaxagent.models.attention import LayerCache, attend_pages, write_pages
from jaxagent.models.blocks import Cache
from jaxagent.models.logprobs import logits, row_logprobs
from jaxagent.models.params import ArraySpec, Params, param_specs, unstack
from jaxagent.models.recurrence import Memories
from jaxagent.models.spec import ModelSpec

_ROWS = jax.P(sharding.ROWS)
_HEADS = jax.P(sharding.ROWS, "tensor", None)
_KEYS = jax.P(sharding.ROWS, "tensor", None, None)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The sizes of the engine that change how its numbers are rounded. Static under jit."""

    tile_rows: int
    page_tokens: int
    cache_dtype: str


@jax.named_scope("exact_logprobs")
@kernels.pinned()
def packed_logprobs(
    params: Params,
    spec: ModelSpec,
    tiling: Tiling,
    tokens: jax.Array,
    positions: jax.Array,
    head_positions: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    shared: bool = False,
) -> jax.Array:
    """Log-probs of the targets of packed rows, as `engine.functions.generate` records them.

    Args:
      params, spec: the model, stored in any layout.
      tiling: the engine's.
      tokens, positions: i32[B, T], B split over data and fsdp; positions inside each sequence of a row.
      head_positions: i32[B, R] the places before the targets.
      targets: i32[B, R].
      temperature: f32[B, R], positive.
      shared: the sequences of a row share whole pages of their beginnings, as in the engine's cache. Static.

    Returns:
      f32[B, R]. Not differentiable: see `with_value`.
    """
    chex.assert_rank([tokens, targets], 2)
    chex.assert_equal_shape([tokens, positions])
    chex.assert_equal_shape([head_positions, targets, temperature])
    chex.assert_type([tokens, positions, head_positions, targets, temperature], [int, int, int, int, float])
    assert not (shared and spec.has_memory), "a memory takes rows of whole sequences"
    b = tokens.shape[0]
    params = _as_generation(params, spec)
    starts = _page_starts(positions, tiling.page_tokens) if shared else None
    x = _hidden(params, spec, tiling, tokens, positions, starts)  # [B, T, E]
    x = jnp.take_along_axis(x, head_positions[:, :, None], axis=1)
    rows = [_to_tiles(a, tiling.tile_rows) for a in (x, targets, temperature)]

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        x, targets, temperature = (sharding.tile_at(a, i) for a in rows)
        scores = jax.reshard(logits(params, spec, x), jax.P(sharding.ROWS, None))
        logprobs_of = jax.shard_map(row_logprobs, in_specs=(jax.P(sharding.ROWS, None), _ROWS, _ROWS), out_specs=_ROWS)
        return out.at[i].set(logprobs_of(scores, targets, jnp.where(temperature > 0, temperature, 1.0)))

    out = jax.lax.fori_loop(0, rows[1].shape[0], tile, jnp.zeros_like(rows[2]))
    return _from_tiles(out, b, head_positions.shape[1])


@jax.custom_vjp
def with_value(plain: jax.Array, exact: jax.Array) -> jax.Array:
    """The value of `exact` with the gradient of `plain`: two roundings of the same function of the weights."""
    chex.assert_equal_shape([plain, exact])
    chex.assert_type([plain, exact], float)
    del plain
    return exact


def _forward(plain: jax.Array, exact: jax.Array) -> tuple[jax.Array, None]:
    return with_value(plain, exact), None


def _backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, jnp.zeros_like(gradient)


with_value.defvjp(_forward, _backward)


def _as_generation(params: Params, spec: ModelSpec) -> Params:
    """Weights as the engine has them: compute dtype, whole over fsdp, one tree per layer; once, not in every tile."""

    def laid_out(array: ArraySpec, weights: jax.Array) -> jax.Array:
        return sharding.constrain(
            weights.astype(array.dtype_among(spec.compute_dtype)), sharding.COMPUTE.partition(array.axes)
        )

    params = jax.tree.map(laid_out, param_specs(spec), params)
    return params.replace(layers=unstack(params.layers))


def _page_starts(positions: jax.Array, page_tokens: int) -> jax.Array:
    """i32[B, T, Q]: the column where page j of each token's sequence begins, in rows that share whole pages.

    Depth first, that is the last column up to the token's own which holds position j * page_tokens: whatever lies
    between belongs to the same sequence or branched off behind it. Of a page past the token's position: any column.
    """
    t = positions.shape[1]
    columns = jnp.arange(t, dtype=jnp.int32)[None, :, None]
    pages = jnp.arange(-(-t // page_tokens), dtype=jnp.int32)
    begins = positions[:, :, None] == pages * page_tokens
    return jax.lax.cummax(jnp.where(begins, columns, 0), axis=1)


def _hidden(
    params: Params,
    spec: ModelSpec,
    tiling: Tiling,
    tokens: jax.Array,
    positions: jax.Array,
    starts: jax.Array | None,
) -> jax.Array:
    """[B, T, E] hidden states, tile after tile in the order of the rows."""
    b, t = tokens.shape
    cache = _init_cache(spec, tiling, b, t)
    all_tokens, all_positions = (_to_tiles(a, tiling.tile_rows) for a in (tokens, positions))
    all_starts = None if starts is None else _to_tiles(starts, tiling.tile_rows)
    x = jnp.zeros(
        (*all_tokens.shape, spec.embed_dim), spec.compute_dtype, out_sharding=jax.P(None, sharding.ROWS, None)
    )

    def tile(i: jax.Array, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, x = carry
        at = sharding.tile_at(all_positions, i)
        begins = None if starts is None else sharding.tile_at(all_starts, i)

        def attend(layer: LayerCache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, LayerCache]:
            return _attend(layer, q, k, v, at, begins, i, t, tiling.page_tokens)

        recur = Memories(_memories(i, at, b, t), at) if spec.has_memory else None
        new, cache = transformer.hidden(params, spec, sharding.tile_at(all_tokens, i), at, attend, cache, True, recur)
        return cache, x.at[i].set(new)

    _, x = jax.lax.fori_loop(0, all_tokens.shape[0], tile, (cache, x))
    return _from_tiles(x, b, t)


def _init_cache(spec: ModelSpec, tiling: Tiling, b: int, t: int) -> Cache:
    """The engine's states, a packed row for a page or memory, with room for a page that begins at its last token."""
    mesh = jax.sharding.get_abstract_mesh().shape
    depth, context = t + tiling.page_tokens, mesh["context"]
    memories = (b + math.prod(mesh[axis] for axis in sharding.ROWS)) * context  # the first of each shard is nobody's
    states = jax.eval_shape(lambda: transformer.init_cache(spec, b * context, depth, memories, tiling.cache_dtype))

    def zeros(a: jax.ShapeDtypeStruct) -> jax.Array:
        shape, where = (a.shape[0] // context, *a.shape[1:]), jax.P(sharding.ROWS, *a.sharding.spec[1:])
        return jnp.zeros(shape, a.dtype, out_sharding=where)

    return jax.tree.map(zeros, states)


def _memories(tile: jax.Array, like: jax.Array, b: int, t: int) -> jax.Array:
    """i32[N]: the memory of each row of the tile, one per packed row; 0 of rows that only fill it."""
    own = b // sharding.row_shards(like)

    def local(tile: jax.Array, like: jax.Array) -> jax.Array:
        row = (tile * len(like) + jnp.arange(len(like), dtype=jnp.int32)) // t
        return jnp.where(row < own, row + 1, jnp.zeros_like(like))

    return jax.shard_map(local, in_specs=(jax.P(), _ROWS), out_specs=_ROWS)(tile, like)


def _attend(
    layer: LayerCache,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    starts: jax.Array | None,
    tile: jax.Array,
    t: int,
    page_tokens: int,
) -> tuple[jax.Array, LayerCache]:
    """Rows tile * N.. of the packed rows, counted in each shard: written, then attended from their own first token."""

    def local(
        layer: LayerCache, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, starts, tile: jax.Array
    ):
        rows = tile * len(q) + jnp.arange(len(q))
        row, column = rows // t, rows % t
        # Rows that only fill the last tile lie past the end: they are not written, and read the last packed row.
        keys, values = write_pages(layer.keys, layer.values, k, v, row, column, page_tokens)
        own, first = jnp.minimum(row, len(keys) - 1)[:, None], column - positions
        out = attend_pages(q, positions, page_tokens, keys, values, own, first if starts is None else starts)
        return out, LayerCache(keys, values)

    return jax.shard_map(
        local, in_specs=(_KEYS, _HEADS, _HEADS, _HEADS, _ROWS, _ROWS, jax.P()), out_specs=(_HEADS, _KEYS)
    )(layer, q, k, v, positions, starts, tile)  # fmt: skip


def _to_tiles(a: jax.Array, tile_rows: int) -> jax.Array:
    """[B, T, ...] -> [n, N, ...]: each shard's rows in order, cut into tiles and filled up with zeros."""
    shards = sharding.row_shards(a)
    b, t, *rest = a.shape
    rows = b // shards * t
    tiles = -(-rows // tile_rows)
    a = sharding.split_rows(sharding.merge_rows(a), shards, rows)
    a = jnp.pad(a, ((0, 0), (0, tiles * tile_rows - rows), *((0, 0),) * len(rest)))
    spec = jax.P(sharding.ROWS, None, None, *(None,) * len(rest))
    a = a.reshape(shards, tiles, tile_rows, *rest, out_sharding=spec).swapaxes(0, 1)
    return a.reshape(tiles, shards * tile_rows, *rest, out_sharding=jax.P(None, sharding.ROWS, *(None,) * len(rest)))


def _from_tiles(a: jax.Array, b: int, t: int) -> jax.Array:
    """The inverse of `_to_tiles`."""
    mesh = jax.sharding.get_abstract_mesh().shape
    shards = math.prod(mesh[axis] for axis in sharding.ROWS)
    tiles, n, *rest = a.shape
    none = (None,) * len(rest)
    a = a.reshape(tiles, shards, n // shards, *rest, out_sharding=jax.P(None, sharding.ROWS, None, *none))
    a = a.swapaxes(0, 1).reshape(shards, tiles * n // shards, *rest, out_sharding=jax.P(sharding.ROWS, None, *none))
    a = a[:, : b // shards * t]
    return sharding.split_rows(sharding.merge_rows(a), b, t)
