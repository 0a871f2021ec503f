"""Transformers behind the engine: the trainer's layers, with attention over a paged cache of keys and values.

`models.transformer.hidden` does all the maths over flat rows; a prefill is rows of one sequence, a decode step is one
row per sequence, and neither knows which it is.

What a layer keeps of a sequence its blocks say (`LayerBlock`), in pages or in memories that are sharded over all axes
but tensor (`sharding.FLAT`), heads over tensor; each device touches only its own (`shard_map`), so the same code runs
on one device and on many.

Axis letters: N rows of a tile, P pages, Q pages per sequence, H heads, K kv heads, D head dim, E embed, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.engine.model import ROWS
from jaxagent.models import choices, kernels, logprobs, sharding, transformer
from jaxagent.models import params as model_params
from jaxagent.models.attention import LayerCache, attend_pages, write_pages
from jaxagent.models.blocks import Cache, State
from jaxagent.models.blocks.attention import PAGES
from jaxagent.models.layers import quantise
from jaxagent.models.recurrence import Memories
from jaxagent.models.spec import ModelSpec

_AXES = ROWS[0]
_HEADS = jax.P(_AXES, "tensor", None)  # of [N, H, D]


def attend_cached(
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
        page, offset = _places(tables, positions, page_tokens)
        keys, values = write_pages(cache.keys, cache.values, k, v, page, offset, page_tokens)
        out = attend_pages(q, positions, page_tokens, keys, values, tables)
        return out, LayerCache(keys, values)

    rows = jax.P(_AXES, None)
    return jax.shard_map(
        local, in_specs=(PAGES, _HEADS, _HEADS, _HEADS, rows, ROWS), out_specs=(_HEADS, PAGES)
    )(cache, q, k, v, tables, positions)  # fmt: skip


def record_choices(pages: State, chosen: jax.Array, tables: jax.Array, positions: jax.Array) -> State:
    """Writes the choices i32[N, k] of one token per row into a block's pages [P, page_tokens, k]."""

    def local(pages: jax.Array, chosen: jax.Array, tables: jax.Array, positions: jax.Array) -> jax.Array:
        return pages.at[_places(tables, positions, pages.shape[1])].set(chosen.astype(pages.dtype))

    rows, whole = jax.P(_AXES, None), jax.P(_AXES, None, None)
    mapped = jax.shard_map(local, in_specs=(whole, rows, rows, ROWS), out_specs=whole)
    return mapped(pages, chosen, tables, positions)


