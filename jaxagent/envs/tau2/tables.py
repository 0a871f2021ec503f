"""What one side of a domain knows: tables of records, shared by all attempts and copied where one of them writes.

    tables["tasks"]["task_1"]["status"]                        # reads
    tables["tasks"].change("task_1")["status"] = "completed"   # writes: the attempt's own copy of that one record
    tables["tasks"].add("task_2", record)

What a record holds, its form says (`envs.forms`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

Record = dict[str, Any]
Originals = Mapping[str, Mapping[str, Record]]  # table -> key -> record
Forms = Mapping[str, Any]  # table -> the form of its records


def copied(value: Any) -> Any:
    """A JSON value of one's own."""
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


class Table(Mapping[str, Record]):
    """One table as an attempt sees it: shared records, copies of those that it changes, and those that it adds.

    Attributes:
      changed: the attempt's own records.
    """

    def __init__(self, original: Mapping[str, Record]) -> None:
        self._original = original
        self.changed: dict[str, Record] = {}

    def __getitem__(self, key: str) -> Record:
        """A record to read; who writes into it writes into every attempt's."""
        return self.changed[key] if key in self.changed else self._original[key]

    def __contains__(self, key: object) -> bool:
        return key in self.changed or key in self._original

    def __iter__(self) -> Iterator[str]:
        yield from self._original
        yield from (key for key in self.changed if key not in self._original)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def change(self, key: str) -> Record:
        """A record to write into."""
        if key not in self.changed:
            self.changed[key] = copied(self._original[key])
        return self.changed[key]

    def add(self, key: str, record: Record) -> None:
        """A new record, or another one in the place of what is there."""
        self.changed[key] = record

    def differences(self) -> dict[str, str]:
        """Key -> the record as text, of every record that is not what it was. Tells 1 from 1.0, as hashes do."""
        texts = {key: _text(record) for key, record in self.changed.items()}
        before = self._original
        return {key: text for key, text in texts.items() if key not in before or text != _text(before[key])}


Tables = Mapping[str, Table]


def open_tables(originals: Originals) -> dict[str, Table]:
    """Tables for one attempt."""
    return {name: Table(records) for name, records in originals.items()}


def digest(tables: Tables) -> str:
    """The published hash: SHA-256 of everything as JSON with sorted keys. Reads every record."""
    tables_as_dicts = {name: dict(table.items()) for name, table in tables.items()}
    return hashlib.sha256(_text(tables_as_dicts).encode()).hexdigest()


def laid_over(record: Any, update: Any) -> Any:
    """A record with an update: objects are merged field by field, anything else takes the old value's place."""
    if not (isinstance(record, Mapping) and isinstance(update, Mapping)):
        return update
    old_fields = {key: value for key, value in record.items() if key not in update}
    return old_fields | {key: laid_over(record.get(key), value) for key, value in update.items()}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
