"""Token ids of a long document -> chunks: from the front, and from both ends where there are too many."""

from __future__ import annotations

import numpy as np


def centre_truncated(ids: np.ndarray, limit: int) -> np.ndarray:
    """The first and the last limit // 2 ids of more than `limit`, as published; an odd limit keeps one id less."""
    half = limit // 2
    return ids if len(ids) <= limit else np.concatenate((ids[:half], ids[len(ids) - half :]))


def split(ids: np.ndarray, size: int) -> list[np.ndarray]:
    """Pieces of `size` ids, in order; the last may be shorter, and none is empty."""
    return [ids[at : at + size] for at in range(0, len(ids), size)]
