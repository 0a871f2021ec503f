"""What a version of the weights is: its lineage and number, and every leaf with the digests of its bytes, in chunks.

The digest of full weights covers paths, dtypes, shapes and all bits of the tree, and nothing else: two runs that
publish equal weights publish equal digests, under any lineage and number. It is computed from the chunks' digests, and
all chunks but a leaf's last have CHUNK_BYTES, so it is a function of the tree. That of adapters covers, besides, what
they change and what they make of it: equal adapters to other weights are another version.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from jaxagent.fleet import leaves
from jaxagent.fleet.leaves import Leaves, Path

Kind = Literal["full", "adapter"]
CHUNK_BYTES = 8 << 20
FORMAT = 1


class WeightsError(RuntimeError):
    """A version cannot be had as it was asked for. What is used so far stays in use."""


class MissingError(WeightsError):
    """The version is not there: not yet, or not any more."""


class MismatchError(WeightsError):
    """It is there, and is not what was asked for: of another lineage, kind, base, or model."""


class DamagedError(WeightsError):
    """Its bytes are not those that were published."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a leaf's bytes. Equal pieces are one file."""

    digest: str  # SHA-256
    size: int  # bytes


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]  # in order


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One version."""

    lineage: str  # of all versions that one trainer's history made; a history that repeats itself keeps it
    version: int
    kind: Kind
    base: str  # of an adapter: the digest of the tree that it changes; "" of full weights
    digest: str  # of the tree; of an adapter also of `base` and `merged`
    leaves: tuple[Leaf, ...]  # sorted by path
    merged: str = ""  # of an adapter: what its publisher says of the weights that it makes of its base

    @property
    def chunks(self) -> dict[str, Chunk]:
        """Every chunk once, by digest."""
        return {chunk.digest: chunk for leaf in self.leaves for chunk in leaf.chunks}

    @property
    def size(self) -> int:
        """Bytes of all leaves."""
        return sum(chunk.size for leaf in self.leaves for chunk in leaf.chunks)


@dataclasses.dataclass(frozen=True)
class Share:
    """The chunks of an array that one process holds: all of them, some, or none."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    pieces: Mapping[int, memoryview]  # by the chunk's number within the array


def cut(data: memoryview) -> list[memoryview]:
    """A leaf's bytes in chunks."""
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


def chunk_of(data: memoryview | bytes) -> Chunk:
    """What a manifest says of a piece of bytes."""
    return Chunk(hashlib.sha256(data).hexdigest(), len(data))


def describe(path: Path, leaf: Any) -> Leaf:
    """What a manifest says of an array."""
    share = full_share(path, leaf)
    return Leaf(path, share.dtype, share.shape, tuple(map(chunk_of, share.pieces.values())))


def full_share(path: Path, leaf: Any) -> Share:
    """All chunks of an array. Raises TypeError: it is none of numbers."""
    leaves.check_dtype(leaf.dtype, path)
    return Share(path, leaf.dtype.name, leaf.shape, dict(enumerate(cut(leaves.to_bytes(leaf)))))


def shares(tree: Leaves) -> list[Share]:
    """Those of one process that has all leaves."""
    return [full_share(path, leaf) for path, leaf in tree.items()]


def joined(rows: Iterable[Iterable[Any]]) -> list[Leaf]:
    """The leaves of a tree whose chunks several processes have written.

    Args:
      rows: of each process and leaf: [path, dtype, shape, {number of a chunk: [digest, size]}].

    Raises:
      ValueError: a chunk is missing, or two processes have written it; names the leaf.
    """
    chunks_by_leaf: dict[tuple[Path, str, tuple[int, ...]], dict[int, Chunk]] = {}
    for path, dtype, shape, chunks in rows:
        there = chunks_by_leaf.setdefault((tuple(path), dtype, tuple(shape)), {})
        if not there.keys().isdisjoint(own := {int(number): Chunk(*chunk) for number, chunk in chunks.items()}):
            raise ValueError(f"{leaves.name_of(tuple(path))} has a chunk that two processes have written.")
        there |= own
    for (path, dtype, shape), chunks in chunks_by_leaf.items():
        full, rest = divmod(leaves.size_of(dtype, shape), CHUNK_BYTES)
        sizes = [CHUNK_BYTES] * full + [rest] * (rest > 0)
        if [chunk.size for _, chunk in sorted(chunks.items())] != sizes or chunks.keys() != set(range(len(sizes))):
            raise ValueError(f"{leaves.name_of(path)} lacks a chunk that no process has written.")
    return [Leaf(*leaf, tuple(chunk for _, chunk in sorted(chunks.items()))) for leaf, chunks in chunks_by_leaf.items()]


