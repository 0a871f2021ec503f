"""A model one can compute by hand, behind the same engine and driver as a transformer.

The logit of token v after a sequence is `params[last, v] + 0.01 * ((checksum + v) mod 7)`, where the checksum is the
sum over the sequence of (index + 1) * token. The cache is the tokens themselves, so a wrong page, a stale one or a
lost observation changes the logits: threading and bookkeeping are tested without a transformer's rounding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.engine.model import ROWS

_MATRIX = jax.P(*ROWS, None)


@dataclasses.dataclass(frozen=True)
class Toy:
    """Implements `engine.model.Model`. Parameters: f32[V,V], row = last token."""

    vocab_size: int
    keeps_memories, choices = False, 0

    def pinned(self):
        return self

    def place(self, params: jax.Array) -> jax.Array:
        """Replicated."""
        return jax.device_put(params, jax.P(None, None))

    def init_cache(self, pages: int, page_tokens: int, memories: int = 0) -> jax.Array:
        """The tokens themselves: i32[P, page_tokens]."""
        return jnp.zeros((pages, page_tokens), jnp.int32, out_sharding=_MATRIX)

    def extend(
        self, params: jax.Array, cache: jax.Array, tokens: jax.Array, positions: jax.Array, tables: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Caches one tile of tokens (arguments: `Model.extend`); returns their logits already, and the cache."""

        def local(params: jax.Array, cache: jax.Array, tokens: jax.Array, positions: jax.Array, tables: jax.Array):
            page_tokens = cache.shape[1]
            tables = jnp.repeat(tables, len(tokens) // len(tables), axis=0)
            page = jnp.take_along_axis(tables, (positions // page_tokens)[:, None], axis=1)[:, 0]
            cache = cache.at[page, positions % page_tokens].set(tokens)
            history = cache[tables].reshape(len(tokens), -1)
            index = jnp.arange(history.shape[1])
            checksum = jnp.where(index <= positions[:, None], history * (index + 1), 0).sum(axis=1)
            return params[tokens] + toy_bonus(checksum[:, None], jnp.arange(self.vocab_size)), cache

        specs = (jax.P(None, None), _MATRIX, ROWS, ROWS, _MATRIX)
        return jax.shard_map(local, in_specs=specs, out_specs=(_MATRIX, _MATRIX))(
            params, cache, tokens, positions, tables
        )

    def logits(self, params: jax.Array, hidden: jax.Array) -> jax.Array:
        """What `extend` returned: those are logits already."""
        del params
        return hidden

    def copy_pages(self, cache: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        """Copies pages of tokens within the cache (arguments: `Model.copy_pages`)."""

        def local(cache: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
            return cache.at[target].set(cache[source])

        return jax.shard_map(local, in_specs=(_MATRIX, ROWS, ROWS), out_specs=_MATRIX)(cache, source, target)


def toy_bonus(checksum: jax.Array | np.ndarray, token: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """The part of a toy logit that depends on the whole sequence."""
    return 0.01 * ((checksum + token) % 7)


class RecurrentToy(Toy):
    """The same logits from a state of fixed size, as a recurrent layer has one: a memory holds the checksum so far."""

    keeps_memories = True

    def init_cache(self, pages: int, page_tokens: int, memories: int = 0) -> jax.Array:
        """i32[memories]; pages hold nothing."""
        return jnp.full((memories,), 12345, jnp.int32, out_sharding=ROWS)  # nobody clears a memory

    def extend(
        self, params: jax.Array, cache: jax.Array, tokens: jax.Array, positions: jax.Array, tables: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """As `Toy.extend`, row after row."""

        def local(params: jax.Array, cache: jax.Array, tokens: jax.Array, positions: jax.Array, tables: jax.Array):
            cache, checksums = _recurrent(cache, tokens, positions, tables[:, -1])
            return params[tokens] + toy_bonus(checksums[:, None], jnp.arange(self.vocab_size)), cache

        specs = (jax.P(None, None), ROWS, ROWS, ROWS, _MATRIX)
        return jax.shard_map(local, in_specs=specs, out_specs=(_MATRIX, ROWS))(params, cache, tokens, positions, tables)

    def copy_pages(self, cache: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        """Nothing."""
        return cache

    def copy_memories(self, cache: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        """Copies memories, one after the other."""

        def local(cache: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, len(source), lambda i, c: c.at[target[i]].set(c[source[i]]), cache)

        return jax.shard_map(local, in_specs=(ROWS, ROWS, ROWS), out_specs=ROWS)(cache, source, target)


class MixedToy(RecurrentToy):
    """Pages and memories, and the same logits only if both are right."""

    def init_cache(self, pages: int, page_tokens: int, memories: int = 0) -> tuple[jax.Array, jax.Array]:
        """Both toys' caches."""
        return Toy.init_cache(self, pages, page_tokens), super().init_cache(pages, page_tokens, memories)

    def extend(
        self, params: jax.Array, cache: tuple, tokens: jax.Array, positions: jax.Array, tables: jax.Array
    ) -> tuple[jax.Array, tuple]:
        """The logits, or others where the two caches disagree."""
        by_pages, pages = Toy.extend(self, params, cache[0], tokens, positions, tables[:, :-1])
        by_memory, memories = super().extend(params, cache[1], tokens, positions, tables)
        return jnp.where(by_pages == by_memory, by_pages, -by_pages), (pages, memories)

    def copy_pages(self, cache: tuple, source: jax.Array, target: jax.Array) -> tuple:
        """Of the first."""
        return Toy.copy_pages(self, cache[0], source, target), cache[1]

    def copy_memories(self, cache: tuple, source: jax.Array, target: jax.Array) -> tuple:
        """Of the second."""
        return cache[0], super().copy_memories(cache[1], source, target)


def _recurrent(
    cache: jax.Array, tokens: jax.Array, positions: jax.Array, memories: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The memories after the rows, and the checksum after each row."""
    memories = jnp.repeat(memories, len(tokens) // len(memories), axis=0)
    again = (positions == jnp.roll(positions, 1)) & (memories == jnp.roll(memories, 1))
    again = again.at[0].set(False)  # of a row that fills up

    def row(cache: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        token, position, memory, again = row
        before = jnp.where((position > 0) | again, cache[memory], 0)
        checksum = before + jnp.where(again, 0, (position + 1) * token)
        return cache.at[memory].set(checksum), checksum

    return jax.lax.scan(row, cache, (tokens, positions, memories, again))
