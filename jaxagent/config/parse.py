"""Config file -> `Config`: names, types and ranges of every field are checked before any device work.

A section `X | None` that is None, or that a config leaves out, is off.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from jaxagent.config.choice import Choice
from jaxagent.config.errors import ConfigError, failure_line, history, unknown_field
from jaxagent.config.ranges import Range
from jaxagent.config.run import STAGE_SECTIONS, Config

# Fields that name a file or folder of this machine.
_PATHS = (
    *("workdir", "path", "eval_source", "demonstrations", "negatives", "episodes", "corpus", "index", "store"),
    *("token_file", "root", "layers", "images"),
)


class Kind(NamedTuple):
    """A type hint of the schema, taken apart."""

    value: Any  # the type itself: a class, a Literal or a tuple
    optional: bool  # None is a value, too
    choice: Choice | None
    allowed: Any  # the range of a number; None for others

    @property
    def is_section(self) -> bool:
        """Whether it is a dataclass, and not a choice among several."""
        return self.choice is None and dataclasses.is_dataclass(self.value)

    @property
    def of_names(self) -> Any:
        """The type of what a mapping has under names that the user gives; None for all that is no mapping."""
        return typing.get_args(self.value)[1] if typing.get_origin(self.value) is Mapping else None


def kind(hint: Any) -> Kind:
    """Takes a type hint apart."""
    optional, choice, allowed = False, None, None
    while True:
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated:
            hint, *marks = inner  # a user's class may have other marks, too
            choice = next((mark for mark in marks if isinstance(mark, Choice)), choice)
            allowed = next((mark for mark in marks if isinstance(mark, Range)), allowed)
        elif origin in (types.UnionType, typing.Union) and types.NoneType in inner:
            (hint,) = (h for h in inner if h is not types.NoneType)
            optional = True
        else:
            return Kind(hint, optional, choice, allowed)


def hints(cls: type) -> dict[str, Any]:
    """The fields of a section, with their types.

    Raises:
      ConfigError: a class of the user's own has a field of a type that no config can hold.
    """
    try:
        types_of = typing.get_type_hints(cls, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"{cls.__module__}:{cls.__qualname__}: the type of a field: {failure_line(error)}."
        ) from error
    in_configs = [field.name for field in dataclasses.fields(cls) if field.metadata.get("config", True)]
    fields = {name: types_of[name] for name in in_configs}
    for name, hint in fields.items():
        if not _has_form(kind(hint)):
            raise ConfigError(
                f"{cls.__module__}:{cls.__qualname__}: its field '{name}' must be bool, int, float, str, a Literal, "
                f"tuple[X, ...] of one of these, or a frozen dataclass, got {hint}."
            )
    return fields


def _has_form(form: Kind) -> bool:
    """Whether a config, and so JSON and a command line, can say a value of this type."""
    if form.choice is not None or form.is_section or form.value in (bool, int, float, str):
        return True
    if form.of_names is not None:
        return _has_form(kind(form.of_names))
    inner = typing.get_args(form.value)
    is_tuple = typing.get_origin(form.value) is tuple and len(inner) == 2 and inner[1] is Ellipsis
    return typing.get_origin(form.value) is Literal or (is_tuple and _has_form(kind(inner[0])))


def parse(config: Mapping[str, Any]) -> Config:
    """Checks names, types and ranges of every field and converts to `Config`.

    A recipe may bring sections for more stages than it names; those of stages that are not in `stages` are left out.

    Raises:
      ConfigError: unknown, missing or ill-typed field, or a number out of its range, named with its full path.
    """
    config = modern(_as_mapping(config, "config"))
    stages = config.get("stages", ())
    left_out = [name for name in STAGE_SECTIONS if isinstance(stages, (tuple, list)) and name not in stages]
    parsed = build(Config, {name: value for name, value in config.items() if name not in left_out}, "config")
    for name in STAGE_SECTIONS:
        if name in parsed.stages and getattr(parsed, name) is None:
            raise ConfigError(f"config.stages names '{name}', and the section config.{name} is missing.")
    return parsed


def to_dict(section: Any) -> dict[str, Any]:
    """A plain nested dict of a parsed config, or of a section of it; a choice's has its "name"."""
    return {name: plain(hint, getattr(section, name)) for name, hint in hints(type(section)).items()}


