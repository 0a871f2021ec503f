"""Digests of files: what tells that a large file is still the one that it was."""

from __future__ import annotations

import functools
import hashlib
import pathlib


def of_file(path: pathlib.Path) -> str:
    """A hex digest of a file's content, which is read once in a process as long as nobody writes into it.

    Raises:
      OSError: it cannot be read.
    """
    status = path.stat()
    return _of_content(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _of_content(path: pathlib.Path, size: int, changed_ns: int) -> str:
    """Size and time are there to tell contents apart."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
