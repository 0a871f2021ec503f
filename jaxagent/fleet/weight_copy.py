"""A version, copied from anywhere: chunk by chunk, each compared with its digest, and going on where it broke off.

    with weight_reader.hold(source, version, lineage) as held:
        copy(held.manifest, held.chunk, folder)

Chunks that came are kept when a copy fails or its process dies, so the next call, of the same or another source,
fetches only the others. The version appears in the folder when all of it is there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence

from jaxagent.fleet import manifest, weights
from jaxagent.fleet.manifest import Chunk, DamagedError, Manifest, WeightsError
from jaxagent.io import files


def copy(
    value: Manifest,
    read: Callable[[Chunk], bytes],
    folder: str | pathlib.Path,
    order: Sequence[Chunk] | None = None,
) -> int:
    """Makes the version in `folder` what the manifest says; returns the bytes that were read, 0 where it was there.

    Args:
      value: compared with what was asked for (`weight_reader.check`).
      read: gives a chunk's bytes, or raises; called from several threads at once, with a deadline of its own.
      folder: of all versions.
      order: the manifest's chunks as they are to be read; None: in its own order.

    Raises:
      WeightsError: another process, or thread, is copying the version into this folder: look for it again later.
      DamagedError: a chunk came with other bytes than its digest's; names it.
      ConflictError: the version is there, and differs.
      OSError: the disk is full, or failed.
      Exception: what `read` raised first.
    """
    stage = pathlib.Path(folder) / f".copying-{value.version:08d}-{value.digest[:16]}"
    stage.mkdir(parents=True, exist_ok=True)
    fd = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # no locks on this file system: two copies do the work twice
            if not files.try_lock(fd):
                raise WeightsError(
                    f"{stage} is being filled by another copy: version {value.version} will be there soon."
                )
        target = weights.path_of(folder, value.version)
        if target.exists():
            weights.compare(target, value)
            shutil.rmtree(stage, ignore_errors=True)
            return 0
        chunk_files = {weights.file_of(stage, chunk) for chunk in value.chunks.values()}
        for path in set(stage.iterdir()) - chunk_files:
            path.unlink()  # begun by a process that was killed
        with weights.threads() as pool:
            pending = [pool.submit(_fetch, chunk, read, stage) for chunk in order or value.chunks.values()]
            copied = sum(future.result() for future in concurrent.futures.as_completed(pending))
        weights.finish(folder, stage, value)
        return copied
    finally:
        os.close(fd)


def _fetch(chunk: Chunk, read: Callable[[Chunk], bytes], stage: pathlib.Path) -> int:
    """The bytes that were read: 0 where an earlier copy has the chunk."""
    path = weights.file_of(stage, chunk)
    if path.exists() and path.stat().st_size == chunk.size and manifest.chunk_of(path.read_bytes()) == chunk:
        return 0
    data = read(chunk)
    if (came := manifest.chunk_of(data)) != chunk:
        raise DamagedError(
            f"chunk {chunk.digest} came with {came.size} bytes of digest {came.digest}, and {chunk.size} were expected."
        )
    files.replace(path, data)
    return chunk.size