def default(cls: type, name: str) -> Any:
    """What a field that a config leaves out is, plain; None where it must be given."""
    field = cls.__dataclass_fields__[name]
    if not _has_default(cls, name):
        return None
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    return plain(hints(cls)[name], value)


def missing_fields(config: Mapping[str, Any], cls: type = Config, path: str = "config") -> list[str]:
    """Full paths of what the schema demands and a config stored by another version of it lacks."""
    missing = []
    stages = config.get("stages", STAGE_SECTIONS) if cls is Config else STAGE_SECTIONS
    for name, hint in hints(cls).items():
        if cls is Config and name in STAGE_SECTIONS and name not in stages:
            continue
        if name not in config:
            missing += [] if _has_default(cls, name) else [f"{path}.{name}"]
        elif kind(hint).is_section and isinstance(config[name], Mapping):
            missing += missing_fields(config[name], kind(hint).value, f"{path}.{name}")
    return missing


def modern(section: Mapping[str, Any], cls: type = Config, root: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A section as this version of the schema has it, from what any earlier one stored.

    A section's class says what has changed: `moved` (old name -> where it is now, a dotted path), `removed` (name ->
    `errors.Removed`), and `off`, the fields with which an optional section once said that it is off; its method
    `of_earlier_version` reads what is none of these. A removed field with a value that means something else stays, so
    that whoever reads it says so.
    """
    root, section = section if root is None else root, dict(section)
    for name, (inside, new) in {old: path.split(".") for old, path in history(cls, "moved").items()}.items():
        if name in section:
            value, there = section.pop(name), section.get(inside) or {}
            if new in there or (value is not False and value not in ("", (), [])):
                section[inside] = {**there, new: value}
    for name, field in history(cls, "removed").items():
        meant = value_at(root, field.like) if field.like else field.value
        if name in section and section[name] == meant:
            del section[name]
        elif section.get(name) is True and field.true[0]:
            section = {k: v for k, v in section.items() if k != name} | dict([field.true])
    for name, hint in hints(cls).items():
        section |= {name: _modern(kind(hint), section[name], root)} if name in section else {}
    return section


def _modern(form: Kind, value: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(value, Mapping):
        return value
    if form.of_names is not None:
        return {name: _modern(kind(form.of_names), inner, root) for name, inner in value.items()}
    try:
        cls = form.choice.entry(value.get("name"), "") if form.choice else form.value
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            return value  # a wrong value, which is told when the section is built
        value = getattr(cls, "of_earlier_version", dict)(modern(value, cls, root))
    except ConfigError:  # of a class of the user's own, and told then, too
        return value
    off = history(cls, "off")
    return None if form.optional and off and off.items() <= value.items() else value


def value_at(config: Any, path: str) -> Any:
    """What a nested config has at a dotted path; None where it has nothing."""
    for part in path.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def build(cls: type, value: Any, path: str) -> Any:
    """A section `cls` from a mapping of its fields; those with a default may be left out.

    Raises:
      ConfigError: as `parse`.
    """
    value = _as_mapping(value, path)
    fields = hints(cls)
    for name in value:
        if name not in fields:
            raise unknown_field(path, name, cls, fields)
    values = {name: convert(fields[name], v, f"{path}.{name}") for name, v in value.items()}
    for name in fields:
        if name not in value and not _has_default(cls, name):
            raise ConfigError(f"Config field '{path}.{name}' is missing: it has no default.")
    try:
        for name in fields.keys() - value.keys():  # defaults of a class of the user's own may be wrong, too
            convert(fields[name], default(cls, name), f"{path}.{name}")
        return cls(**values)
    except ValueError as error:  # what a class says of its fields together
        raise error if isinstance(error, ConfigError) else ConfigError(f"{path}: {error}") from error
    except Exception as error:  # a mistake in a class of the user's own
        raise ConfigError(f"{path}: {cls.__qualname__}: {failure_line(error)}.") from error


def entry(choice: Choice, name: Any, path: str) -> type:
    """The class that a config names; one of the user's own has fields that a config can hold.

    Raises:
      ConfigError: there is no such class, or it is no such class; names the config field `path`.
    """
    cls = choice.entry(name, path)
    if cls not in choice.entries.values():
        _check_own(cls, f"{path}='{name}'")
    return cls


def _check_own(cls: type, called: str) -> None:
    """Refuses a class of the user's own that a config cannot set, or that jit could not take."""
    if cls.__hash__ is None or not cls.__dataclass_params__.frozen:
        raise ConfigError(f"{called}: {cls.__qualname__} must be hashable, a dataclass(frozen=True).")
    for name, hint in hints(cls).items():
        if not cls.__dataclass_fields__[name].init:
            raise ConfigError(f"{called}: a config cannot set its field '{name}': it has init=False.")
        if kind(hint).is_section:
            _check_own(kind(hint).value, f"{called}, field '{name}'")


