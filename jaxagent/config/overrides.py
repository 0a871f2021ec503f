"""`--config.section.field=value`: text from a command line into a config, read by the schema's types.

A choice is set by its name, which takes the constants that its class declares: `--config.rl.objective=sapo` (or
`.name=sapo`). Of another choice before it only sections remain that both have: an advantage's critic. A section that
may be off is opened by setting a field of it, or by "on", and closed by "none".
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxagent.config.errors import ConfigError, history, unknown_field
from jaxagent.config.parse import Kind, default, hints, kind, missing_fields
from jaxagent.config.parse import entry as entry_of
from jaxagent.config.run import Config

OFF, ON = ("none", "off"), "on"


def apply(config: dict[str, Any], overrides: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """A config with fields replaced; of a field that is given twice the last one.

    Args:
      config: plain and nested, before `parse`.
      overrides: ("rl.steps", "7"). Names of choices count before the fields of what they choose.

    Raises:
      ConfigError: an unknown field, or a text that is no value of its type; names the full path.
    """
    overrides = list(overrides)
    _check_closed(overrides)
    for path, text in sorted(overrides, key=lambda override: override[0].removesuffix(".name").count(".")):
        config = _set(Kind(Config, False, None, None), config, path.split("."), text, "config")
    return config


def _check_closed(overrides: Iterable[tuple[str, str]]) -> None:
    """Refuses a section that is closed and has fields: whichever counted, the other would be lost unseen.

    Raises:
      ConfigError: names both.
    """
    last = dict(overrides)
    for path, text in last.items():
        inside = [field for field in last if field.startswith(f"{path}.") and field != f"{path}.name"]
        if text in OFF and inside:
            raise ConfigError(f"--config.{path}={text} and --config.{inside[0]} contradict each other: leave one out.")


def _set(form: Kind, value: Any, parts: list[str], text: str, path: str) -> Any:
    """`value` with the field at `parts` below it replaced."""
    if not parts:
        return _replaced(form, value, text, path)
    if form.of_names is not None:
        first, *rest = parts
        value = dict(value or {})
        if rest and first not in value:
            raise ConfigError(f"{path} has no '{first}': name its choice first, --{path}.{first}=CHOICE.")
        return value | {first: _set(kind(form.of_names), value.get(first), rest, text, f"{path}.{first}")}
    if form.choice is not None:
        value = form.choice.spelled_out(value)
        if parts == ["name"]:
            return _replaced(form, value, text, path)
        if value is None:
            raise ConfigError(f"{path} is off: name a choice first, --{path}={next(iter(form.choice.entries))}.")
        cls = entry_of(form.choice, value.get("name"), path)
    elif form.is_section:
        cls = form.value
    else:
        raise ConfigError(f"'{path}' is a value: it has no field '{parts[0]}'.")
    fields = hints(cls)
    if parts[0] in (moved := history(cls, "moved")):
        parts = [*moved[parts[0]].split("."), *parts[1:]]
    if (removed := history(cls, "removed").get(parts[0])) and removed.true[0] and text.lower() in ("true", "1"):
        return dict(value or {}) | dict([removed.true])
    if removed and str(removed.value).lower() == text.lower():
        return value  # what an earlier version's command asks for holds for all runs now
    if parts[0] not in fields:
        raise unknown_field(path, parts[0], cls, fields)
    value = dict(value or {})
    first, *rest = parts
    before = value[first] if first in value else default(cls, first)
    return value | {first: _set(kind(fields[first]), before, rest, text, f"{path}.{first}")}


def _replaced(form: Kind, value: Any, text: str, path: str) -> Any:
    of_tuple = [name for inner in typing.get_args(form.value) for name in typing.get_args(inner)]
    means = "none" in of_tuple or (form.choice and text in form.choice.entries)  # it is a value itself
    if form.optional and text in OFF and not means:
        return None
    if form.choice is not None:
        new, old = form.choice.spelled_out(text), form.choice.spelled_out(value) or {}
        entry = entry_of(form.choice, new["name"], path)
        if len(new) == 1 and old.get("name") == new["name"]:
            return old
        return new | (shared_sections(old, entry_of(form.choice, old["name"], path), entry) if "name" in old else {})
    if form.is_section:
        if form.optional and text == ON:
            return value or {}
        opens = form.optional and not missing_fields({}, form.value)
        on = f"say --{path}={ON} for its defaults, or " if opens else ""
        raise ConfigError(f"'{path}' is a section: {on}set one of its fields, {', '.join(hints(form.value))}.")
    if form.of_names is not None:
        raise ConfigError(f"'{path}' holds sections under names: set one of them, --{path}.NAME=CHOICE.")
    return read(form.value, text, path)


def shared_sections(old: Mapping[str, Any], before: type, entry: type) -> dict[str, Any]:
    """What a choice that takes another's place keeps of it: sections that both have, such as a critic. No constants."""
    then, now = hints(before), hints(entry)
    sections = {name for name, hint in now.items() if kind(hint).is_section and then.get(name) == hint}
    return {name: value for name, value in old.items() if name in sections}


def read(hint: Any, text: str, path: str) -> Any:
    """The value of type `hint` that a text says; its range is `parse`'s business.

    Raises:
      ConfigError: it is of another type.
    """
    if typing.get_origin(hint) is Literal:
        return next((option for option in typing.get_args(hint) if str(option) == text), text)
    if typing.get_origin(hint) is tuple:
        inner = kind(typing.get_args(hint)[0]).value
        if text.startswith(("(", "[")):
            try:
                return tuple(ast.literal_eval(text))
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
                raise ConfigError(f"{path} must be a sequence, got '{text}'.") from error
        return tuple(read(inner, part.strip(), path) for part in text.strip(",").split(",")) if text.strip(",") else ()
    if hint is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{path} must be bool, true or false, got '{text}'.")
        return text.lower() in ("true", "1")
    try:
        return hint(text)
    except ValueError as error:
        raise ConfigError(f"{path} must be {hint.__name__}, got '{text}'.") from error
