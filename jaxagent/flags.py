"""Command line -> `Invocation`: one config file, overrides, and what to do with them.

`--config=FILE[:PRESET]` names a Python file whose `get_config(preset)` returns a ConfigDict, or one that comes with the
package by its name alone (`--config=search_r1`); every `--config.section.field=value` replaces one of its values. Every
mistake becomes a `ConfigError` of one line.
Imports no jax: `--help` and errors answer at once.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re
import traceback
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxagent.config import MODEL_SHAPE, Config, ConfigError, nearest, parse

CHIPS = ("cpu", "a100", "h100", "h200", "v5e", "v5p", "v6e")  # what --dry_run_chip may name; numbers in plan/chips.py

_OVERRIDE = re.compile(r"--?config\.([^=]+)")
_FILE = re.compile(r"--?config=(.*)")


@dataclasses.dataclass(frozen=True)
class Invocation:
    """What the user asked for."""

    config: Config
    dry_run: bool
    dry_run_chip: str  # one of CHIPS


def wants_help(argv: Sequence[str]) -> bool:
    """True for `--help`, `-h`, and a bare call."""
    return len(argv) <= 1 or any(arg in ("--help", "-h", "-help", "--helpfull") for arg in argv[1:])


def parse_argv(argv: Sequence[str]) -> Invocation:
    """Reads the command line (argv[0] is the program).

    Raises:
      ConfigError: unknown flag or field, wrong type, missing or broken config file.
    """
    values = flags.FlagValues()
    flags.DEFINE_bool("dry_run", False, "Compile only and print a plan.", flag_values=values)
    flags.DEFINE_string("dry_run_chip", "h100", "Chip whose step time is estimated.", flag_values=values)
    config = parse_config(argv, values)
    if values.dry_run_chip not in CHIPS:
        raise ConfigError(f"Unknown chip '{values.dry_run_chip}'. {nearest(values.dry_run_chip, CHIPS)}")
    return Invocation(config, values.dry_run, values.dry_run_chip)


def parse_config(
    argv: Sequence[str], values: flags.FlagValues, stored: Callable[[str], Mapping[str, Any]] | None = None
) -> Config:
    """The config of a command line, `--config=FILE` and overrides; other flags go into `values`.

    Args:
      argv: argv[0] is the program.
      values: with the program's other flags defined.
      stored: given when `--config` may be left out: the given `--config.workdir` ("" = none) -> a config to override.

    Raises:
      ConfigError: as `parse_argv`.
    """
    argv = [_with_preset_file(arg) for arg in _joined(argv)]
    for arg in argv[1:]:
        _check_override(arg)
    argv = [_quoted(arg) for arg in _last(argv)]
    source = next((m[1] for m in map(_FILE.fullmatch, argv[1:]) if m), None)
    if source is not None:
        _check_file(source.split(":")[0])
        config_flags.DEFINE_config_file("config", None, "FILE[:PRESET]", flag_values=values, sys_argv=argv)
    elif stored is not None:
        given = (arg.partition("=")[2] for arg in argv[1:] if (m := _OVERRIDE.match(arg)) and m[1] == "workdir")
        config_flags.DEFINE_config_dict(
            "config", ConfigDict(dict(stored(next(given, "")))), flag_values=values, sys_argv=argv
        )
    else:
        raise ConfigError("No config: say --config=FILE[:PRESET], for example --config=configs/search_r1.py.")
    try:
        rest = values(argv)
    except ConfigError:
        raise
    except flags.Error as error:
        raise ConfigError(_one_line(error)) from error
    except Exception as error:  # whatever the user's own config file raises
        raise ConfigError(_blame(error, source or "the stored config")) from error
    if len(rest) > 1:
        raise ConfigError(f"Unexpected argument '{rest[1]}': fields are set as --config.section.field=value.")
    if not isinstance(values.config, ConfigDict):
        raise ConfigError(f"get_config() of {source} must return a ConfigDict, got {type(values.config).__name__}.")
    return parse(_with_given_model(values.config, {m[1] for m in map(_OVERRIDE.match, argv[1:]) if m}))


def fields(cls: type = Config, prefix: str = "config") -> Iterator[tuple[str, str]]:
    """Yields (full path, type) of every config field, in the order of the schema."""
    for name, hint in typing.get_type_hints(cls).items():
        path = f"{prefix}.{name}"
        if dataclasses.is_dataclass(hint):
            yield from fields(hint, path)
        elif typing.get_origin(hint) is typing.Literal:
            yield path, "|".join(repr(option) if option == "" else str(option) for option in typing.get_args(hint))
        else:
            yield path, getattr(hint, "__name__", str(hint)) if not typing.get_origin(hint) else str(hint)


def _with_given_model(config: ConfigDict, given: Collection[str]) -> ConfigDict:
    """A model that is given on the command line brings its own shape; a shape that is given there stays a demand."""
    if "model.path" in given and config.model.path:
        for field in MODEL_SHAPE:
            if f"model.{field}" not in given:
                config.model[field] = "" if field == "family" else 0
    return config


def _joined(argv: Sequence[str]) -> list[str]:
    """`--config FILE` as `--config=FILE`, so that one form is checked."""
    out: list[str] = []
    for arg in argv:
        if out and out[-1] in ("--config", "-config"):
            out[-1] += f"={arg}"
        else:
            out.append(arg)
    return out


def _last(argv: Sequence[str]) -> list[str]:
    """Of an override that is given twice the last one, for tuples too (ml_collections would join them)."""
    names = [(m := _OVERRIDE.match(arg)) and m[1] for arg in argv]
    return [arg for i, arg in enumerate(argv) if names[i] is None or names[i] not in names[i + 1 :]]


def _quoted(arg: str) -> str:
    """`--config.stages=a,b` as the tuple ('a','b'): ml_collections would read one text with a comma in it."""
    match = _OVERRIDE.match(arg)
    if not match or not dict(fields()).get(f"config.{match[1]}", "").startswith("tuple"):
        return arg
    value = arg[match.end() + 1 :]
    return arg if "(" in value else f"{arg[: match.end()]}={tuple(value.strip(',').split(','))!r}"


def _check_override(arg: str) -> None:
    """Names the full path and the nearest valid field, which ml_collections' own error does not."""
    match = _OVERRIDE.match(arg)
    if not match:
        return
    cls, path = Config, "config"
    for part in match[1].split("."):
        if not dataclasses.is_dataclass(cls):
            raise ConfigError(f"'{path}' is a value: it has no field '{part}'.")
        hints = typing.get_type_hints(cls)
        if part.split("[")[0] not in hints:
            raise ConfigError(f"Unknown config field '{path}.{part}'. {nearest(part, hints)}")
        cls, path = hints[part.split("[")[0]], f"{path}.{part}"
    if dataclasses.is_dataclass(cls):
        raise ConfigError(f"'{path}' is a section: set one of its fields, {', '.join(typing.get_type_hints(cls))}.")


