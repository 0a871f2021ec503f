"""Typed reading of one raw row's columns. Every mistake is a `RowError` that names the column."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


class RowError(ValueError):
    """What is wrong with a row, and in which column. The caller, who knows the file and the row, adds them."""

    def __init__(self, column: str, problem: str):
        super().__init__(f"column '{column}': {problem}")
        self.column, self.problem = column, problem


class EmptyRow(RowError):
    """A published row that asks nothing: a source leaves it out, and says how many."""


def get(row: Mapping[str, Any], column: str, prefix: str = "") -> Any:
    """A column that must be there."""
    if column not in row:
        raise RowError(prefix + column, f"missing; the row has {', '.join(map(str, row)) or 'no columns'}")
    return row[column]


def mapping(value: Any, column: str) -> Mapping[str, Any]:
    """A value that must be an object."""
    if not isinstance(value, Mapping):
        raise RowError(column, f"must be an object, got {show(value)}")
    return value


def text(row: Mapping[str, Any], column: str, prefix: str = "", empty: bool = False) -> str:
    """A column that must be text, and not blank unless `empty`."""
    value = get(row, column, prefix)
    if not isinstance(value, str):
        raise RowError(prefix + column, f"must be text, got {show(value)}")
    if not empty and not value.strip():
        raise RowError(prefix + column, "must not be empty")
    return value


def texts(value: Any, column: str) -> tuple[str, ...]:
    """A value that must be a list of texts that are not blank."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RowError(column, f"must be a list of texts, got {show(value)}")
    for i, item in enumerate(value):
        if not isinstance(item, str) or not item.strip():
            raise RowError(f"{column}[{i}]", f"must be non-empty text, got {show(item)}")
    return tuple(value)


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON in which no key stands twice, for `json.loads(..., object_pairs_hook=unique)`.

    Raises:
      ValueError: one does; the later would silently take the earlier's place.
    """
    unique_keys = dict(pairs)
    if len(unique_keys) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in keys if keys.count(key) > 1)}' stands twice in one object")
    return unique_keys


def json_object(value: Any) -> Mapping[str, Any]:
    """The column `metadata`: an object, JSON text of one, or nothing."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits
            raise RowError("metadata", f"is not JSON: {error}") from None
    return mapping(value, "metadata")


def show(value: Any) -> str:
    """A value and its type, cut to a line."""
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
