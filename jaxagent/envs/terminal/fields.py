"""Checked reading of the small files that describe a task. Every mistake names the file, the key and the nearest."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError, nearest


class Fields:
    """A mapping read from a file, with typed getters. `path` and `prefix` say where it stands, for messages."""

    def __init__(self, values: Any, path: Path, known_keys: Iterable[str], prefix: str = ""):
        """Checks that it is a mapping, and that no key is a misspelt known one.

        Keys that resemble nothing are allowed: authors add their own. A key close to a known one that is absent is
        taken for a mistake, because a misspelt time limit would silently become the default.

        Raises:
          ConfigError: not a mapping, or a misspelt key.
        """
        self.path, self.prefix = path, prefix
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path}: {self.name} must be a section with keys, got {type(values).__name__}.")
        self.values, known_keys = values, tuple(known_keys)
        absent = [key for key in known_keys if key not in values]
        for key in values:
            if key not in known_keys and difflib.get_close_matches(str(key), absent, n=1, cutoff=0.8):
                raise ConfigError(f"{path}: unknown key '{prefix}{key}'. {nearest(str(key), absent)}")

    @property
    def name(self) -> str:
        """The section's own name."""
        return f"'{self.prefix.rstrip('.')}'" if self.prefix else "the file"

    def section(self, key: str, known_keys: Iterable[str]) -> Fields:
        """A sub-section; one that is absent is empty."""
        return Fields(self.values.get(key, {}), self.path, known_keys, f"{self.prefix}{key}.")

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not blank, or the default. Without a default the key is required."""
        value = self._get(key, default)
        if not isinstance(value, str) or (not value.strip() and value != default):
            raise self.wrong(key, "must be text that is not blank", value)
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.wrong(key, "must be a number above 0", value)
        return float(value)

    def texts(self, key: str) -> dict[str, str]:
        """A section of texts, such as environment variables; absent = none. Numbers are taken as written."""
        value = self._get(key, {})
        if not isinstance(value, Mapping) or not all(isinstance(v, (str, int, float)) for v in value.values()):
            raise self.wrong(key, "must be a section of texts", value)
        return {str(k): str(v) for k, v in value.items()}

    def wrong(self, key: str, problem: str, value: Any) -> ConfigError:
        """The error for a key whose value is no good."""
        text = repr(value)
        text = text if len(text) <= 60 else text[:57] + "..."
        return ConfigError(f"{self.path}: key '{self.prefix}{key}' {problem}, got {text}.")

    def _get(self, key: str, default: Any) -> Any:
        if key in self.values:
            return self.values[key]
        if default is None:
            raise ConfigError(f"{self.path}: key '{self.prefix}{key}' is missing.{self._guess(key)}")
        return default

    def _guess(self, key: str) -> str:
        close = difflib.get_close_matches(key, map(str, self.values), n=1, cutoff=0.5)
        return f" Is '{self.prefix}{close[0]}' meant?" if close else ""


def read_text(path: Path) -> str:
    """A file that must be there, as UTF-8.

    Raises:
      ConfigError: absent (naming the nearest file beside it), unreadable, or empty.
    """
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


def read_json(path: Path) -> Any:
    """A JSON file, checked as `read_text`."""
    return _parse(path, json.loads, json.JSONDecodeError, "JSON")


def read_toml(path: Path) -> Any:
    """A TOML file, checked as `read_text`."""
    return _parse(path, tomllib.loads, tomllib.TOMLDecodeError, "TOML")


def read_yaml(path: Path) -> Any:
    """A YAML file, checked as `read_text`."""
    import yaml  # ml-collections brings it; only one of the formats needs it

    return _parse(path, yaml.safe_load, yaml.YAMLError, "YAML")


def python_file(path: Path) -> Path:
    """The path itself, when it holds a Python program that compiles.

    Raises:
      ConfigError: absent, empty, or with a syntax error (its line is named).
    """
    text = read_text(path)
    try:
        compile(text, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python: {error}.") from None
    return path


def _parse(path: Path, parse: Callable[[str], Any], wrong: type[Exception], language: str) -> Any:
    text = read_text(path)
    try:
        return parse(text)
    except wrong as error:
        raise ConfigError(f"{path} is not {language}: {' '.join(str(error).split())}.") from None
