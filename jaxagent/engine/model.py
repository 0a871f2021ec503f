"""What the engine asks of a model: a few pure functions over parameters and a paged cache it does not look into.

`engine/lm.py` implements it for transformers, `tests/engine/toy_model.py` for hand-checked tests. A model is a frozen,
hashable object that holds shapes only; parameters and cache are always arguments, so that a weight update is one.

Axis letters: N rows of a tile, P pages, Q pages per sequence, V vocabulary. The cache is pages of `page_tokens` tokens;
what a sequence's token at index p leaves lies in page table[p // page_tokens], be it a key and a value beside those of
other tokens or a state of fixed size in place of theirs. A full page never changes again, and is shared. Page 0 belongs
to nobody: rows without a sequence write there. Every function runs under `jax.set_mesh` of a mesh with the axes data,
fsdp, context and tensor; rows and pages are sharded over the first three together, and page numbers count the pages of
the row's own shard.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

from jaxagent.models.sharding import FLAT

ROWS = jax.P(FLAT)  # how rows, slots and pages are sharded

Params = Any
Cache = Any  # a pytree of arrays with a leading page axis


class Model(Protocol):
    """Pure functions of one model family."""

    @property
    def vocab_size(self) -> int:
        """V: width of the logits, padding included (padding has logit -inf)."""

    def pinned(self) -> Model:
        """The same model in exact numerics: each row rounded one way, whatever program computes it."""

    @property
    def splits_pages(self) -> bool:
        """Whether a copy of a page serves a sequence that has only the first of its tokens; else whole pages do."""

    def place(self, params: Params) -> Params:
        """Lays parameters out as `extend` and `logits` want them: jitted calls, once per weight update."""

    def init_cache(self, pages: int, page_tokens: int) -> Cache:
        """An empty cache of `pages` pages, over all shards."""

    def extend(
        self, params: Params, cache: Cache, tokens: jax.Array, positions: jax.Array, tables: jax.Array
    ) -> tuple[Any, Cache]:
        """Caches one tile of rows: tokens i32[N] at positions i32[N] of the sequences with pages tables i32[M,Q].

        N / M rows in a row belong to one sequence. All earlier tokens of a row's sequence are cached, or are rows of
        the same tile. Returns what `logits` turns into next-token logits of each row, and the cache.
        """

    def logits(self, params: Params, hidden: Any) -> jax.Array:
        """Next-token logits f32[N,V] of what `extend` returned, V whole on each device."""

    def copy_pages(self, cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
        """Copies page source[i] to page target[i], i32[n] each, sharded like rows; (0, 0) copies nothing."""
