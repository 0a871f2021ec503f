"""Command line -> `Invocation`: one config file, overrides, and what to do with them.

`--config=FILE[:PRESET]` names a Python file whose `get_config(preset)` returns a ConfigDict, or one that comes with the
package by its name alone (`--config=search_r1`); every `--config.section.field=value` replaces one of its values. Every
mistake becomes a `ConfigError` of one line.
Imports no jax: `--help` and errors answer at once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import os
import pathlib
import re
import traceback
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxagent.config import MODEL_SHAPE, Config, ConfigError, nearest, overrides, parse, relations
from jaxagent.config.parse import default, hints, kind
from jaxagent.config.run import STAGE_SECTIONS

CHIPS = ("cpu", "a100", "h100", "h200", "v5e", "v5p", "v6e")  # what --dry_run_chip may name; numbers in plan/chips.py
HELP = ("--help", "-h", "-help", "--helpfull")

_OVERRIDE = re.compile(r"--?config\.([^=]+)")
_FILE = re.compile(r"--?config=(.*)")
# Of a field, in the schema's source: the comment behind it, on its own line or on one that goes on with it.
_MEANING = re.compile(r"^    (\w+): (?:.*\n(?!    [\w#@]|$))*?.*?  # (.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Invocation:
    """What the user asked for."""

    config: Config
    dry_run: bool
    dry_run_chip: str  # one of CHIPS


def wants_help(argv: Sequence[str]) -> bool:
    """True for `--help`, `-h`, and a bare call."""
    return len(argv) <= 1 or any(arg in HELP for arg in argv[1:])


def config_of_help(argv: Sequence[str]) -> Config | None:
    """The config whose values `--help` shows; None where no `--config` is given."""
    argv = [arg for arg in argv if arg not in HELP]
    return parse_argv(argv).config if any(arg.partition("=")[0] in ("--config", "-config") for arg in argv) else None


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
    argv: Sequence[str], values: flags.FlagValues, stored_config: Callable[[str], Mapping[str, Any]] | None = None
) -> Config:
    """The config of a command line, `--config=FILE` and overrides; other flags go into `values`.

    Args:
      argv: argv[0] is the program.
      values: with the program's other flags defined.
      stored_config: given when `--config` may be left out: `--config.workdir` ("" = none) -> a config to override.

    Raises:
      ConfigError: as `parse_argv`.
    """
    argv, changes = _split([_with_preset_file(arg) for arg in _joined(argv)])
    sources = [m[1] for m in map(_FILE.fullmatch, argv[1:]) if m]
    if len(sources) > 1:
        raise ConfigError(f"--config is given {len(sources)} times, {' and '.join(map(repr, sources))}: leave one.")
    source = next(iter(sources), None)
    if source is not None:
        _check_file(source.split(":")[0])
        config_flags.DEFINE_config_file("config", None, "FILE[:PRESET]", flag_values=values, sys_argv=argv)
    elif stored_config is None:
        raise ConfigError("No config: say --config=FILE[:PRESET], for example --config=configs/search_r1.py.")
    try:
        rest = values(argv)
    except Exception as error:  # whatever the user's own config file raises
        if isinstance(own := _of_the_file(error), ConfigError):
            raise own from None
        if isinstance(own, flags.Error):
            raise ConfigError(" ".join(str(own).split())) from error
        raise ConfigError(_blame(own, source or "the stored config")) from error
    if len(rest) > 1:
        raise ConfigError(f"Unexpected argument '{rest[1]}': fields are set as --config.section.field=value.")
    if source is None and stored_config is not None:
        config = dict(stored_config(os.path.expanduser(dict(changes).get("workdir", ""))))
    elif isinstance(values.config, ConfigDict):
        config = values.config.to_dict()
    else:
        if isinstance(failure := getattr(values.config, "_error", None), OSError):  # ml_collections puts it off
            raise ConfigError(_blame(failure, str(source))) from failure
        raise ConfigError(f"get_config() of {source} must return a ConfigDict, got {type(values.config).__name__}.")
    parsed = parse(_with_its_own_shape(overrides.apply(config, changes), {field for field, _ in changes}))
    for field, _ in changes:
        stage = field.split(".")[0]
        if stage in STAGE_SECTIONS and stage not in parsed.stages:
            raise ConfigError(f"--config.{field} would be ignored: config.stages has no '{stage}'.")
    relations.check(parsed)
    return parsed


class Field(NamedTuple):
    """What the schema says of one value."""

    path: str  # "config.rl.steps"
    kind: str  # "int", "loss|reward|advantage", ...
    allowed: str  # the range of a number, "at least 1"; "" for others
    meaning: str  # the schema's comment; "" where there is none
    of: str = ""  # the entries that have this field, "gae|vtrace"; of a choice in a choice "gae|vtrace / squared"
    default: Any = None  # the published value, of what has one


def fields(cls: type = Config, prefix: str = "config", of: str = "") -> Iterator[Field]:
    """Yields every config field, in the order of the schema: a choice with its names, then the fields of each."""
    for name, hint in hints(cls).items():
        path, form = f"{prefix}.{name}", kind(hint)
        meaning, published = _meanings(cls).get(name, ""), default(cls, name)
        off = "none|" if form.optional else ""
        if form.of_names is not None:
            path, form, published = f"{path}.NAME", kind(form.of_names), None
        if form.choice is not None:
            entry_name = published["name"] if published else None
            yield Field(path, off + "|".join(form.choice.entries), "", meaning, of, entry_name)
            of_entries: dict[Field, list[str]] = {}  # those that several have are told once
            for entry, inner in form.choice.entries.items():
                for field in fields(inner, path):
                    of_entries.setdefault(field, []).append(entry)
            for field, entries in of_entries.items():
                yield field._replace(of=" / ".join(filter(None, (of, "|".join(entries), field.of))))
        elif form.is_section:
            if form.optional:
                summary = (inspect.getdoc(form.value) or "").partition("\n")[0]
                yield Field(path, "none|on", "", meaning or summary, of)
            yield from fields(form.value, path, of)
        else:
            yield Field(path, off + _kind_text(form.value), str(form.allowed or ""), meaning, of, published)


def _kind_text(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(repr(option) if option == "" else str(option) for option in typing.get_args(hint))
    return str(hint) if typing.get_origin(hint) else hint.__name__


@functools.cache
def _meanings(cls: type) -> dict[str, str]:
    """Name of a section's field -> the comment beside it, in the class or in one that it extends."""
    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    return {name: text for base in bases for name, text in _MEANING.findall(inspect.getsource(base))}


