"""Data files by format -> raw rows by index: one small subclass of `Rows` per format.

  array_record  a TFDS folder, through TFDS's own data source; or one bare file whose records are JSON objects
  parquet       one file, read into Arrow memory
  jsonl         one file, one JSON object per line; blank lines are skipped
  tasks.json    tau2-bench's folder: one list of tasks, and split_tasks.json with the ids of each split
A split may be cut into several files, named as Hugging Face names them: train-00000-of-00004.parquet, ...

All are read-only, safe to use from several threads and picklable, as grain asks of a source. TensorFlow is not needed.
"""

from __future__ import annotations

import abc
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxagent.config import ConfigError, nearest

TASKS, TASK_SPLITS = "tasks.json", "split_tasks.json"
CORPUS = "corpus.jsonl"  # a dataset folder's own passages, not a split


class Rows(abc.ABC):
    """Raw rows of one split, by index from 0. `name` is the file or folder, for messages."""

    name: str

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Any:
        """One row as plain Python values.

        Raises:
          ConfigError: the file cannot be decoded there.
        """

    def place(self, index: int) -> str:
        """Where row `index` stands, for messages."""
        return f"{self.name}, row {index}"


class JsonlRows(Rows):
    """Rows of a jsonl file. Holds the byte offset of each line, not the text."""

    def __init__(self, path: Path):
        self.name, self._path = str(path), path
        offsets, lines, offset = [], [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    offsets.append((offset, len(line)))
                    lines.append(number)
                offset += len(line)
        self._spans = np.array(offsets, np.int64).reshape(-1, 2)  # i64[rows, 2] offset, length
        self._lines = np.array(lines, np.int64)  # i64[rows] line number from 1

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Any:
        offset, length = (int(v) for v in self._spans[index])
        with self._path.open("rb") as file:
            file.seek(offset)
            return from_json(file.read(length), self.place(index))

    def place(self, index: int) -> str:
        """File and line, from 1 as editors count."""
        return f"{self._path}, line {self._lines[index]}"


class ParquetRows(Rows):
    """Rows of a parquet file."""

    def __init__(self, path: Path):
        import pyarrow
        import pyarrow.parquet

        self.name = str(path)
        try:
            self._table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowInvalid, OSError) as error:  # Arrow's own OSErrors do not say which file
            raise ConfigError(f"{path} is not a readable parquet file: {_first_line(error)}") from None

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return self._table.slice(index, 1).to_pylist()[0]
        except ValueError as error:  # Arrow's own, and bytes that are no UTF-8 in a column of texts
            raise ConfigError(f"{self.place(index)} cannot be decoded: {_first_line(error)}") from None


class ArrayRecordRows(Rows):
    """Records of one bare array_record file, each a JSON object in UTF-8."""

    def __init__(self, path: Path):
        from array_record.python import array_record_data_source

        self.name = str(path)
        try:
            self._source = array_record_data_source.ArrayRecordDataSource(os.fspath(path))
            self._count = len(self._source)
        except RuntimeError as error:
            raise ConfigError(f"{path} is not a readable array_record file: {_first_line(error)}") from None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        try:
            record = self._source[index]
        except RuntimeError as error:
            raise ConfigError(f"{self.place(index)} cannot be read: {_first_line(error)}") from None
        return from_json(record, self.place(index))


class TfdsRows(Rows):
    """Rows of one split of a TFDS folder that was written as array_record."""

    def __init__(self, folder: Path, split: str):
        self.name = f"{folder}, split '{split}'"
        try:
            self._source = _builder(folder).as_data_source(split=split)
            self._count = len(self._source)
        except (NotImplementedError, OSError, RuntimeError) as error:
            raise ConfigError(f"{self.name} cannot be read: {_first_line(error)}") from None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        try:
            return _decode(self._source[index])
        except Exception as error:  # a damaged record: Riegeli, protobuf, TFDS and UTF-8 each raise their own kind
            raise ConfigError(f"{self.place(index)} cannot be decoded: {_first_line(error)}") from None


class ListedRows(Rows):
    """Rows of one split of a folder with tasks.json, in the order of that file."""

    def __init__(self, folder: Path, split: str):
        path, wanted = folder / TASKS, _task_splits(folder)[split]
        tasks = from_json(path.read_bytes(), str(path))
        if not isinstance(tasks, list):
            raise ConfigError(f"{path} must be a list of tasks, got {type(tasks).__name__}.")
        ids = [task.get("id") if isinstance(task, Mapping) else None for task in tasks]
        for one in wanted:
            if one not in ids:
                raise ConfigError(
                    f"{folder / TASK_SPLITS}: split '{split}' names '{one}', and {path} has no such task."
                )
        self.name = f"{path}, split '{split}'"
        self._path, self._tasks = path, tasks
        self._numbers = [number for number, one in enumerate(ids) if one in wanted]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._tasks[self._numbers[index]]

    def place(self, index: int) -> str:
        """The file, and the task's place in it."""
        return f"{self._path}, row {self._numbers[index]}"