def _places(tables: jax.Array, positions: jax.Array, page_tokens: int) -> tuple[jax.Array, jax.Array]:
    """The page of each row's token, and where in it: i32[N] each."""
    share = len(positions) // len(tables)
    of_rows = tables if share == 1 else jnp.repeat(tables, share, axis=0)
    page = jnp.take_along_axis(of_rows, (positions // page_tokens)[:, None], axis=1)[:, 0]
    return page, positions % page_tokens


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Implements `engine.model.Model` for every family that `models.transformer` runs.

    `cache_dtype` is the dtype of keys and values at rest; attention is computed in the model's compute dtype. With
    `int8`, placed matrices are rounded to int8, a quarter of float32's memory, and multiplied out where they are used.
    `exact`: for exact numerics, see `kernels.products`. With `records` the cache keeps what blocks chose for each
    token, for the trainer to replay: in fast numerics, since in exact ones it chooses the same.
    """

    spec: ModelSpec
    cache_dtype: str
    int8: bool = False
    exact: bool = False
    records: bool = False

    @property
    def vocab_size(self) -> int:
        """V, padding included."""
        return self.spec.padded_vocab_size

    def pinned(self) -> LanguageModel:
        """The same model in exact numerics."""
        return dataclasses.replace(self, exact=True, records=False)

    @property
    def choices(self) -> int:
        """W: numbers that the cache keeps of what was chosen for a token."""
        return choices.width(self.spec) if self.records else 0

    def place(self, params: model_params.Params) -> model_params.Params:
        """Weights in compute dtype, whole over fsdp, split over tensor, one tree per layer; placed ones as they are.

        Layers are taken out of their stack here, once per weight update: a program that cuts them out of the stack
        copies all of them at every dispatch, and takes twice as long to compile (measured with 30 layers). One small
        program takes any of them.
        """
        if isinstance(params.layers, tuple):
            return params
        placed = self.lay_out(params)
        return placed.replace(layers=model_params.unstack(placed.layers, _take))

    @functools.partial(jax.jit, static_argnums=0)
    def lay_out(self, params: model_params.Params) -> model_params.Params:
        """Weights in compute dtype, whole over fsdp, split over tensor, still stacked; such ones as they are.

        With `int8` their matrices are rounded, but not an embedding that is only looked up, nor what chooses experts or
        gates what a block adds.
        """

        def place_stack(array: model_params.ArraySpec, weights: jax.Array) -> jax.Array:
            return jax.reshard(
                weights.astype(array.dtype_among(self.spec.compute_dtype)), sharding.COMPUTE.partition(array.axes)
            )

        specs = model_params.param_specs(self.spec)
        params = jax.tree.map(place_stack, specs, params)
        if not self.int8:
            return params
        head = "embed" if params.head is None else "head"
        rounded = jax.tree.map(lambda array, w: quantise(w, array.summed) if array.projects else w, specs, params)
        return params.replace(layers=rounded.layers, **{head: getattr(rounded, head)})

    @property
    def in_memories(self) -> tuple[tuple[bool, ...], ...]:
        """Of each block of each layer, whether its state lies in memories."""
        kinds = [tuple(block.has_memory for block in blocks) for blocks in self.spec.pattern]
        return tuple(kinds[i % len(kinds)] for i in range(self.spec.num_layers))

    @property
    def keeps_memories(self) -> bool:
        """Whether some block keeps a state of fixed size."""
        return self.spec.has_memory

    @property
    def memory_bytes(self) -> int:
        """What a memory takes, in all layers. Asked under the mesh."""
        kinds, layers = self.spec.pattern, range(self.spec.num_layers)
        blocks = [block for i in layers for block in kinds[i % len(kinds)] if block.has_memory]
        memories = jax.eval_shape(lambda: [block.init_memory(self.spec, 0, self.cache_dtype) for block in blocks])
        return sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in jax.tree.leaves(memories))

    def init_cache(self, pages: int, page_tokens: int, memories: int = 0) -> Cache:
        """The states of all blocks of all layers."""
        return transformer.init_cache(self.spec, pages, page_tokens, memories, self.cache_dtype, self.records)

    def extend(
        self, params: model_params.Params, cache: Cache, tokens: jax.Array, positions: jax.Array, tables: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Caches one tile of tokens (arguments: `Model.extend`); returns their hidden states [N, E] and the cache."""

        pages = tables[:, :-1] if self.keeps_memories else tables

        def attend(layer: LayerCache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, LayerCache]:
            return attend_cached(layer, q, k, v, pages, positions)

        def record(state: State, scores: jax.Array, chosen: jax.Array) -> tuple[jax.Array, State]:
            return chosen, record_choices(state, chosen, pages, positions)

        recur, choose = None, record if self.records else None
        if self.keeps_memories:
            share = len(tokens) // len(tables)
            of_rows = jax.shard_map(lambda numbers: jnp.repeat(numbers, share), in_specs=ROWS, out_specs=ROWS)
            recur = Memories(of_rows(tables[:, -1]), positions)

        with kernels.pinned(self.exact):
            return transformer.hidden(params, self.spec, tokens, positions, attend, cache, True, recur, choose)

    def logits(self, params: model_params.Params, hidden: jax.Array) -> jax.Array:
        """Next-token logits f32[N, V] of the hidden states that `extend` returned."""
        with kernels.pinned(self.exact):
            return jax.reshard(logprobs.logits(params, self.spec, hidden), jax.P(*ROWS, None))

    def copy_pages(self, cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
        """Copies pages within the cache of every layer (arguments: `Model.copy_pages`)."""

        def copied(state: State, source: jax.Array, target: jax.Array) -> State:
            return jax.tree.map(lambda pages: pages.at[target].set(pages[source]), state)

        return self._copied(cache, False, copied, source, target)

    def copy_memories(self, cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
        """Copies memories within the cache of every layer (arguments: `Model.copy_memories`)."""

        def copied(state: State, source: jax.Array, target: jax.Array) -> State:
            # One after the other and no more than asked for: a model's memory may have tens of megabytes.
            def copy(i: jax.Array, state: State) -> State:
                return jax.tree.map(lambda memories: memories.at[target[i]].set(memories[source[i]]), state)

            return jax.lax.fori_loop(0, jnp.sum(target > 0), copy, state)

        return self._copied(cache, True, copied, source, target)

    def _copied(
        self, cache: Cache, memories: bool, copied: Callable[..., State], source: jax.Array, target: jax.Array
    ) -> Cache:
        """The cache with what `copied` makes, on each device, of the states in memories, or else of those in pages."""
        kinds = self.in_memories

        def local(cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
            return jax.tree.map(lambda kind, x: copied(x, source, target) if kind == memories else x, kinds, cache)

        layout = jax.tree.map(lambda pages: jax.typeof(pages).sharding.spec, cache)
        return jax.shard_map(local, in_specs=(layout, ROWS, ROWS), out_specs=layout)(cache, source, target)

    def read_choices(self, cache: Cache, pages: jax.Array) -> jax.Array:
        """What was chosen for the tokens of pages i32[n], sharded like rows: [n, page_tokens, W]."""
        local = lambda states, pages: jnp.concatenate([state[pages] for state in states], axis=-1)  # noqa: E731
        whole = jax.P(_AXES, None, None)
        return jax.shard_map(local, in_specs=(whole, ROWS), out_specs=whole)(choices.pages_of(self.spec, cache), pages)


def _take(layers: model_params.Layers, index: int) -> model_params.Layers:
    return _layer(layers, jax.device_put(np.int32(index), jax.P()))


@jax.jit
def _layer(layers: model_params.Layers, index: jax.Array) -> model_params.Layers:
    """Layer `index` of the stack."""
    return jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False), layers)