def _with_its_own_shape(config: dict[str, Any], on_command_line: Collection[str]) -> dict[str, Any]:
    """A model that is given on the command line brings its own shape; a shape that is given there stays a demand."""
    if "model.path" in on_command_line and config["model"]["path"]:
        own = {
            field: "" if field == "family" else 0 for field in MODEL_SHAPE if f"model.{field}" not in on_command_line
        }
        config = config | {"model": config["model"] | own}
    return config


def _split(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """A command line without its overrides, and these: ("rl.steps", "7")."""
    rest, changes = [], []
    args = iter(argv)
    for arg in args:
        if arg.lstrip("-").partition("=")[0] == "config.":
            raise ConfigError(f"'{arg}' names no field: fields are set as --config.section.field=value.")
        if not (match := _OVERRIDE.match(arg)):
            rest.append(arg)
            continue
        if arg[match.end() :] == "" and (value := next(args, None)) is not None:  # "--config.rl.steps 7"
            arg += f"={value}"
        if len(arg) == match.end():
            raise ConfigError(f"{arg} has no value: say {arg}=VALUE.")
        changes.append((match[1], arg[match.end() + 1 :]))
    return rest, changes


def _joined(argv: Sequence[str]) -> list[str]:
    """`--config FILE` as `--config=FILE`, so that one form is checked."""
    out: list[str] = []
    for arg in argv:
        if out and out[-1] in ("--config", "-config"):
            out[-1] += f"={arg}"
        else:
            out.append(arg)
    return out


def _with_preset_file(arg: str) -> str:
    """`--config=search_r1:laptop` with the path of the package's own file; any other argument as it is."""
    match = _FILE.fullmatch(arg)
    if match and match[1].startswith("~"):
        return f"--config={os.path.expanduser(match[1])}"
    name, colon, preset = match[1].partition(":") if match else ("", "", "")
    if not name.isidentifier() or pathlib.Path(name).is_file():
        return arg
    files = {file.stem: file for file in preset_files()}
    if name not in files:
        raise ConfigError(f"There is no config '{name}'. {nearest(name, files)}")
    return f"--config={files[name]}{colon}{preset}"


def preset_files() -> list[pathlib.Path]:
    """The config files that come with the package, sorted; `--config` takes their names without folder and ".py"."""
    spec = importlib.util.find_spec("jaxagent.configs")
    folders = spec.submodule_search_locations or [] if spec else []
    return sorted(file for folder in folders for file in pathlib.Path(folder).glob("[!_]*.py"))


def _check_file(path: str) -> None:
    file = pathlib.Path(path)
    if file.is_file():
        file.open("rb").close()  # an unreadable one is told as such
        return
    if file.is_dir():
        raise ConfigError(f"Config '{path}' is a folder, not a Python file.")
    names = [*sorted(str(p) for p in file.parent.glob("[!_]*.py")), *(p.stem for p in preset_files())]
    raise ConfigError(f"Config file '{path}' does not exist. {nearest(path, names)}")


def _of_the_file(error: BaseException) -> BaseException:
    """What the user's config file raised, out of what ml_collections and absl wrap around it; else `error` itself."""
    wrapped: BaseException | None = error
    while wrapped is not None:
        if str(wrapped).startswith(("Error whilst parsing config file", "Configuration is not available")):
            return wrapped.__cause__ or wrapped.__context__ or error
        wrapped = wrapped.__cause__ or wrapped.__context__
    return error


def _blame(error: BaseException, source: str) -> str:
    if isinstance(error, AttributeError) and "get_config" in str(error):
        return f"{source} defines no get_config()."
    frames = traceback.extract_tb(error.__traceback__)
    path = source.partition(":")[0]
    where = [frame for frame in frames if frame.filename == path][-1:] or frames[-1:]
    if isinstance(error, SyntaxError) or not where:  # its message names the line
        return f"{path}: {type(error).__name__}: {' '.join(str(error).split())}"
    (where,) = where
    return f"{source} failed at {where.filename}:{where.lineno}: {type(error).__name__}: {' '.join(str(error).split())}"
