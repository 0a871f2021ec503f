"""Train a language-model agent by reinforcement learning.

    python -m jaxagent.main --config=configs/search_r1.py
    python -m jaxagent.main --config=configs/search_r1.py:laptop-ppo --config.seed=1 --config.workdir=runs/ppo
    python -m jaxagent.main --config=configs/search_r1.py:qwen2.5-3b --config.model.path=DIR --dry_run

The same command run again resumes from the last checkpoint in the workdir. Exit codes: 0 done, 2 a mistake in
the command or config, or a path that cannot be used (one line on stderr), 1 a full disk or nothing but failed episodes,
75 it waited in vain for something that should have come (one line; the same command goes on), 130 Ctrl-C, 143 SIGTERM,
129 SIGHUP (the terminal is gone). The last three save after the step that is under way, and say so; a second Ctrl-C
ends at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.config import Config, flags, to_dict
from jaxagent.config.command import exit_code, quiet_libraries
from jaxagent.runs import devices

_HELP = """
Flags:
  --config=FILE[:PRESET]           Python file with get_config(preset); see configs/
  --config.SECTION.FIELD=VALUE     replace one value of it; all fields are listed below
  --config.SECTION.CHOICE=NAME     choose, with the defaults of what is chosen; package.module:Class is one of yours
  --config.SECTION=on|none         open a section, with its defaults, or close it
  --dry_run                        compile only: memory, FLOPs and time per device, no weights allocated
  --dry_run_chip=CHIP              {chips} (default h100)
  --help                           this text; with --config also the config's values

Config fields:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code. `argv[0]` is the program's name."""
    argv = list(sys.argv if argv is None else argv)
    if flags.wants_help(argv):
        return exit_code(lambda: print(help_text(flags.config_of_help(argv))))
    return exit_code(lambda: _run(flags.parse_argv(argv), argv))


def help_text(config: Config | None = None) -> str:
    """What `--help` prints: the commands, the flags, every field with its type, range, meaning, and value if given."""
    rows = []
    for field in flags.fields():
        published = "" if field.default is None else f"default {field.default!r}"
        of = f"of {field.of}" if field.of else ""
        text = ", ".join(filter(None, (field.kind, field.allowed, published, of)))
        rows.append((f"--{field.path}{_value(config, field)}", f"{text}: {field.meaning}" if field.meaning else text))
    width = max(len(name) for name, _ in rows)
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)
    return f"{__doc__}{_HELP.format(chips=', '.join(flags.CHIPS))}{listing}"


def _value(config: Config | None, field: flags.Field) -> str:
    """ "=7", what a config has; "" of a section that is off and of what another choice has."""
    value: Any = {"config": config and to_dict(config)}
    levels = iter(field.of.split(" / "))
    for part in field.path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ""
        if "name" in value and value["name"] not in next(levels).split("|"):
            return ""
        value = value[part]
    if isinstance(value, Mapping):
        return f"={value['name']}" if "name" in value else ""
    return f"={value}"


def _run(invocation: flags.Invocation, argv: Sequence[str]) -> int | None:
    # Late imports: what they name loads jax, which costs seconds.
    if invocation.dry_run:
        from jaxagent.plan import run

        devices.use_virtual_cpus(invocation.config.mesh)
        run.run(invocation.config, invocation.dry_run_chip)
        return None
    if invocation.config.fleet is not None:
        from jaxagent.fleet import local

        return local.run(invocation.config, argv)
    quiet_libraries()
    devices.provide(invocation.config.mesh, invocation.config.numerics == "exact")
    from jaxagent import loop

    loop.run(invocation.config)
    return None


if __name__ == "__main__":
    devices.use_huge_pages()
    sys.exit(main())
