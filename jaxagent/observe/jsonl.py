"""`JsonlLog`: an append-only file of JSON records that survives `kill -9` and resumes at a known record.

Records in -> one durable line each. A checkpoint stores `position`; resuming with it drops what came after, so
that after any number of kills every record is there once.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxagent.config import ConfigError


class JsonlLog:
    """One open log file. `position` is the number of records in it."""

    def __init__(self, path: str | os.PathLike[str], position: int = 0):
        """Opens `path`, keeping its first `position` records and dropping the rest, a torn last line included.

        Raises:
          ConfigError: the file holds fewer than `position` records, so the run cannot be continued without a gap.
        """
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.position = position
        end = _end_of_record(self.path, position)
        self._file = open(self.path, "ab")  # noqa: SIM115  open for the life of this object
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


def _end_of_record(path: pathlib.Path, position: int) -> int:
    """Byte offset just past the first `position` records."""
    found, end = 0, 0
    if position and path.exists():
        with open(path, "rb") as file:
            for line in file:
                if found == position or not line.endswith(b"\n"):
                    break
                found, end = found + 1, end + len(line)
    if found < position:
        raise ConfigError(f"{path} has {found} records, the checkpoint was taken after {position}: it was changed.")
    return end


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
