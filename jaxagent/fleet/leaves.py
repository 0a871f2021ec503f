"""Named NumPy arrays <-> bytes. A leaf of a tree is named by its path: the keys and positions that lead to it.

bfloat16 and the small floats are ml_dtypes'. Bytes are in C order and little-endian, so a leaf keeps every bit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import ml_dtypes  # noqa: F401  gives NumPy the names bfloat16, float8_e4m3fn, ...
import numpy as np

Path = tuple[str | int, ...]  # a dict's key, a tuple's position
Leaves = Mapping[Path, np.ndarray]


def name_of(path: Path) -> str:
    """For messages: layers.wq, or layers.0.wq."""
    return ".".join(map(str, path)) or "(the tree itself)"


def check_dtype(dtype: np.dtype, path: Path) -> None:
    """Refuses what is no number. Raises TypeError with the leaf's name."""
    if dtype.hasobject or dtype.fields is not None or dtype.kind in "SUMmO" or named(dtype.name) is None:
        raise TypeError(f"{name_of(path)} has the dtype {dtype}, which is not one of numbers.")


def named(name: str) -> np.dtype | None:
    """The dtype of a name, "float32" or "bfloat16"; None: there is none."""
    try:
        return np.dtype(name)
    except TypeError:
        return None


def to_bytes(leaf: np.ndarray) -> memoryview:
    """All bytes of an array; its own memory where it lies in order."""
    foreign = leaf.dtype.byteorder == ">" or (leaf.dtype.byteorder == "=" and sys.byteorder == "big")
    ordered = np.asarray(leaf.astype(leaf.dtype.newbyteorder("<")) if foreign else leaf, order="C")
    return ordered.reshape(-1).view(np.uint8).data


def empty(dtype: str, shape: tuple[int, ...]) -> tuple[np.ndarray, memoryview]:
    """A new array, and its bytes to be filled."""
    array = np.empty(shape, np.dtype(dtype).newbyteorder("<"))
    return array, array.reshape(-1).view(np.uint8).data


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes."""
    return np.dtype(dtype).itemsize * math.prod(shape)