def manifest(lineage: str, version: int, tree_leaves: Iterable[Leaf], base: str = "", merged: str = "") -> Manifest:
    """The manifest of leaves.

    Args:
      base: of an adapter: the digest of what it changes.
      merged: of an adapter: a digest of what it makes of that.

    Raises:
      ValueError: a leaf is there twice.
    """
    ordered = sorted(tree_leaves, key=_order)
    for leaf, next_leaf in itertools.pairwise(ordered):
        if leaf.path == next_leaf.path:
            raise ValueError(f"{leaves.name_of(leaf.path)} is there twice.")
    tree_digest = digest_of(ordered, base, merged)
    return Manifest(lineage, version, "adapter" if base else "full", base, tree_digest, tuple(ordered), merged)


def digest_of(tree_leaves: Iterable[Leaf], base: str = "", merged: str = "") -> str:
    """The digest of a tree; of adapters with what they change and make."""
    rows: list[Any] = [
        [leaf.path, leaf.dtype, leaf.shape, [chunk.digest for chunk in leaf.chunks]] for leaf in tree_leaves
    ]
    if base:
        rows = [base, merged, rows]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def digest(tree: Leaves, base: str = "", merged: str = "") -> str:
    """The digest that weights have when they are published; nothing is written."""
    return digest_of(sorted((describe(path, leaf) for path, leaf in tree.items()), key=_order), base, merged)


def encode(value: Manifest) -> bytes:
    """A manifest's file."""
    row = {"weights": FORMAT, **dataclasses.asdict(value)}
    text = json.dumps(row, separators=(",", ":"))
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}).encode()


def decode(content: bytes, where: str) -> Manifest:
    """Reads a manifest from its file's bytes.

    Raises:
      DamagedError: it is not as it was written, or does not fit itself; names `where`.
    """
    try:
        outer = json.loads(content)
        text = outer["manifest"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
            raise ValueError("its checksum is another")
        return _manifest_of(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{where} is damaged: {error or type(error).__name__}.") from None


def _manifest_of(row: Mapping[str, Any]) -> Manifest:
    if row["weights"] != FORMAT:
        raise ValueError(f"it has format {row['weights']}, and {FORMAT} is read")
    read_leaves = tuple(
        Leaf(
            path=tuple(leaf["path"]),
            dtype=leaf["dtype"],
            shape=tuple(leaf["shape"]),
            chunks=tuple(Chunk(**chunk) for chunk in leaf["chunks"]),
        )
        for leaf in row["leaves"]
    )
    for leaf in read_leaves:
        dtype = leaves.named(leaf.dtype)
        if dtype is None or sum(chunk.size for chunk in leaf.chunks) != leaves.size_of(leaf.dtype, leaf.shape):
            raise ValueError(f"{leaves.name_of(leaf.path)} has chunks of another size than its shape")
        for chunk in leaf.chunks:
            if not re.fullmatch("[0-9a-f]{64}", chunk.digest):  # it becomes a file's name
                raise ValueError(f"{leaves.name_of(leaf.path)} has a chunk without a digest")
    base, merged = row["base"], row.get("merged", "")
    value = Manifest(row["lineage"], row["version"], row["kind"], base, row["digest"], read_leaves, merged)
    if value.kind not in get_args(Kind) or digest_of(read_leaves, base, merged) != value.digest:
        raise ValueError("its leaves have another digest")
    return value


def _order(leaf: Leaf) -> list[tuple[bool, int, str]]:
    """Positions of a tuple come in order, and before names."""
    return [(isinstance(key, str), 0 if isinstance(key, str) else key, str(key)) for key in leaf.path]
