"""What the engine asks of a model: a few pure functions over parameters and a paged cache it does not look into.

`engine/lm.py` implements it for transformers, `tests/engine/toy_model.py` for hand-checked tests. A model is a frozen,
hashable object that holds shapes only; parameters and cache are always arguments, so that a weight update is one.

Axis letters: N rows of a tile, P pages, Q pages per sequence, V vocabulary. The cache is pages of `page_tokens` tokens,
where what a sequence's token at index p leaves lies in page table[p // page_tokens]; and, of a model that
`keeps_memories`, memories: states of fixed size, one for each sequence in progress, which its tokens read and write in
place. A full page never changes again, and is shared; a memory is copied. The last column of such a model's tables is
the memory's number. Page 0 and memory 0 belong to nobody: rows without a sequence write there. Every function runs
under `jax.set_mesh` of a mesh (`models/sharding.py`); rows, pages and memories are sharded over all its axes but tensor
together, and their numbers count those of the row's own shard.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

from jaxagent.models.sharding import FLAT

ROWS = jax.P(FLAT)  # how rows, slots and pages are sharded

Params = Any
Cache = Any  # a pytree of arrays with a leading axis of pages or of memories


class Model(Protocol):
    """Pure functions of one model family."""

    @property
    def vocab_size(self) -> int:
        """V: width of the logits, padding included (padding has logit -inf)."""

    def pinned(self) -> Model:
        """The same model in exact numerics: each row rounded one way, whatever program computes it."""

    def place(self, params: Params) -> Params:
        """Lays parameters out as `extend` and `logits` want them: jitted calls, once per weight update."""

    @property
    def keeps_memories(self) -> bool:
        """Whether sequences have states of fixed size."""

    def init_cache(self, pages: int, page_tokens: int, memories: int = 0) -> Cache:
        """An empty cache of `pages` pages, and of `memories` memories if it keeps any, over all shards."""

    def extend(
        self, params: Params, cache: Cache, tokens: jax.Array, positions: jax.Array, tables: jax.Array
    ) -> tuple[Any, Cache]:
        """Caches one tile of rows: tokens i32[N] at positions i32[N] of the sequences with pages tables i32[M,Q].

        N / M rows in a row belong to one sequence. All earlier tokens of a row's sequence are cached, or are rows of
        the same tile, one after another in their order. With memories, tables are i32[M,Q+1]: a row goes on from its
        sequence's memory as the row before left it, from zeros at position 0. Where a row repeats the one before it,
        with the same token, position and sequence, it only fills up, and a memory must not change by it. What rows of
        memory 0 get is never read. Returns what `logits` turns into next-token logits of each row, and the cache.
        """

    def logits(self, params: Params, hidden: Any) -> jax.Array:
        """Next-token logits f32[N,V] of what `extend` returned, V whole on each device."""

    def copy_pages(self, cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
        """Copies page source[i] to page target[i], i32[n] each, sharded like rows; (0, 0) copies nothing."""

    @property
    def choices(self) -> int:
        """W: numbers that the cache keeps of what was chosen for a token, see `models/choices.py`; 0: nothing."""

    def read_choices(self, cache: Cache, pages: jax.Array) -> jax.Array:
        """Those of the tokens of pages i32[n], sharded like rows: u8|u16[n, page_tokens, W]."""

    def copy_memories(self, cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
        """Copies memories likewise, but one after the other; in each shard, pairs (0, 0) come last."""
