"""Trees of NumPy arrays <-> named leaves <-> bytes. A tree is nested dicts and tuples; a leaf's path is its keys.

bfloat16 and the small floats are ml_dtypes'. Bytes are in C order and little-endian, so a leaf keeps every bit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  gives NumPy the names bfloat16, float8_e4m3fn, ...
import numpy as np

Path = tuple[str | int, ...]  # a dict's key, a tuple's position
Leaves = Mapping[Path, np.ndarray]


def name_of(path: Path) -> str:
    """For messages: layers.wq, or layers.0.wq."""
    return ".".join(map(str, path)) or "(the tree itself)"


def flatten(tree: Any) -> dict[Path, np.ndarray]:
    """The leaves of a tree, in its order.

    Raises:
      TypeError: it holds what is neither a dict with text keys, a tuple, nor an array of numbers; names the place.
    """
    return dict(_flat(tree, ()))


def _flat(tree: Any, path: Path) -> Iterator[tuple[Path, np.ndarray]]:
    if isinstance(tree, np.ndarray):
        check_dtype(tree.dtype, path)
        yield path, tree
        return
    if isinstance(tree, Mapping) and all(isinstance(key, str) for key in tree):
        items = list(tree.items())
    elif isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        items = list(enumerate(tree))
    else:
        raise TypeError(f"{name_of(path)} is a {type(tree).__name__}, which no leaf, dict by text, or tuple is.")
    if not items:
        raise TypeError(f"{name_of(path)} is empty, and would not come back: leave it out.")
    for key, value in items:
        yield from _flat(value, (*path, key))


def unflatten(leaves: Leaves) -> Any:
    """The tree of leaves.

    Raises:
      ValueError: the paths are those of no tree; names one.
    """
    if () in leaves:
        return leaves[()]
    below: dict[str | int, dict[Path, np.ndarray]] = {}
    for path, leaf in leaves.items():
        below.setdefault(path[0], {})[path[1:]] = leaf
    for key, inner in below.items():
        if () in inner and len(inner) > 1:
            raise ValueError(f"{key} is a leaf, and others lie below it.")
    trees = {key: unflatten(inner) for key, inner in below.items()}
    if all(isinstance(key, str) for key in trees):
        return trees
    if set(trees) != set(range(len(trees))):
        raise ValueError(f"{sorted(map(str, trees))} are no positions of a tuple.")
    return tuple(trees[position] for position in range(len(trees)))


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
