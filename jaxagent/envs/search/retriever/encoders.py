"""Text encoders for dense retrieval: texts in -> unit vectors f32[n, E] out.

`open_encoder(name)` knows two kinds: "hashing:E", deterministic and without any model (tests, small demos), and the
folder of a Hugging Face encoder such as e5-base-v2, run by transformers and torch, which are extras.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.envs.search.retriever.bm25 import words

Kind = Literal["query", "passage"]
MAX_TOKENS = 256  # per text, as in Search-R1's server
BATCH = 64


class Encoder(Protocol):
    """Maps texts to vectors whose inner product is their similarity. Called from one thread at a time."""

    def __call__(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        """f32[n, E], each row of length 1 (or 0 for a text without content)."""


def open_encoder(name: str) -> Encoder:
    """The encoder an index names.

    Raises:
      ConfigError: no such folder, or transformers and torch are not installed.
    """
    kind, _, size = name.partition(":")
    if kind == "hashing" and size.isdigit() and int(size) > 0:
        return HashingEncoder(int(size))
    if not Path(name).is_dir():
        raise ConfigError(f"Encoder '{name}' is neither 'hashing:SIZE' nor a folder with a Hugging Face model.")
    return TransformersEncoder(name)


class HashingEncoder:
    """Counts of words, hashed to `size` signed buckets (Weinberger et al., https://arxiv.org/abs/0902.2206)."""

    def __init__(self, size: int):
        self._size = size

    def __call__(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        """See `Encoder`. Queries and passages are treated alike."""
        out = np.zeros((len(texts), self._size), np.float32)
        for row, text in zip(out, texts, strict=True):
            for word in words(text):
                value = zlib.crc32(word.encode())
                row[(value >> 1) % self._size] += 1.0 if value & 1 else -1.0
        return unit(out)


class TransformersEncoder:
    """e5 as published: "query: " / "passage: " prefixes, mean over tokens, unit length."""

    def __init__(self, folder: str):
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ConfigError(f"Encoder '{folder}' needs transformers and torch ({error}).") from error
        self._torch = torch
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = transformers.AutoModel.from_pretrained(folder).eval()

    def __call__(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        """See `Encoder`."""
        parts = [self._encode([f"{kind}: {t}" for t in texts[i : i + BATCH]]) for i in range(0, len(texts), BATCH)]
        return unit(np.concatenate(parts)) if parts else np.zeros((0, self._model.config.hidden_size), np.float32)

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        inputs = self._tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with self._torch.inference_mode():
            states = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
        return ((states * mask).sum(1) / mask.sum(1)).float().numpy()


def unit(vectors: np.ndarray) -> np.ndarray:
    """f32[n, E] rows scaled to length 1; rows of zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)
