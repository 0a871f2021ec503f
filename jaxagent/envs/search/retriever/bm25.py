"""Embedded BM25 over passages held in memory, scored by the bm25s library. Deterministic, microseconds per query.

Passages in -> `Bm25`. Scores are precomputed per word and passage, so a query is a few sparse additions. Equal scores
are ordered by position in the corpus, so the same query always gives the same passages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import re
from collections.abc import Sequence

import numpy as np

from jaxagent.envs.search.retriever.base import Passage, Retriever
from jaxagent.hidden import hidden

# It would compute something with JAX at once, and so claim the accelerator's memory. It falls back to NumPy when
# `import jax.lax` fails, and what it would use JAX for is not used here.
with hidden("jax", "jax.lax"):
    import bm25s
logging.getLogger("bm25s").setLevel(logging.WARNING)  # on import it asks for debug output

WORD = re.compile(r"\w+")
K1, B = 0.9, 0.4  # the values of Anserini / Pyserini, on which Search-R1's BM25 server is built
CACHED_QUERIES = 65_536
INLINE_PASSAGES = 200_000  # larger corpora are searched in a thread, so that the event loop keeps turning


def words(text: str) -> list[str]:
    """Lower-cased runs of letters and digits. No stop words: their weight is small and names may contain them."""
    return WORD.findall(text.lower())


class Bm25(Retriever):
    """A search engine over a fixed list of passages; passages that share no word with the query are not returned."""

    def __init__(self, passages: Sequence[Passage]):
        self._passages = tuple(passages)
        self._word_ids: dict[str, int] = {}
        documents = [
            [self._word_ids.setdefault(word, len(self._word_ids)) for word in words(p.contents)] for p in self._passages
        ]
        self._index = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
        if self._word_ids:
            self._index.index((documents, self._word_ids), create_empty_token=False, show_progress=False)
        self.ranking = functools.lru_cache(maxsize=CACHED_QUERIES)(self._rank)

    def __len__(self) -> int:
        return len(self._passages)

    def _rank(self, query: str, topk: int) -> tuple[tuple[int, float], ...]:
        """(position in the corpus, score) of the best passages, best first; equal scores in corpus order."""
        ids = [self._word_ids[word] for word in words(query) if word in self._word_ids]
        if not ids or topk < 1:
            return ()
        scores = self._index.get_scores_from_ids(ids)
        bar = np.partition(scores, -topk)[-topk] if topk < len(scores) else 0.0
        candidates = np.flatnonzero((scores >= bar) & (scores > 0))
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:topk]
        return tuple((int(i), float(scores[i])) for i in best)

    def lookup(self, query: str, topk: int) -> list[Passage]:
        """The synchronous search: at most `topk` passages, best first."""
        return [dataclasses.replace(self._passages[i], score=score) for i, score in self.ranking(query, topk)]

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """The best passages of each query."""
        if len(self._passages) <= INLINE_PASSAGES:
            return [self.lookup(query, topk) for query in queries]
        return await asyncio.to_thread(lambda: [self.lookup(query, topk) for query in queries])
