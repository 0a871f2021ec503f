"""One data file -> its raw rows by index: one small subclass of `Rows` per format.

  array_record    a TFDS folder, through TFDS's own data source; or one bare file whose records are JSON objects
  parquet, arrow  one table, in Arrow's memory; .arrow as `datasets` writes it (a stream), or an IPC file
  jsonl           one JSON object per line; blank lines are skipped
  json            one list of objects, read whole; a file of lines under that name, too
  csv             texts under the names of the first line

.jsonl, .json and .csv may be packed (.gz); then they are unpacked in memory. All are read-only, safe to use from
several threads and picklable, as grain asks of a source. TensorFlow is not needed.
"""

from __future__ import annotations

import abc
import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.data import fields

_PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # what pandas adds to the columns of a file


class Rows(abc.ABC):
    """Raw rows of one split, by index from 0. `name` is the file or folder, for messages."""

    name: str

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Any:
        """One row as plain Python values. Raises ConfigError where the file cannot be decoded there."""

    def place(self, index: int) -> str:
        """Where row `index` stands, for messages."""
        return f"{self.name}, row {index}"


class JsonlRows(Rows):
    """Rows of a jsonl file. Holds the byte offset of each line; of a packed file the text, too."""

    def __init__(self, path: Path):
        self.name, self._path = str(path), path
        self._unpacked = unpacked(path) if path.suffix == PACKED else None
        offsets, lines, offset = [], [], 0
        with self._open() as file:
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
        with self._open() as file:
            file.seek(offset)
            return from_json(file.read(length), self.place(index))

    def _open(self) -> BinaryIO:
        return self._path.open("rb") if self._unpacked is None else io.BytesIO(self._unpacked)

    def place(self, index: int) -> str:
        """File and line, from 1 as editors count."""
        return f"{self._path}, line {self._lines[index]}"


class TableRows(Rows):
    """Rows of a parquet or arrow file, without the nulls with which a table fills what a row does not have."""

    def __init__(self, path: Path):
        import pyarrow
        import pyarrow.parquet

        self.name = str(path)
        try:
            self._table = pyarrow.parquet.read_table(path) if path.suffix == ".parquet" else _arrow_table(path)
        except (pyarrow.ArrowInvalid, OSError) as error:  # Arrow's own OSErrors do not say which file
            kind = path.suffix.removeprefix(".")
            raise ConfigError(f"{path} is not a readable {kind} file: {_first_line(error)}") from None
        self._table = self._table.select([c for c in self._table.column_names if not _PANDAS_INDEX.fullmatch(c)])

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return _unpadded(self._table.slice(index, 1).to_pylist(maps_as_pydicts="strict")[0])
        except (ValueError, KeyError) as error:  # Arrow's own, bytes that are no UTF-8, a key twice
            raise ConfigError(f"{self.place(index)} cannot be decoded: {_first_line(error)}") from None


class ListRows(Rows):
    """Rows that are in memory, a list; `numbers`: of those that count, in their order; None = all."""

    def __init__(self, name: str, rows: Any, numbers: Sequence[int] | None = None):
        if not isinstance(rows, list):
            raise ConfigError(f"{name} must be a list of rows, got {fields.show(rows)}.")
        self.name, self._rows = name, rows
        self._numbers = range(len(rows)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._rows[self._numbers[index]]

    def place(self, index: int) -> str:
        """The file, and the row's place in it."""
        return f"{self.name}, row {self._numbers[index]}"


def csv_rows(path: Path) -> Rows:
    """Rows of a .csv file."""
    return ListRows(str(path), _csv_rows(path))


def json_rows(path: Path) -> Rows:
    """Rows of a .json file: one list, or, as `datasets` writes it, an object per line."""
    content = unpacked(path)
    lines = content[:4096].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
    return JsonlRows(path) if lines else ListRows(str(path), from_json(content, str(path)))


class RecordRows(Rows):
    """Records of array_record files: JSON objects in UTF-8 of a bare one, examples of a split of a TFDS folder."""

    def __init__(self, path: Path, split: str | None = None):
        self.name = str(path) if split is None else f"{path}, split '{split}'"
        self._bare = split is None
        try:
            if split is None:
                from array_record.python import array_record_data_source

                self._source = array_record_data_source.ArrayRecordDataSource(os.fspath(path))
            else:
                self._source = builder(path).as_data_source(split=split)
            self._count = len(self._source)
        except (NotImplementedError, OSError, RuntimeError) as error:
            what = "is not a readable array_record file" if split is None else "cannot be read"
            raise ConfigError(f"{self.name} {what}: {_first_line(error)}") from None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        try:
            record = self._source[index]
            record = record if self._bare else _decode(record)
        except Exception as error:  # a damaged record: Riegeli, protobuf, TFDS and UTF-8 each raise their own kind
            raise ConfigError(f"{self.place(index)} cannot be decoded: {_first_line(error)}") from None
        return from_json(record, self.place(index)) if self._bare else record


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


PACKED = ".gz"
FORMATS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": JsonlRows,
    ".parquet": TableRows,
    ".array_record": RecordRows,
    ".arrow": TableRows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".jsonl.gz": JsonlRows,
    ".json.gz": json_rows,
    ".csv.gz": csv_rows,
}


def ending(path: Path) -> str:
    """What the name of a file ends with, ".gz" together with what stands before it."""
    return "".join(path.suffixes[-2:]) if path.suffix == PACKED else path.suffix


def builder(folder: Path) -> Any:
    """TFDS's builder of a folder. Raises ConfigError where TFDS cannot read it."""
    import tensorflow_datasets as tfds  # 0.3 s: only when a dataset of this format is opened

    try:
        return tfds.builder_from_directory(os.fspath(folder))
    except Exception as error:  # TFDS raises many kinds for damaged metadata
        raise ConfigError(f"{folder} is not a readable TFDS dataset: {_first_line(error)}") from None


def unpacked(path: Path) -> bytes:
    """The content of a file, unpacked. Raises ConfigError where it is damaged."""
    if path.suffix != PACKED:
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be unpacked: {_first_line(error)}.") from None


def _arrow_table(path: Path) -> Any:
    import pyarrow

    source = pyarrow.memory_map(os.fspath(path))
    try:
        return pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.ArrowInvalid:
        source.seek(0)
        return pyarrow.ipc.open_file(source).read_all()


def _unpadded(value: Any) -> Any:
    """A value of a table without the nulls of objects: all objects of a column have the keys of every row's."""
    if isinstance(value, dict):
        return {key: _unpadded(item) for key, item in value.items() if item is not None}
    return [_unpadded(item) for item in value] if isinstance(value, list) else value


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    """All cells are texts; an empty one is no column of its row."""
    csv.field_size_limit(2**31 - 1)  # of the process; without it a cell ends at 128 KiB
    try:
        reader = csv.reader(io.StringIO(unpacked(path).decode("utf-8-sig"), newline=""), strict=True)
        lines = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a readable csv file: {_first_line(error)}.") from None
    names, *cells = lines or [[]]
    names = [name.strip() for name in names]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path} has two columns of one name in its first line: {', '.join(names)}.")
    rows = []
    for number, line in enumerate(cells):
        if line and len(line) != len(names):
            raise ConfigError(f"{path}, row {number} has {len(line)} cells, and the first line names {len(names)}.")
        if line:
            rows.append({name: text for name, text in zip(names, line, strict=True) if text})
    return rows


def from_json(record: bytes, place: str) -> Any:
    """A JSON value whose texts can be written and made tokens of. Raises ConfigError, which names `place`."""
    try:
        value = json.loads(record, object_pairs_hook=fields.unique)
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
