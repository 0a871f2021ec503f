"""A model one can compute by hand, behind the same engine and driver as a transformer.

The logit of token v after a sequence is `params[last, v] + 0.01 * ((checksum + v) mod 7)`, where the checksum is the
sum over the sequence of (index + 1) * token. The cache is the tokens themselves, so a wrong position, a stale slot or a
lost observation changes the logits: threading and bookkeeping are tested without a transformer's rounding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.engine.model import SLOTS

_ROWS = jax.P(*SLOTS, None)


@dataclasses.dataclass(frozen=True)
class Toy:
    """Implements `engine.model.Model`. Parameters: f32[V,V], row = last token."""

    vocab_size: int

    def place(self, params: jax.Array) -> jax.Array:
        """Replicated."""
        return jax.reshard(params, jax.P(None, None))

    def prepare(self, params: jax.Array) -> jax.Array:
        """Nothing to do."""
        return params

    def init_cache(self, slots: int, context: int) -> jax.Array:
        """The tokens of each slot: i32[S,M]."""
        return jnp.zeros((slots, context), jnp.int32, out_sharding=_ROWS)

    def prefill(
        self, params: jax.Array, cache: jax.Array, tokens: jax.Array, start: jax.Array, slot: jax.Array, fresh: bool
    ) -> jax.Array:
        """The tokens themselves."""
        del params, cache, start, slot, fresh
        return tokens

    def insert(
        self, cache: jax.Array, prefix: jax.Array, row: jax.Array, slot: jax.Array, start: jax.Array
    ) -> jax.Array:
        """See `Model.insert`."""

        def put(cache: jax.Array, prefix: jax.Array, row: jax.Array, slot: jax.Array, start: jax.Array) -> jax.Array:
            position = start[:, None] + jnp.arange(prefix.shape[1])
            local = slot - jax.lax.axis_index(SLOTS[0]) * cache.shape[0]
            local = jnp.where(local < 0, cache.shape[0], local)
            return cache.at[local[:, None], position].set(prefix[row], mode="drop")

        replicated = jax.P()
        return jax.shard_map(put, in_specs=(_ROWS, *(replicated,) * 4), out_specs=_ROWS)(
            cache, jax.reshard(prefix, jax.P(None, None)), row, slot, start
        )

    def decode(
        self, params: jax.Array, cache: jax.Array, tokens: jax.Array, positions: jax.Array, window: int
    ) -> tuple[jax.Array, jax.Array]:
        """See `Model.decode`."""

        def step(params: jax.Array, cache: jax.Array, tokens: jax.Array, positions: jax.Array):
            cache = cache.at[jnp.arange(len(tokens)), positions].set(tokens, mode="drop")
            index = jnp.arange(window)
            seen = jnp.where(index <= positions[:, None], cache[:, :window] * (index + 1), 0)
            return params[tokens] + toy_bonus(seen.sum(axis=1)[:, None], jnp.arange(self.vocab_size)), cache

        specs = (jax.P(None, None), _ROWS, SLOTS, SLOTS)
        return jax.shard_map(step, in_specs=specs, out_specs=(_ROWS, _ROWS))(params, cache, tokens, positions)


def toy_bonus(checksum: jax.Array | np.ndarray, token: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """The part of a toy logit that depends on the whole sequence."""
    return 0.01 * ((checksum + token) % 7)
