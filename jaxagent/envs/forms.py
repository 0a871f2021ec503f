"""The form of a JSON value, and its check: rows of tasks and records of stores are read by it, mistakes name the field.

    shaped({"level": 4}, {"level": (1, 2, 3), "tags~": [TEXT]}, "metadata")
    # RowError: column 'metadata.level': must be one of 1, 2, 3, got int 4

str, bool and float are themselves, TEXT is text that is not blank, dict is any object, and object any value. A tuple
holds the values that there are; a function of (value, column) gives the value, or raises. [form] is a list,
{EACH: form} an object with any keys, and {field: form} a record, whose fields are written in this order. "field?" may
be missing and is then null; "field~" may be missing and stays so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from jaxagent.config import ConfigError, nearest
from jaxagent.data import fields
from jaxagent.data.fields import RowError, show

EACH = "*"
_NAMES = {str: "text", bool: "true or false", dict: "an object", list: "a list"}


def json_object(text: str, setting: str) -> dict[str, Any]:
    """The JSON object that a setting holds as text, such as a function's arguments. Raises ConfigError: it is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{setting} is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{setting} must be a JSON object, such as {{"size": 4}}.')
    return value


def TEXT(value: Any, column: str) -> str:
    """Text that is not blank."""
    return fields.text({column: value}, column)


def shaped(value: Any, form: Any, column: str, strict: bool = True) -> Any:
    """A value in its form: whole numbers become floats where the form says so, lists and records are new.

    Args:
      value: JSON.
      form: see the module.
      column: what the value is called in messages; "" = it is a row.
      strict: whether other fields than the form's are a mistake; else they are left out.

    Raises:
      RowError: it does not fit; names the field.
    """
    if callable(form) and not isinstance(form, type):
        return form(value, column)
    if form is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RowError(column, f"must be a number, got {show(value)}")
        return float(value)
    if isinstance(form, tuple):
        if value not in form:
            raise RowError(column, f"must be one of {', '.join(map(repr, form))}, got {show(value)}")
        return value
    kind = form if isinstance(form, type) else list if isinstance(form, list) else dict
    if not isinstance(value, (list, tuple) if kind is list else Mapping if kind is dict else kind):
        raise RowError(column or "*", f"must be {_NAMES[kind]}, got {show(value)}")
    if isinstance(form, type):
        return value
    if isinstance(form, list):
        return [shaped(inner, form[0], f"{column}[{i}]", strict) for i, inner in enumerate(value)]
    prefix = f"{column}." if column else ""
    if EACH in form:
        return {key: shaped(inner, form[EACH], f"{prefix}{key}", strict) for key, inner in value.items()}
    return _record(value, form, prefix, strict)


def _record(value: Mapping[str, Any], form: Mapping[str, Any], prefix: str, strict: bool) -> dict[str, Any]:
    forms = {name.rstrip("?~"): (name[-1], inner) for name, inner in form.items()}
    for key in value:
        if strict and key not in forms:
            raise RowError(f"{prefix}{key}", f"unknown field. {nearest(str(key), forms)}")
    record: dict[str, Any] = {}
    for key, (mark, inner) in forms.items():
        if value.get(key) is not None or (key in value and mark not in "?~"):
            record[key] = shaped(value[key], inner, f"{prefix}{key}", strict)
        elif mark == "?":
            record[key] = None
        elif mark != "~":
            fields.get(value, key, prefix)  # raises: it is missing, and what there is
    return record
