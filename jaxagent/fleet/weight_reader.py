"""Versions of the weights, read: exactly the one that is asked for, every byte compared with its digest.

Who asks for version v of a lineage, of full weights or of adapters to a base, gets that, or a `WeightsError` that says
what is wrong; never another version, and never a part.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxagent.fleet import leaves, manifest
from jaxagent.fleet.leaves import Path
from jaxagent.fleet.manifest import Chunk, DamagedError, Leaf, Manifest, MismatchError, MissingError
from jaxagent.fleet.weights import MANIFEST, file_of, path_of, threads
from jaxagent.io import files


class OpenVersion:
    """A version that is not deleted while this is open. Use as a context manager.

    Attributes:
      manifest: of the version.
    """

    def __init__(self, path: pathlib.Path):
        """Raises MissingError or DamagedError."""
        self._path = path
        try:
            self._fd = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingError(f"{path} is not there: not published yet, or deleted.") from None
        try:
            if not self._locked():
                raise MissingError(f"{path} is being deleted.")
            content = b"".join(iter(lambda: os.read(self._fd, 1 << 20), b""))
            self.manifest = manifest.decode(content, str(path / MANIFEST))
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> OpenVersion:
        return self

    def __exit__(self, *failure: object) -> None:
        os.close(self._fd)

    def read(self) -> dict[Path, np.ndarray]:
        """All leaves, compared with their digests, in the manifest's order.

        Raises:
          DamagedError: names the leaf and the file.
        """
        arrays, parts = {}, []
        for leaf in self.manifest.leaves:
            arrays[leaf.path], data = leaves.empty(leaf.dtype, leaf.shape)
            start = 0
            for chunk in leaf.chunks:
                parts.append((leaf, chunk, data[start : start + chunk.size]))
                start += chunk.size

        def fill_part(part: tuple[Leaf, Chunk, memoryview]) -> None:
            leaf, chunk, data = part
            try:
                self._fill(chunk, data)
            except DamagedError as failure:
                raise DamagedError(f"leaf {leaves.name_of(leaf.path)}: {failure}") from None

        with threads() as pool:
            for _ in pool.map(fill_part, parts):
                pass
        return arrays

    def compare(self, tick: Callable[[], None] = lambda: None) -> None:
        """Compares all chunks with their digests, and keeps none of them.

        Args:
          tick: called after each one.

        Raises:
          DamagedError: names the file.
        """
        chunks = dict.fromkeys(chunk for leaf in self.manifest.leaves for chunk in leaf.chunks)
        with threads() as pool:
            for _ in pool.map(lambda chunk: self._fill(chunk, memoryview(bytearray(chunk.size))), chunks):
                tick()

    def _locked(self) -> bool:
        """Whether the version stays for as long as the file is open."""
        with contextlib.suppress(OSError):  # no locks on this file system: the version may go while it is read
            if not files.try_lock(self._fd, shared=True):
                return False
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path / MANIFEST))
        except FileNotFoundError:
            return False

    def _fill(self, chunk: Chunk, data: memoryview) -> None:
        path = file_of(self._path, chunk)
        try:
            with path.open("rb", buffering=0) as file:
                size, got = os.fstat(file.fileno()).st_size, 0
                while got < len(data) and (more := file.readinto(data[got:])):
                    got += more
        except FileNotFoundError:
            raise DamagedError(f"{path} is missing.") from None
        if size != chunk.size or got != chunk.size:
            raise DamagedError(f"{path} has {size} bytes, and not {chunk.size}.")
        if manifest.chunk_of(data) != chunk:
            raise DamagedError(f"{path} differs from its digest.")


def hold(
    folder: str | pathlib.Path,
    version: int,
    lineage: str,
    base: str | None = "",
    like: Mapping[Path, Any] | None = None,
) -> OpenVersion:
    """Exactly the version that is asked for, to be read.

    Args:
      base: of adapters: the digest of the weights that the reader has; "" = full weights are wanted; None = adapters
        are wanted, to whatever weights: the reader has none yet.
      like: by path, the arrays that the reader has room for, or what has their dtype and shape (a tuple of dtypes:
        whichever of them was published is taken); None: any.

    Raises:
      MissingError: it is not there.
      MismatchError: it is of another lineage, kind, base or model.
      DamagedError: its manifest is.
    """
    open_version = OpenVersion(path_of(folder, version))
    try:
        check(open_version.manifest, version, lineage, base, like)
    except BaseException:
        open_version.__exit__()
        raise
    return open_version


def check(
    value: Manifest, version: int, lineage: str, base: str | None = "", like: Mapping[Path, Any] | None = None
) -> None:
    """Whether a manifest, from wherever it came, is of what was asked for (see `hold`).

    Raises:
      MismatchError: names what differs.
    """
    for name, has, expected in (
        ("version", value.version, version),
        ("lineage", value.lineage, lineage),
        ("kind", value.kind, "full" if base == "" else "adapter"),
        ("base", value.base, value.base if base is None else base),
    ):
        if has != expected:
            raise MismatchError(f"version {version} was asked for with {name} {expected!r}, and its {name} is {has!r}.")
    if like is None:
        return
    published = {leaf.path: (leaf.dtype, leaf.shape) for leaf in value.leaves}
    room = {path: (_dtype(leaf.dtype, published.get(path, ("",))[0]), tuple(leaf.shape)) for path, leaf in like.items()}
    for path in sorted(published.keys() | room.keys(), key=leaves.name_of):
        if published.get(path) != room.get(path):
            there, expected = (_words(leaf) for leaf in (published.get(path), room.get(path)))
            raise MismatchError(
                f"version {version}, leaf {leaves.name_of(path)}: published is {there}, and the model has {expected}."
            )


def _dtype(expected: Any, published: str) -> str:
    if isinstance(expected, tuple):
        return published if published in expected else " or ".join(expected)
    return np.dtype(expected).name


def _words(leaf: tuple[str, tuple[int, ...]] | None) -> str:
    return "no such leaf" if leaf is None else f"{leaf[0]}{list(leaf[1])}"