def convert(hint: Any, value: Any, path: str) -> Any:
    """A value of a field of type `hint`.

    Raises:
      ConfigError: as `parse`.
    """
    form = kind(hint)
    if value is None and form.optional:
        return None
    if form.choice is not None:
        section = dict(_as_mapping(form.choice.spelled_out(value), path))
        if "name" not in section:
            raise ConfigError(f"{path} must name its choice: {path}.name, one of {', '.join(form.choice.entries)}.")
        cls = entry(form.choice, name := section.pop("name"), path)
        if form.value is not Any and isinstance(form.value, type) and not issubclass(cls, form.value):
            raise ConfigError(f"{path}='{name}' must extend {form.value.__module__}.{form.value.__qualname__}.")
        return build(cls, section, path)
    if form.is_section:
        return build(form.value, value, path)
    if form.of_names is not None:
        return {name: convert(form.of_names, v, f"{path}.{name}") for name, v in _as_mapping(value, path).items()}
    value = _plain_value(form.value, value, path)
    if isinstance(value, str) and value.startswith("~") and path.rpartition(".")[2] in _PATHS:
        value = os.path.expanduser(value)  # bash leaves it as it is behind "="
    if form.allowed is not None and value not in form.allowed:
        need = "finite" if isinstance(value, float) and not math.isfinite(value) else form.allowed
        raise ConfigError(f"{path} must be {need}, got {value!r}.")
    return value


def _plain_value(hint: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
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
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{path} must be {getattr(hint, '__name__', hint)}, got {type(value).__name__} {value!r}.")
    return value


def plain(hint: Any, value: Any) -> Any:
    """The value of a parsed field of type `hint` as a config has it."""
    form = kind(hint)
    if value is None:
        return None
    if form.choice is not None:
        return {"name": form.choice.name_of(value), **to_dict(value)}
    if form.is_section:
        return to_dict(value)
    if form.of_names is not None:
        return {name: plain(form.of_names, v) for name, v in value.items()}
    return tuple(plain(typing.get_args(form.value)[0], v) for v in value) if isinstance(value, tuple) else value


def _as_mapping(value: Any, path: str) -> Mapping[str, Any]:
    if (to_plain := getattr(value, "to_dict", None)) is not None:
        value = to_plain()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} must be a section with fields, got {value!r}.")
    return value


def _has_default(cls: type, name: str) -> bool:
    field = cls.__dataclass_fields__[name]
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
