"""What the engine asks of a model: four pure functions over parameters and a cache it does not look into.

`engine/lm.py` implements it for transformers, `engine/toy.py` for hand-checked tests. A model is a frozen, hashable
object that holds shapes only; parameters and cache are always arguments, so that a weight update is an argument.

Axis letters: S slots, b prefill rows, C tokens of a prefill row, V vocabulary. A sequence's token at index p is
"cached" once the cache can be attended at p. Every function runs under `jax.set_mesh` of a mesh with the axes
data, fsdp and tensor; arrays over slots or rows are sharded over (data, fsdp).
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

SLOTS = jax.P(("data", "fsdp"))  # how the slot axis, and the rows of a prefill, are sharded

Params = Any
Cache = Any  # a pytree with a slot axis
Prefix = Any  # a pytree with a row axis: what `insert` puts into the cache


class Model(Protocol):
    """Pure functions of one model family."""

    @property
    def vocab_size(self) -> int:
        """V: width of the logits, padding included (padding has logit -inf)."""

    def place(self, params: Params) -> Params:
        """Reshards parameters, under jit, to how generation wants them."""

    def prepare(self, params: Params) -> Params:
        """What `decode` wants of placed parameters, done once per dispatch, before the loop over tokens."""

    def init_cache(self, slots: int, context: int) -> Cache:
        """An empty cache for `slots` sequences of at most `context` tokens."""

    def prefill(
        self,
        params: Params,
        cache: Cache,
        tokens: jax.Array,
        start: jax.Array,
        slot: jax.Array,
        fresh: bool,
    ) -> Prefix:
        """Computes what the cache will hold for `tokens` i32[b,C], which stand at `start` i32[b] of their sequences.

        Row r continues the sequence cached in slot[r]. `fresh` (static) promises that every start is 0, so that the
        cache need not be read. Tokens of padding give a prefix that is never attended.
        """

    def insert(self, cache: Cache, prefix: Prefix, row: jax.Array, slot: jax.Array, start: jax.Array) -> Cache:
        """Writes row[i] of the prefix into slot[i] from position start[i] on; slot[i] = S writes nothing."""

    def decode(
        self, params: Params, cache: Cache, tokens: jax.Array, positions: jax.Array, window: int
    ) -> tuple[jax.Array, Cache]:
        """Logits f32[S,V] after tokens i32[S] at positions i32[S], which are cached on the way.

        Every position is below the static `window`, the number of cached tokens that need be looked at. Slots that
        are not generating pass the token they will continue from, so that what is written is right for them too.
        """
