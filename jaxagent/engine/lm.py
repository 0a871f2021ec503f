"""Transformers behind the engine: the trainer's forward pass with attention over the slot cache.

`models.transformer.hidden` does all the maths over flat rows; here are the two `attend` callbacks, one for a prefill
(rows of C new tokens, after what their slot already holds) and one for a decode step (one token per slot).

Axis letters: S slots, N flat rows, b prefill rows, C tokens per row, H heads, K kv heads, M cached positions,
D head dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxagent.engine import cache as kv
from jaxagent.engine.model import SLOTS
from jaxagent.models import attention, logprobs, sharding, transformer
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
        """Compute dtype, whole over fsdp, split over tensor; the same arrays where they already are so."""

        def one(array: model_params.ArraySpec, weights: jax.Array) -> jax.Array:
            return jax.reshard(weights.astype(self.spec.compute_dtype), sharding.COMPUTE.partition(array.axes))

        return jax.tree.map(one, model_params.param_specs(self.spec), params)

    def prepare(self, params: model_params.Params) -> model_params.Params:
        """One tree per layer: sliced once per dispatch, not once per token."""
        return params.replace(layers=transformer.unstack(params.layers))

    def init_cache(self, slots: int, context: int) -> Cache:
        """One LayerCache per layer."""
        spec = self.spec
        return kv.init(spec.num_layers, slots, spec.num_kv_heads, context, spec.head_dim, self.cache_dtype)

    def prefill(
        self,
        params: model_params.Params,
        cache: Cache,
        tokens: jax.Array,
        start: jax.Array,
        slot: jax.Array,
        fresh: bool,
    ) -> Cache:
        """See `Model.prefill`; rows of the prefix are [b,K,C,D] per layer."""
        rows, length = tokens.shape
        positions = start[:, None] + jnp.arange(length)
        # Query c sees what was cached before its row's start, and the row's own tokens up to itself: by position.
        seen = jnp.arange(length if fresh else cache[0].keys.shape[2])
        mask = seen <= positions[:, :, None]

        def attend(
            layer: kv.LayerCache | None, q: jax.Array, k: jax.Array, v: jax.Array
        ) -> tuple[jax.Array, kv.LayerCache]:
            q, k, v = (_split_rows(x, rows) for x in (q, k, v))
            # Through the cache's dtype, so that a token is seen as it will be seen later.
            k, v = (x.swapaxes(1, 2).astype(self.cache_dtype) for x in (k, v))
            seen = kv.LayerCache(k, v) if fresh else kv.write_span(layer, k, v, start)
            out = _attend(q, seen, mask)
            return out.reshape(rows * length, *out.shape[2:]), kv.LayerCache(k, v)

        layers: Any = (None,) * len(cache) if fresh else tuple(kv.read_rows(layer, slot) for layer in cache)
        unroll = (
            self.spec.remat == "none"
        )  # as in training: a small model; else a small program, since each is per shape
        if not unroll:
            layers = None if fresh else jax.tree.map(lambda *x: jnp.stack(x), *layers)
        _, prefix = transformer.hidden(
            params, self.spec, tokens.reshape(-1), positions.reshape(-1), attend, layers, unroll
        )
        return prefix if unroll else tuple(kv.layer(prefix, i) for i in range(len(cache)))

    def insert(self, cache: Cache, prefix: Cache, row: jax.Array, slot: jax.Array, start: jax.Array) -> Cache:
        """See `Model.insert`."""
        return kv.insert(cache, prefix, row, slot, start)

    def decode(
        self, params: model_params.Params, cache: Cache, tokens: jax.Array, positions: jax.Array, window: int
    ) -> tuple[jax.Array, Cache]:
        """See `Model.decode`."""
        mask = (jnp.arange(window) <= positions[:, None])[:, None]

        def attend(layer: kv.LayerCache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, kv.LayerCache]:
            layer = kv.write_token(layer, k, v, positions)
            seen = kv.LayerCache(layer.keys[:, :, :window], layer.values[:, :, :window])
            return _attend(q[:, None], seen, mask)[:, 0], layer

        x, cache = transformer.hidden(params, self.spec, tokens, positions, attend, cache, unroll=True)
        return logprobs.logits(params, self.spec, x), cache


def _attend(q: jax.Array, seen: kv.LayerCache, mask: jax.Array) -> jax.Array:
    """q [b,C,H,D] over cached rows [b,K,M,D] -> [b,C,H,D]."""
    keys, values = (x.astype(q.dtype).swapaxes(1, 2) for x in (seen.keys, seen.values))
    return attention.attend_dense(q, keys, values, mask)


def _split_rows(x: jax.Array, rows: int) -> jax.Array:
    """Flat [N,H,D] -> [b,C,H,D], all of the row sharding on b: jax would split it over b and C where it can."""
    return x.reshape(rows, -1, *x.shape[1:], out_sharding=jax.P(*SLOTS, None, "tensor", None))
