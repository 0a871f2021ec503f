"""Typed reading of one raw row's columns. Every mistake is a `RowError` that names the column."""

from __future__ import annotations

import ast
import contextlib
import datetime
import decimal
import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

MESSAGES = "earlier_messages"  # of metadata: what stands before the prompt, as {"role", "content"}
VERL_COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")  # no reward is given `ability`
_UNSHOWN = ("name", "weight")  # keys of messages that are shown to no model
_STRING = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_STRINGS = re.compile(rf"\[\s*(?:{_STRING}\s*(?:,\s*{_STRING}\s*)*,?\s*)?\]", re.DOTALL)
_BRACKETS = re.compile(r"\[\s*['\"].*\]|\[.*['\"]\s*\]|\[\s*-?\d[-+\d.,eE\s]*\]", re.DOTALL)  # also NumPy's ['a' 'b']


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


def label(row: Mapping[str, Any], column: str, prefix: str = "", empty: bool = False) -> str:
    """A column that must be text or a number, as text."""
    return text({column: as_text(get(row, column, prefix))}, column, prefix, empty)


def texts(value: Any, column: str) -> tuple[str, ...]:
    """A value that must be a list of texts that are not blank."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RowError(column, f"must be a list of texts, got {show(value)}")
    for i, item in enumerate(value):
        if not isinstance(item, str) or not item.strip():
            raise RowError(f"{column}[{i}]", f"must be non-empty text, got {show(item)}")
    return tuple(value)


def answers(value: Any, column: str) -> tuple[str, ...]:
    """Gold answers: a list of texts and numbers, one of these alone, or the text of a list of texts, as in CSV."""
    if isinstance(value := as_text(value), str):
        read = texts_of_list(value, column)
        value = [value] if read is None else read
    return texts([as_text(item) for item in value] if isinstance(value, list | tuple) else value, column)


def as_text(value: Any) -> Any:
    """A number as its text; True, NaN and all else as they are."""
    number = isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool) and value == value
    return str(value) if number else value


def texts_of_list(text: str, column: str) -> list[str] | None:
    """The texts of a list that is written as JSON or as Python writes it; None for a text that is no list.

    Raises:
      RowError: who wrote the text may have meant a list, or a text in brackets.
    """
    if _STRINGS.fullmatch(text.strip()):
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError):
                return read(text.strip())
    if _BRACKETS.fullmatch(text.strip()):
        rule = 'a list of quoted texts, ["a", "b"]; one text in brackets, such as an interval, is ["[0, 1]"]'
        raise RowError(column, f"may be a list or a text in brackets, got {show(text)}: write {rule}")
    return None


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON in which no key stands twice, for `json.loads(..., object_pairs_hook=unique)`.

    Raises ValueError: one does; the later would silently take the earlier's place.
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


def conversation(prompt: Any) -> tuple[str, dict[str, Any]]:
    """The prompt as text: a text, or the last of chat messages; and the messages before it, as metadata."""
    if isinstance(prompt, str):
        return text({"prompt": prompt}, "prompt"), {}
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not prompt:
        raise RowError("prompt", f"must be text or a list of {{role, content}} messages, got {show(prompt)}")
    messages = [_message(message, f"prompt[{number}]") for number, message in enumerate(prompt)]
    messages = [one for one in messages[:-1] if one["content"].strip()] + messages[-1:]
    if messages[-1]["role"] != "user":
        raise RowError("prompt", f"must end with a message of the user, ends with one of {messages[-1]['role']!r}")
    return messages[-1]["content"], {MESSAGES: messages[:-1]} if messages[:-1] else {}


def _message(message: Any, column: str) -> dict[str, str]:
    message = mapping(message, column)
    for name, value in message.items():
        if name not in ("role", "content", *_UNSHOWN) and value not in (None, [], ""):
            raise RowError(f"{column}.{name}", "is no text that could be kept: messages have a role and a content")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):  # parts, as OpenAI's clients write them
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise RowError(f"{column}.content", "has a part that is no text")
        message = {**message, "content": "".join(map(str, parts))}
    empty = message.get("role") == "system"  # it says nothing, and is left out
    return {name: text(message, name, f"{column}.", empty) for name in ("role", "content")}


def missing(value: Any) -> bool:
    """Whether a value is NaN, by which tables of pandas say that there is none."""
    return isinstance(value, float) and value != value


def plain(value: Any, left_out: dict[str, str], name: str = "") -> Any:
    """A value as JSON can hold it: dates and times as ISO text, Decimals and durations as text, no NaN.

    `left_out` gets the names of what JSON cannot hold (bytes, infinity), with a value; objects are without it, and a
    list that holds some is left out whole.
    """
    if isinstance(value, Mapping):
        inside = f"{name}." if name else ""
        items = {key: plain(item, left_out, f"{inside}{key}") for key, item in value.items() if not missing(item)}
        return {key: item for key, item in items.items() if item is not None or value[key] is None}
    if isinstance(value, list | tuple):
        items = [plain(item, left_out, name) for item in value]
        none = [item is None or missing(item) for item in value]
        return items if none == [item is None for item in items] else None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | decimal.Decimal | uuid.UUID):
        return str(value)
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if not missing(value):
        left_out.setdefault(name, show(value))
    return None


def show(value: Any) -> str:
    """A value and its type, cut to a line."""
    value_text = repr(value)
    return f"{type(value).__name__} {value_text if len(value_text) <= 60 else value_text[:57] + '...'}"