class ChainedRows(Rows):
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[Rows]):
        self.name = parts[0].name
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])  # i64[files] rows up to and with each file

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        part, inside = self._find(index)
        return part[inside]

    def place(self, index: int) -> str:
        """The place inside the file that holds the row."""
        part, inside = self._find(index)
        return part.place(inside)

    def _find(self, index: int) -> tuple[Rows, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[number], index - (int(self._ends[number - 1]) if number else 0)


_FORMATS = {".jsonl": JsonlRows, ".parquet": ParquetRows, ".array_record": ArrayRecordRows}
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(?:-[0-9a-f]{16})?")  # older ones end in a fingerprint
_RETAIL = re.compile("retail_(train|dev|test)_tasks")  # tau-bench's splits; other files beside them are none


def is_tfds(path: Path) -> bool:
    """True for a folder with TFDS metadata."""
    return (path / "dataset_info.json").is_file()


def splits(path: Path) -> dict[str, tuple[Path, ...]]:
    """Split name -> its files, or the TFDS folder that holds it. A single file is its own only split, named "".

    A folder is either TFDS's or has the splits as file names: train.parquet, test.parquet, heldout.jsonl, ...; of
    tau-bench's folder only retail_train_tasks.jsonl, retail_dev_tasks.jsonl and retail_test_tasks.jsonl are splits.

    Raises:
      ConfigError: nothing there, or nothing that can be read.
    """
    if path.is_file():
        if path.suffix not in _FORMATS:
            raise ConfigError(f"{path}: unknown data format '{path.suffix}'. Valid: {', '.join(_FORMATS)}.")
        return {"": (path,)}
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"No data at {path}. {nearest(path.name, siblings) if siblings else ''}".strip())
    if is_tfds(path):
        return dict.fromkeys(_builder(path).info.splits, (path,))
    if (path / TASK_SPLITS).is_file():
        return dict.fromkeys(_task_splits(path), (path,))
    found: dict[str, list[Path]] = {}
    files = [file for file in sorted(path.iterdir()) if file.suffix in _FORMATS and file.name != CORPUS]
    if retail := {match[1]: (file,) for file in files if (match := _RETAIL.fullmatch(file.stem))}:
        return retail
    for file in files:
        shard = _SHARD.fullmatch(file.stem)
        found.setdefault(shard[1] if shard else file.stem, []).append(file)
    for split, parts in found.items():
        if len(parts) > 1 and not all(_SHARD.fullmatch(file.stem) for file in parts):
            raise ConfigError(f"{path}: {', '.join(file.name for file in parts)} all claim to be split '{split}'.")
        _check_complete(path, split, parts)
    if not found:
        raise ConfigError(f"{path} holds no dataset: no dataset_info.json (TFDS), no <split>.jsonl or <split>.parquet.")
    return {split: tuple(parts) for split, parts in found.items()}


def open_rows(path: Path, split: str) -> Rows:
    """The rows of a split that `splits(path)` names.

    Raises:
      ConfigError: it names none such: a folder, say, where one file is meant.
    """
    found = splits(path)
    if split not in found:
        meant = f"has no split '{split}'. {nearest(split, found)}" if split else "is a folder: name one file of tasks."
        raise ConfigError(f"{path} {meant}")
    places = found[split]
    if places[0].is_dir():
        return TfdsRows(places[0], split) if is_tfds(places[0]) else ListedRows(places[0], split)
    parts = [_FORMATS[place.suffix](place) for place in places]
    return parts[0] if len(parts) == 1 else ChainedRows(parts)


def _check_complete(path: Path, split: str, parts: Sequence[Path]) -> None:
    """Raises ConfigError unless the files of a split that is cut are all of its pieces, each once."""
    pieces = {file.name: shard for file in parts if (shard := _SHARD.fullmatch(file.stem))}
    if not pieces:
        return
    counts = sorted({int(shard[3]) for shard in pieces.values()})
    if len(counts) > 1:
        raise ConfigError(
            f"{path}: split '{split}' is cut into {' and into '.join(map(str, counts))} files at once: remove the "
            "files of an older cut."
        )
    numbers = [int(shard[2]) for shard in pieces.values()]
    if twice := [name for name, shard in pieces.items() if numbers.count(int(shard[2])) > 1]:
        raise ConfigError(f"{path}: {', '.join(twice)} are the same piece of split '{split}'.")
    if missing := sorted(set(range(counts[0])) - set(numbers)):
        raise ConfigError(
            f"{path}: split '{split}' is cut into {counts[0]} files, of which {len(missing)} are missing: the first is "
            f"number {missing[0]:05d}."
        )


def _task_splits(folder: Path) -> dict[str, list[str]]:
    """Split name -> ids of its tasks."""
    path = folder / TASK_SPLITS
    if not (folder / TASKS).is_file():
        raise ConfigError(f"{folder} has {TASK_SPLITS} and no {TASKS}.")
    found = from_json(path.read_bytes(), str(path))
    if not isinstance(found, dict) or not all(isinstance(ids, list) for ids in found.values()):
        raise ConfigError(f"{path} must be an object: the name of a split -> a list of ids.")
    return found


def _builder(folder: Path) -> Any:
    import tensorflow_datasets as tfds  # 0.3 s: only when a dataset of this format is opened

    try:
        return tfds.builder_from_directory(os.fspath(folder))
    except Exception as error:  # TFDS raises many kinds for damaged metadata
        raise ConfigError(f"{folder} is not a readable TFDS dataset: {_first_line(error)}") from None


def from_json(record: bytes, place: str) -> Any:
    """A JSON value whose texts can be written and made tokens of. Raises ConfigError, which names `place`."""
    try:
        value = json.loads(record)
        if b"\\ud" in record.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:  # the log of an episode could not hold the task
        raise ConfigError(f"{place}: half of a surrogate pair (\\ud800 to \\udfff) in it: it is no text.") from None
    except (ValueError, RecursionError) as error:  # also no UTF-8, and a number of thousands of digits
        raise ConfigError(f"{place}: not JSON: {error}.") from None


def _decode(value: Any) -> Any:
    """TFDS's bytes and arrays as text, lists and numbers."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, Mapping):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _decode(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    return [_decode(item) for item in value] if isinstance(value, list) else value


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
