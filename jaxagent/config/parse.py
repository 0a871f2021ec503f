"""Config file -> `Config`: names, types and ranges of every field are checked before any device work."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from jaxagent.config.errors import ConfigError, nearest
from jaxagent.config.run import Config


def parse(config: Mapping[str, Any]) -> Config:
    """Checks names, types and ranges of every field and converts to `Config`.

    Raises:
      ConfigError: unknown, missing or ill-typed field, or a number out of its range, named with its full path.
    """
    return build(Config, config, "config")


def to_dict(config: Any) -> dict[str, Any]:
    """A plain nested dict of a parsed config (for checkpoints and reports)."""
    return dataclasses.asdict(config)


def absent(config: Mapping[str, Any], cls: type = Config, path: str = "config") -> list[str]:
    """Full paths of fields and sections of the schema that a config stored by another version of it lacks."""
    found = []
    for name, hint in typing.get_type_hints(cls).items():
        if name not in config:
            found.append(f"{path}.{name}")
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(config[name], Mapping):
            found += absent(config[name], hint, f"{path}.{name}")
    return found


def build(cls: type, value: Any, path: str) -> Any:
    if (to_dict := getattr(value, "to_dict", None)) is not None:
        value = to_dict()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} must be a section with fields, got {value!r}.")
    hints = typing.get_type_hints(cls, include_extras=True)
    for name in value:
        if name not in hints:
            raise ConfigError(f"Unknown config field '{path}.{name}'. {nearest(name, hints)}")
    missing = [name for name in hints if name not in value]
    if missing:
        raise ConfigError(f"Config field '{path}.{missing[0]}' is missing. configs/search_r1.py sets every field.")
    return cls(**{name: convert(hint, value[name], f"{path}.{name}") for name, hint in hints.items()})


def convert(hint: Any, value: Any, path: str) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, path)
    origin = typing.get_origin(hint)
    if origin is Annotated:
        kind, allowed = typing.get_args(hint)
        value = convert(kind, value, path)
        if value not in allowed:
            need = "finite" if isinstance(value, float) and not math.isfinite(value) else allowed
            raise ConfigError(f"{path} must be {need}, got {value!r}.")
        return value
    if origin is Literal:
        options = typing.get_args(hint)
        if value not in options:
            close = difflib.get_close_matches(str(value), map(str, options), n=1, cutoff=0.5)
            guess = f" Did you mean '{close[0]}'?" if close else ""
            raise ConfigError(f"{path} must be one of {', '.join(map(repr, options))}, got {value!r}.{guess}")
        return value
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            raise ConfigError(f"{path} must be a sequence, got {value!r}.")
        inner = typing.get_args(hint)[0]
        return tuple(convert(inner, v, f"{path}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, types.UnionType):
        hint = tuple(h for h in typing.get_args(hint))
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{path} must be {getattr(hint, '__name__', hint)}, got {type(value).__name__} {value!r}.")
    return value
