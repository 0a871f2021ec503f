"""Dense retrieval: the inner product of a query's vector with every passage's, exactly (no approximate index).

An index folder holds `vectors.npy` (f32[N, E], row i belongs to passage i of the corpus) and `index.json` (the name of
the encoder for queries, N, and a fingerprint of the corpus). `data_pipelines.corpus` makes one, `Dense.load` opens it.
Scores come from FAISS where it is installed, else from NumPy: the same numbers, slower on millions of passages.

An encoder maps texts to unit vectors. `open_encoder(name)` knows two kinds: "hashing:E", deterministic and without any
model (tests, small demos), and the folder of a Hugging Face encoder such as e5-base-v2, run by transformers and torch,
which are extras.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.envs.search.retriever.base import Passage, Retriever
from jaxagent.envs.search.retriever.bm25 import words

Kind = Literal["query", "passage"]
# Texts -> f32[n, E], each row of length 1 (or 0 for a text without content). Called from one thread at a time.
Encoder = Callable[[Sequence[str], Kind], np.ndarray]
MAX_TOKENS = 256  # per text, as in Search-R1's server
BATCH = 64
TopK = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]  # f32[Q, E], k -> scores f32[Q, k], rows i64[Q, k]


class Dense(Retriever):
    """A search engine over passages with precomputed vectors.

    Args:
      passages: the corpus.
      vectors: f32[N, E], row i for passage i; unit length where similarity shall be the cosine.
      encoder: maps queries to f32[Q, E].
    """

    def __init__(self, passages: Sequence[Passage], vectors: np.ndarray, encoder: Encoder):
        if len(passages) != len(vectors):
            raise ConfigError(f"A dense index of {len(vectors)} vectors does not fit {len(passages)} passages.")
        self._passages = passages
        self._encoder = encoder
        self._topk = _faiss_topk(vectors) or _numpy_topk(vectors)
        self._one_at_a_time = asyncio.Lock()  # the encoder uses all cores by itself

    @classmethod
    def load(cls, folder: str | Path, passages: Sequence[Passage]) -> Dense:
        """Opens an index folder over the corpus that it was made from. Raises ConfigError: missing or malformed files,
        another corpus, or an encoder that cannot be opened."""
        folder = Path(folder)
        try:
            facts = json.loads((folder / "index.json").read_text(encoding="utf-8"))
            vectors = np.load(folder / "vectors.npy", mmap_mode="r")
            encoder, corpus_fingerprint = facts["encoder"], facts["corpus"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"'{folder}' is not a dense index ({type(error).__name__}: {error}).") from error
        if corpus_fingerprint != fingerprint(passages):
            raise ConfigError(f"The dense index '{folder}' was made from another corpus than the one configured.")
        return cls(passages, vectors, open_encoder(encoder))

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """The best passages of each query. Runs in a thread, so that the event loop keeps turning."""
        if not queries or not self._passages:
            return [[] for _ in queries]
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._search, list(queries), min(topk, len(self._passages)))

    def _search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        scores, rows = self._topk(self._encoder(queries, "query"), topk)
        order = np.lexsort((rows, -scores), axis=1)  # equal scores in corpus order
        return [
            [dataclasses.replace(self._passages[int(rows[q, i])], score=float(scores[q, i])) for i in order[q]]
            for q in range(len(queries))
        ]


def fingerprint(passages: Sequence[Passage]) -> str:
    """A checksum of the corpus's ids and contents in order."""
    value = 0
    for passage in passages:
        value = zlib.crc32(f"{passage.id}\0{passage.contents}\0".encode(), value)
    return f"{len(passages)}:{value:08x}"


def _faiss_topk(vectors: np.ndarray) -> TopK | None:
    try:
        import faiss
    except ImportError:
        return None
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(np.ascontiguousarray(vectors, np.float32))
    return lambda queries, k: index.search(np.ascontiguousarray(queries, np.float32), k)


def _numpy_topk(vectors: np.ndarray) -> TopK:
    def topk(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores = queries @ vectors.T
        rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, rows, axis=1), rows

    return topk


def open_encoder(name: str) -> Encoder:
    """The encoder an index names. Raises ConfigError: no such folder, or transformers and torch are not installed."""
    kind, _, size = name.partition(":")
    if kind == "hashing" and size.isdigit() and int(size) > 0:
        return hashing_encoder(int(size))
    if not Path(name).is_dir():
        raise ConfigError(f"Encoder '{name}' is neither 'hashing:SIZE' nor a folder with a Hugging Face model.")
    return transformers_encoder(name)


def hashing_encoder(size: int) -> Encoder:
    """Counts of words, hashed to `size` signed buckets (Weinberger et al., https://arxiv.org/abs/0902.2206).

    Queries and passages are treated alike.
    """

    def encode(texts: Sequence[str], kind: Kind) -> np.ndarray:
        out = np.zeros((len(texts), size), np.float32)
        for row, text in zip(out, texts, strict=True):
            for word in words(text):
                value = zlib.crc32(word.encode())
                row[(value >> 1) % size] += 1.0 if value & 1 else -1.0
        return unit(out)

    return encode


def transformers_encoder(folder: str) -> Encoder:
    """e5 as published: "query: " / "passage: " prefixes, mean over tokens, unit length. Raises ConfigError."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(f"Encoder '{folder}' needs transformers and torch ({error}).") from error
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()

    def batch(texts: Sequence[str]) -> np.ndarray:
        inputs = tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            states = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
        return ((states * mask).sum(1) / mask.sum(1)).float().numpy()

    def encode(texts: Sequence[str], kind: Kind) -> np.ndarray:
        parts = [batch([f"{kind}: {text}" for text in texts[i : i + BATCH]]) for i in range(0, len(texts), BATCH)]
        return unit(np.concatenate(parts)) if parts else np.zeros((0, model.config.hidden_size), np.float32)

    return encode


def unit(vectors: np.ndarray) -> np.ndarray:
    """f32[n, E] rows scaled to length 1; rows of zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)
