"""Command line -> `Invocation`: one config file, overrides, and what to do with them.

`--config=FILE[:PRESET]` names a Python file whose `get_config(preset)` returns a ConfigDict, or one that comes with the
package by its name alone (`--config=search_r1`); every `--config.section.field=value` replaces one of its values. Every
mistake becomes a `ConfigError` of one line.
Imports no jax: `--help` and errors answer at once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.machinery
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxagent.config import MODEL_SHAPE, Config, ConfigError, nearest, overrides, parse, relations
from jaxagent.config.command import Parser
from jaxagent.config.parse import default, hints, kind, modern
from jaxagent.config.run import STAGE_SECTIONS

CHIPS = ("cpu", "a100", "h100", "h200", "v5e", "v5p", "v6e")  # what --dry_run_chip may name; numbers in plan/chips.py
HELP = ("--help", "-h", "-help", "--helpfull")

_OVERRIDE = re.compile(r"--?config\.([^=]+)")
# Of a field, in the schema's source: the comment behind it, on its own line or on one that goes on with it.
_MEANING = re.compile(r"^    (\w+): (?:.*\n(?!    [\w#@]|$))*?.*?  # (.*)$", re.MULTILINE)
_MODULE = "config_config"  # of the config file: where config.json finds a class that the file itself defines


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
    parser = Parser(prog="jaxagent.main", add_help=False, allow_abbrev=False)
    parser.add_argument("--dry_run", nargs="?", const="true", default="false")
    parser.add_argument("--dry_run_chip", default="h100")
    options, rest = parser.parse_known_args(argv[1:])
    config = parse_config([argv[0], *rest], vars(options))
    if options.dry_run_chip not in CHIPS:
        raise ConfigError(f"Unknown chip '{options.dry_run_chip}'. {nearest(options.dry_run_chip, CHIPS)}")
    return Invocation(config, overrides.read(bool, options.dry_run, "--dry_run"), options.dry_run_chip)


def parse_config(
    argv: Sequence[str],
    other_flags: Iterable[str] = (),
    stored_config: Callable[[str], Mapping[str, Any]] | None = None,
) -> Config:
    """The config of a command line that holds nothing but `--config=FILE` and overrides.

    Args:
      argv: argv[0] is the program.
      other_flags: that the program has and has read, for advice.
      stored_config: given when `--config` may be left out: `--config.workdir` ("" = none) -> a config to override.

    Raises:
      ConfigError: as `parse_argv`.
    """
    rest, changes = _split(_joined(argv[1:]))
    sources = []
    for arg in rest:
        name, _, source = arg.lstrip("-").partition("=")
        if not arg.startswith("-"):
            raise ConfigError(f"Unexpected argument '{arg}': fields are set as --config.section.field=value.")
        if name != "config":
            raise ConfigError(f"Unknown flag '{arg}'. {nearest(name, [*other_flags, 'config'])}")
        sources.append(source)
    if len(sources) > 1:
        raise ConfigError(f"--config is given {len(sources)} times, {' and '.join(map(repr, sources))}: leave one.")
    if any(sources):
        config = _config_of_file(_with_preset_file(os.path.expanduser(sources[0])))
    elif not sources and stored_config is not None:
        config = dict(stored_config(os.path.expanduser(dict(changes).get("workdir", ""))))
    else:
        raise ConfigError("No config: say --config=FILE[:PRESET], for example --config=configs/search_r1.py.")
    config = modern(config)  # so that the command line wins, by whichever name it or the file calls a field
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
            field: {"family": "", "settings": None}.get(field, 0)
            for field in MODEL_SHAPE
            if f"model.{field}" not in on_command_line
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


def _with_preset_file(source: str) -> str:
    """ "search_r1:laptop" with the path of the package's own file; any other FILE[:PRESET] as it is."""
    name, colon, preset = source.partition(":")
    if not name.isidentifier() or pathlib.Path(name).is_file():
        return source
    files = {file.stem: file for file in preset_files()}
    if name not in files:
        raise ConfigError(f"There is no config '{name}'. {nearest(name, files)}")
    return f"{files[name]}{colon}{preset}"


def preset_files() -> list[pathlib.Path]:
    """The config files that come with the package, sorted; `--config` takes their names without folder and ".py"."""
    spec = importlib.util.find_spec("jaxagent.configs")
    folders = spec.submodule_search_locations or [] if spec else []
    return sorted(file for folder in folders for file in pathlib.Path(folder).glob("[!_]*.py"))


def _config_of_file(source: str) -> dict[str, Any]:
    """What `get_config` of FILE[:PRESET] returns, as a plain dict.

    Raises:
      ConfigError: there is no such file or function, or the user's code raises.
    """
    path, colon, preset = source.partition(":")
    file = pathlib.Path(path)
    if file.is_dir():
        raise ConfigError(f"Config '{path}' is a folder, not a Python file.")
    if not file.is_file():
        names = [*sorted(str(p) for p in file.parent.glob("[!_]*.py")), *(p.stem for p in preset_files())]
        raise ConfigError(f"Config file '{path}' does not exist. {nearest(path, names)}")
    file.open("rb").close()  # an unreadable one is told as such
    loader = importlib.machinery.SourceFileLoader(_MODULE, path)
    module = sys.modules[_MODULE] = importlib.util.module_from_spec(
        importlib.machinery.ModuleSpec(_MODULE, loader, origin=path)
    )
    module.__file__ = path
    try:
        loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ConfigError(f"{source} defines no get_config().")
        config = module.get_config(preset) if colon else module.get_config()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_blame(error, source)) from error
    if not hasattr(config, "to_dict"):
        raise ConfigError(f"get_config() of {source} must return a ConfigDict, got {type(config).__name__}.")
    return config.to_dict()


def _blame(error: Exception, source: str) -> str:
    """What a config file raised, and the last of its lines on the way there."""
    path, what = source.partition(":")[0], f"{type(error).__name__}: {' '.join(str(error).split())}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) or not frames:  # its message names the line
        return f"{path}: {what}"
    return f"{source} failed at {path}:{frames[-1].lineno}: {what}"