def _with_preset_file(arg: str) -> str:
    """`--config=search_r1:laptop` with the path of the package's own file; any other argument as it is."""
    match = _FILE.fullmatch(arg)
    name, colon, preset = match[1].partition(":") if match else ("", "", "")
    if not name.isidentifier() or pathlib.Path(name).is_file():
        return arg
    known = {file.stem: file for file in preset_files()}
    if name not in known:
        raise ConfigError(f"There is no config '{name}'. {nearest(name, known)}")
    return f"--config={known[name]}{colon}{preset}"


def preset_files() -> list[pathlib.Path]:
    """The config files that come with the package, sorted; `--config` takes their names without folder and ".py"."""
    spec = importlib.util.find_spec("jaxagent.configs")
    folders = spec.submodule_search_locations or [] if spec else []
    return sorted(file for folder in folders for file in pathlib.Path(folder).glob("*.py"))


def _check_file(path: str) -> None:
    file = pathlib.Path(path)
    if file.is_file():
        return
    if file.is_dir():
        raise ConfigError(f"Config '{path}' is a folder, not a Python file.")
    known = [*sorted(str(p) for p in file.parent.glob("*.py")), *(p.stem for p in preset_files())]
    raise ConfigError(f"Config file '{path}' does not exist. {nearest(path, known)}")


def _one_line(error: Exception) -> str:
    match = re.match(r"flag --(config\.[^=]+)=(.*?): ", str(error))
    if match and (kind := dict(fields()).get(match[1])):
        return f"{match[1]} must be {kind}, got '{match[2]}'."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # ml_collections puts a whole traceback into the message; its last line is the cause.
    text = f"{lines[0]} {lines[-1]}" if "Traceback (most recent call last):" in lines else " ".join(lines)
    return text.replace("flag --config.", "config.")


def _blame(error: Exception, source: str) -> str:
    if isinstance(error, AttributeError) and "get_config" in str(error):
        return f"{source} defines no get_config()."
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{source} failed at {where.filename}:{where.lineno}: {type(error).__name__}: {' '.join(str(error).split())}"
