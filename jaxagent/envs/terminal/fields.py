"""Checked reading of the small files that describe a task. Every mistake names the file, the key and the nearest."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError, nearest
from jaxagent.data.fields import RowError, show
from jaxagent.envs.forms import shaped


def read(path: Path, form: Mapping[str, Any], strict: bool = False) -> dict[str, Any]:
    """What a TOML, YAML or JSON file holds, by the file's ending, in its form (`envs.forms`).

    Unless `strict` keys that resemble nothing are allowed: authors add their own. A key close to a known one that is
    absent is taken for a mistake, because a misspelt time limit would silently become the default.

    Raises:
      ConfigError: no such file, or it cannot be read.
      RowError: it does not fit; names the key.
    """
    values = _parsed(path)
    if isinstance(values, Mapping) and not strict:
        _check_spelling(values, form, "")
    return shaped(values, form, "", strict=strict)


def _check_spelling(values: Mapping[str, Any], form: Mapping[str, Any], prefix: str) -> None:
    forms = {name.rstrip("~"): inner for name, inner in form.items()}
    absent = [key for key in forms if key not in values]
    for key, value in values.items():
        if key not in forms and difflib.get_close_matches(str(key), absent, n=1, cutoff=0.8):
            raise RowError(f"{prefix}{key}", f"is unknown. {nearest(str(key), absent)}")
        if isinstance(value, Mapping) and isinstance(forms.get(key), Mapping):
            _check_spelling(value, forms[key], f"{prefix}{key}.")


def positive(value: Any, column: str) -> float:
    """A form: a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise RowError(column, f"must be a number above 0, got {show(value)}")
    return float(value)


def word(value: Any, column: str) -> str:
    """A form: a text, or a number as it is written."""
    if not isinstance(value, (str, int, float)):
        raise RowError(column, f"must be text, got {show(value)}")
    return str(value)


def read_text(path: Path) -> str:
    """A file that must be there, as UTF-8. Raises ConfigError: absent (naming the nearest file beside it), unreadable,
    or empty."""
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        raise ConfigError(f"{path} is missing.{' ' + nearest(path.name, beside) if beside else ''}")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    if not text.strip():
        raise ConfigError(f"{path} is empty.")
    return text


def python_file(path: Path) -> Path:
    """The path itself, when it holds a Python program that compiles. Raises ConfigError: absent, empty, or with a
    syntax error (its line is named)."""
    text = read_text(path)
    try:
        compile(text, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python: {error}.") from None
    return path


def _parsed(path: Path) -> Any:
    text, language = read_text(path), path.suffix[1:].upper()
    if language == "YAML":
        import yaml  # ml-collections brings it; only one of the formats needs it

        parse, wrong = yaml.safe_load, yaml.YAMLError
    else:
        parse, wrong = (tomllib.loads if language == "TOML" else json.loads), ValueError
    try:
        return parse(text)
    except (wrong, RecursionError) as error:
        raise ConfigError(f"{path} is not {language}: {' '.join(str(error).split())}.") from None
