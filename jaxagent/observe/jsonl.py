"""`JsonlLog`: an append-only file of JSON records that survives `kill -9` and resumes at a known record.

Records in -> one durable line each. A checkpoint stores `position`; resuming with it drops what came after, so
that after any number of kills every record is there once. An open log holds a lock on its file, which the kernel drops
however the process ends: two processes never write one log.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.io import files

WAY_OUT = "Restore it from a copy, or use another workdir."


class JsonlLog:
    """One open log file. `position` is the number of records in it."""

    def __init__(self, path: str | os.PathLike[str], position: int | None = 0):
        """Opens `path`, keeping its first `position` records (None: all); the rest, a torn last line too, goes.

        Raises:
          ConfigError: another process has the file open as its log, or the file holds fewer than `position` records,
            so the run cannot be continued without a gap.
        """
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what a full disk refuses is told by the write, and not once more when the file is closed.
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  open for the life of this object
        try:
            files.lock(self._file.fileno(), self.path)
            self.position, end = _end_of_record(self.path, position)
        except ConfigError:
            self._file.close()
            raise
        self._file.truncate(end)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record; when this returns it is on disk. NaN and infinities become null, as JSON has none."""
        self.extend([record])

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes records; when this returns all are on disk.

        Raises:
          OSError: with the file's name: the disk is full, or failed.
        """
        try:
            for record in records:
                rest = memoryview(line(record))
                while rest:
                    rest = rest[self._file.write(rest) :]
                self.position += 1
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yields the complete records of a log; nothing when there is no file. A torn last line is skipped.

    Raises:
      ConfigError: a line is no record; names file and line.
    """
    if not pathlib.Path(path).exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _record(line, path, number)


def count(path: str | os.PathLike[str]) -> int:
    """The number of complete records of a log; 0 when there is no file."""
    return _end_of_record(pathlib.Path(path), None)[0] if pathlib.Path(path).exists() else 0


def check(path: str | os.PathLike[str], position: int, parse: bool) -> None:
    """Whether a log can be opened at `position`; changes nothing.

    Raises:
      ConfigError: there are fewer, or one is damaged; names file and line.
    """
    if not pathlib.Path(path).exists():
        if position:
            raise ConfigError(f"{path} is gone, the checkpoint was taken after {position} records of it. {WAY_OUT}")
        return
    _end_of_record(pathlib.Path(path), position)
    if parse:
        for _ in itertools.islice(read(path), position):
            pass


def _end_of_record(path: pathlib.Path, position: int | None) -> tuple[int, int]:
    """(number of records, byte offset just past them): of the first `position` records, None = of all."""
    complete, end = 0, 0
    with open(path, "rb") as file:
        for line in file:
            if complete == position or not line.endswith(b"\n"):
                break
            complete, end = complete + 1, end + len(line)
    if position is not None and complete < position:
        raise ConfigError(
            f"{path} has {complete} records, the checkpoint was taken after {position}: it was changed. {WAY_OUT}"
        )
    return complete, end


def line(record: Mapping[str, Any]) -> bytes:
    """UTF-8, whatever a text holds: halves of surrogate pairs, which are none, stand there by their numbers."""
    value = plain(record)
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return line.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _record(line: bytes, path: str | os.PathLike[str], number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # also bytes that are no UTF-8
        raise ConfigError(f"{path}, line {number}: not JSON ({error}): the file was damaged.") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}, line {number}: not a record: the file was damaged.")
    return record


_PLAIN = (int, str, bool, type(None))


def plain(value: Any) -> Any:
    """What JSON can hold: scalars of NumPy and JAX as Python numbers, arrays as lists, what is not finite as None."""
    if type(value) in _PLAIN:  # what most values are, and most are one of very many
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
