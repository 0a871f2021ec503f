"""Versions of the weights as folders that never change: published whole, and deleted when nobody holds them.

    weights/00000012/manifest.json         what it is (manifest.py), written last
    weights/00000012/<SHA-256>.bin         chunks
    weights/.writing-..., .copying-..., .deleting-...     what is not, or no longer, a version
    weights/base/00000000/...        under LoRA: the frozen weights, once, as a folder of versions that has one

A folder has the versions of one lineage: where a trainer's replayed steps come out with other bits, its versions from
then on are another lineage's, in another folder. Under LoRA versions are adapters alone: `base` is the digest of the
frozen weights that they change, which a reader has once. weight_reader.py reads them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from jaxagent.fleet import manifest
from jaxagent.fleet.manifest import Chunk, Manifest, Share, WeightsError
from jaxagent.io import files

Meet = Callable[[str, str], list[str]]  # what it is for, what this process says -> what each process has said

MANIFEST = "manifest.json"
BASE = "base"  # folder of the frozen weights, among the versions
FIRST = 0  # version
THREADS = 4  # that read, digest and write; all three run outside Python's lock


class ConflictError(WeightsError):
    """The version is published with other weights: a replayed step came out differently."""


class OtherRunError(ConflictError):
    """The version that is there is of another run, whatever its weights are."""


def versions(folder: str | pathlib.Path) -> list[int]:
    """The versions that are there, oldest first."""
    folder = pathlib.Path(folder)
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def path_of(folder: str | pathlib.Path, version: int) -> pathlib.Path:
    """Where a version lies."""
    return pathlib.Path(folder) / f"{version:08d}"


# ---------------------------------------------------------------- writing


def publish(
    folder: str | pathlib.Path,
    shares: Iterable[Share],
    lineage: str,
    version: int,
    base: str = "",
    merged: str = "",
    tick: Callable[[], None] = lambda: None,
    replaces: Callable[[ConflictError], bool] = lambda conflict: False,
    rank: int = 0,
    meet: Meet = lambda what, message: [message],
) -> Manifest | None:
    """Publishes a version; when this returns in process 0, it is on disk. The same again changes nothing, or mends it.

    Of several processes each writes the chunks that it holds into one folder, which all of them see. Process 0 makes a
    version of that when all have written: if one of them dies before, there is no such version.

    Args:
      shares: what this process holds of each leaf; together the processes have each chunk once.
      lineage, version: what readers ask for.
      base: of adapters: the digest of the weights that they change; "" = full weights.
      merged: of adapters: a digest of what they make of these, with which a reader compares what it makes.
      tick: called after each chunk that is on disk, from threads.
      replaces: whether this version takes the place of another one that is there, of which the conflict tells.
      meet: waits for all processes, and gives what each of them said.

    Returns:
      The manifest, in process 0.

    Raises:
      ConflictError: in process 0: the version is there, and differs; names both digests.
      OSError: the disk is full, or failed, here or in another process; there is no such version then.
    """
    own = secrets.token_hex(8)  # containers on one shared folder have the same few numbers of processes
    stage = pathlib.Path(folder) / f".writing-{version:08d}-{meet(f'to write version {version}', own)[0]}"
    try:
        failure = ""
        try:
            files.replace(_rows_of(stage, rank), json.dumps(_write(stage, shares, tick)).encode())
        except Exception as error:
            failure = f"process {rank} could not write version {version}: {error}"
            raise
        finally:
            failures = meet(f"version {version} is written", failure)
        if any(failures):
            raise OSError("; ".join(filter(None, failures)))
        if rank:
            return None
        rows = [json.loads(_rows_of(stage, each).read_bytes()) for each in range(len(failures))]
        value = manifest.manifest(lineage, version, manifest.joined(itertools.chain(*rows)), base, merged)
        for each in range(len(failures)):
            _rows_of(stage, each).unlink()
        try:
            return finish(folder, stage, value)
        except ConflictError as conflict:
            if not replaces(conflict):
                raise
        shutil.rmtree(path_of(folder, version))
        return finish(folder, stage, value)
    finally:
        if not rank:
            shutil.rmtree(stage, ignore_errors=True)


def _rows_of(stage: pathlib.Path, rank: int) -> pathlib.Path:
    """Where a process says which chunks it has written."""
    return stage / f"rank-{rank}.json"


def _write(stage: pathlib.Path, shares: Iterable[Share], tick: Callable[[], None]) -> list[list[Any]]:
    """Writes chunks; what `manifest.joined` takes of them."""
    stage.mkdir(parents=True, exist_ok=True)

    def write_piece(piece: memoryview) -> Chunk:
        chunk = manifest.chunk_of(piece)
        path = file_of(stage, chunk)
        if not path.exists():
            files.replace(path, piece)
        tick()
        return chunk

    with threads() as pool:
        pending = [
            (share, {at: pool.submit(write_piece, piece) for at, piece in share.pieces.items()}) for share in shares
        ]
        return [
            [
                share.path,
                share.dtype,
                share.shape,
                {at: dataclasses.astuple(chunk.result()) for at, chunk in of.items()},
            ]
            for share, of in pending
        ]


def finish(folder: str | pathlib.Path, stage: pathlib.Path, value: Manifest) -> Manifest:
    """Makes a version of the chunks in `stage`, which is in `folder` and gone afterwards.

    Raises:
      ConflictError: the version is there, and differs.
      OSError: the disk is full, or failed.
    """
    target = path_of(folder, value.version)
    files.replace(stage / MANIFEST, manifest.encode(value))
    files.sync_folder(stage)
    try:
        if target.exists():
            raise FileExistsError
        os.rename(stage, target)  # refused where a folder with files has the name
    except OSError:
        if not target.exists():
            raise
        compare(target, value)
        _mend(target, stage, value)
        shutil.rmtree(stage, ignore_errors=True)
    files.sync_folder(target.parent)
    return value


def _mend(target: pathlib.Path, stage: pathlib.Path, value: Manifest) -> None:
    """Gives a version that is there its chunks anew where they are missing or damaged."""
    for chunk in value.chunks.values():
        path = file_of(target, chunk)
        if not (path.exists() and manifest.chunk_of(path.read_bytes()) == chunk):
            os.replace(file_of(stage, chunk), path)


def compare(target: pathlib.Path, value: Manifest) -> None:
    """Whether the version that is there is this one.

    Raises:
      ConflictError: it is not; names both digests.
      DamagedError: its manifest is damaged.
    """
    published = manifest.decode((target / MANIFEST).read_bytes(), str(target / MANIFEST))
    if published != value:
        kind = ConflictError if published.lineage == value.lineage else OtherRunError
        raise kind(
            f"{target}: version {value.version} has digest {published.digest} (lineage '{published.lineage}'), and "
            f"another came: {value.digest} (lineage '{value.lineage}')."
        )


# ---------------------------------------------------------------- deleting


def delete(folder: str | pathlib.Path, below: int, keep: Collection[int] = (FIRST,)) -> tuple[list[int], list[int]]:
    """Deletes versions, and what dead processes left of them; returns (deleted, kept since somebody holds them).

    Args:
      below: this version and newer ones stay.
      keep: others that stay: by the first one, engines that come later are compared.
    """
    folder = pathlib.Path(folder)
    deleted, locked = [], []
    for version in versions(folder):
        if version < below and version not in keep:
            (deleted if _delete(path_of(folder, version)) else locked).append(version)
    for path in list(folder.glob(".*")):
        what, _, rest = path.name.partition("-")
        if what == ".deleting" or (what in (".writing", ".copying") and int(rest[:8]) < below):
            shutil.rmtree(path, ignore_errors=True)
    return deleted, locked


def _delete(path: pathlib.Path) -> bool:
    """False: somebody holds it."""
    try:
        fd = os.open(path / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # another process deletes it, or somebody emptied it
        fd = None
    try:
        if fd is not None:
            with contextlib.suppress(OSError):  # no locks on this file system: nobody can hold anything
                if not files.try_lock(fd):
                    return False
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, path.with_name(f".deleting-{path.name}-{os.getpid()}"))
        return True
    finally:
        if fd is not None:
            os.close(fd)


def file_of(folder: pathlib.Path, chunk: Chunk) -> pathlib.Path:
    """A chunk's file in the folder of a version."""
    return folder / f"{chunk.digest}.bin"


@contextlib.contextmanager
def threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """A few threads; after a failure, what waits for one is not begun."""
    pool = concurrent.futures.ThreadPoolExecutor(THREADS)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
