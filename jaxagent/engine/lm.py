"""Transformers behind the engine: the trainer's layers, with attention over the paged cache.

`models.transformer.hidden` does all the maths over flat rows; a prefill is rows of one sequence, a decode step is one
row per sequence, and neither knows which it is.

Axis letters: N rows of a tile, P pages, Q pages per sequence, E embed, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from jaxagent.engine import cache as kv
from jaxagent.engine.model import ROWS
from jaxagent.models import logprobs, sharding, transformer
from jaxagent.models import params as model_params
from jaxagent.models.spec import ModelSpec

Cache = tuple[kv.LayerCache, ...]


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Implements `engine.model.Model` for every family that `models.transformer` runs.

    `cache_dtype` is the dtype of keys and values at rest; attention is computed in the model's compute dtype.
    """

    spec: ModelSpec
    cache_dtype: str

    @property
    def vocab_size(self) -> int:
        """V, padding included."""
        return self.spec.padded_vocab_size

    def place(self, params: model_params.Params) -> model_params.Params:
        """Weights in compute dtype, whole over fsdp, split over tensor, one tree per layer; placed ones as they are.

        Layers are taken out of their stack here, once per weight update: a program that cuts them out of the stack
        copies all of them at every dispatch, and takes twice as long to compile (measured with 30 layers). One small
        program takes any of them.
        """
        if isinstance(params.layers, tuple):
            return params
        placed = laid_out(self, params)
        layers = tuple(_take(placed.layers, jax.device_put(np.int32(i), jax.P())) for i in range(self.spec.num_layers))
        return placed.replace(layers=layers)

    def lay_out(self, params: model_params.Params) -> model_params.Params:
        """Weights in compute dtype, whole over fsdp, split over tensor, still stacked; such ones as they are."""

        def one(array: model_params.ArraySpec, weights: jax.Array) -> jax.Array:
            return jax.reshard(weights.astype(self.spec.compute_dtype), sharding.COMPUTE.partition(array.axes))

        return jax.tree.map(one, model_params.param_specs(self.spec), params)

    def init_cache(self, pages: int, page_tokens: int) -> Cache:
        """One LayerCache per layer."""
        spec = self.spec
        return kv.init(spec.num_layers, pages, spec.num_kv_heads, page_tokens, spec.head_dim, self.cache_dtype)

    def extend(
        self, params: model_params.Params, cache: Cache, tokens: jax.Array, positions: jax.Array, tables: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Caches one tile of tokens (arguments: `Model.extend`); returns their hidden states [N, E] and the cache."""

        def attend(layer: kv.LayerCache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, kv.LayerCache]:
            return kv.attend(layer, q, k, v, tables, positions)

        return transformer.hidden(params, self.spec, tokens, positions, attend, cache, unroll=True)

    def logits(self, params: model_params.Params, hidden: jax.Array) -> jax.Array:
        """Next-token logits f32[N, V] of the hidden states that `extend` returned."""
        return jax.reshard(logprobs.logits(params, self.spec, hidden), jax.P(*ROWS, None))

    def copy_pages(self, cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
        """Copies pages within the cache of every layer (arguments: `Model.copy_pages`)."""
        return kv.copy_pages(cache, source, target)


@functools.partial(jax.jit, static_argnums=0)
def laid_out(model: LanguageModel, params: model_params.Params) -> model_params.Params:
    """`model.lay_out`, as a program."""
    return model.lay_out(params)


@jax.jit
def _take(layers: model_params.Layers, index: jax.Array) -> model_params.Layers:
    """Layer `index` of the stack."""
    return jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False), layers)
