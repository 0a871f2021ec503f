"""`JsonlLog`: an append-only file of JSON records that survives `kill -9` and resumes at a known record.

Records in -> one durable line each. A checkpoint stores `position`; resuming with it drops what came after, so
that after any number of kills every record is there once. An open log holds a lock on its file, which the kernel drops
however the process ends: two processes never write one log.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxagent.config import ConfigError


class JsonlLog:
    """One open log file. `position` is the number of records in it."""

    def __init__(self, path: str | os.PathLike[str], position: int | None = 0):
        """Opens `path`, keeping its first `position` records and dropping the rest, a torn last line included.

        Args:
          path: of the file; made with its folders where it is not there.
          position: None = as many as there are.

        Raises:
          ConfigError: another process has the file open as its log, or the file holds fewer than `position` records,
            so the run cannot be continued without a gap.
        """
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115  open for the life of this object
        try:
            lock(self._file.fileno(), self.path)
            self.position, end = _end_of_record(self.path, position)
        except ConfigError:
            self._file.close()
            raise
        self._file.truncate(end)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record; when this returns it is on disk. NaN and infinities become null, as JSON has none."""
        self.extend([record])

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes records; when this returns all are on disk."""
        for record in records:
            line = json.dumps(_plain(record), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            self._file.write(line.encode() + b"\n")
            self.position += 1
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yields the complete records of a log; nothing when there is no file. A torn last line is skipped."""
    if not pathlib.Path(path).exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def lock(fd: int, path: pathlib.Path) -> None:
    """Holds `path`, open as `fd`, until that is closed or the process ends, however it ends.

    Raises:
      ConfigError: another process holds it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"'{path}' is being written by another process: wait for it, end it, or use another folder."
        ) from None
    except OSError:
        pass  # a file system without locks


def _end_of_record(path: pathlib.Path, position: int | None) -> tuple[int, int]:
    """(number of records, byte offset just past them): of the first `position` records, None = of all."""
    found, end = 0, 0
    with open(path, "rb") as file:
        for line in file:
            if found == position or not line.endswith(b"\n"):
                break
            found, end = found + 1, end + len(line)
    if position is not None and found < position:
        raise ConfigError(f"{path} has {found} records, the checkpoint was taken after {position}: it was changed.")
    return found, end


def _plain(value: Any) -> Any:
    """Scalars of NumPy and JAX as Python numbers; arrays as lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
