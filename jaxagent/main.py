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
  --config.SECTION.FIELD=VALUE     replace one value of it
  --config.SECTION.CHOICE=NAME     choose, with the defaults of what is chosen; package.module:Class is one of yours
  --config.SECTION=on|none         open a section, with its defaults, or close it
  --dry_run                        compile only: memory, FLOPs and time per device, no weights allocated
  --dry_run_chip=CHIP              {chips} (default h100)
  --help                           this text; with --config also the config's values
  --helpfull                       the same with every field of the config

Config fields{which}:
"""
MATTER = [  # what `--help` shows of the config
    *("config.workdir", "config.seed", "config.numerics", "config.model.path", "config.model.lora.rank"),
    *("config.data.source", "config.env", "config.env.max_turns", "config.env.turn_tokens"),
    *("config.env.context_tokens", "config.stages", "config.rl.steps", "config.rl.tasks_per_step"),
    *("config.rl.group_size", "config.rl.advantage", "config.rl.objective", "config.rl.kl"),
    *("config.rl.optimizer.learning_rate", "config.rl.staleness", "config.fleet"),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code. `argv[0]` is the program's name."""
    argv = list(sys.argv if argv is None else argv)
    if flags.wants_help(argv):
        return exit_code(lambda: print(help_text(flags.config_of_help(argv), "--helpfull" in argv)))
    return exit_code(lambda: _run(flags.parse_argv(argv), argv))


def help_text(config: Config | None = None, full: bool = False) -> str:
    """The commands, the flags, and fields with their types, ranges, meanings, and values of a config."""
    fields = [(field, _value(config, field)) for field in flags.fields()]
    if not full:  # of a field that several environments have the one with a value
        fields = [
            next((f for f in of if f[1]), of[0]) for of in ([f for f in fields if f[0].path == m] for m in MATTER)
        ]
    rows = [(f"--{field.path}{value}", field.meaning if not full else _text(field)) for field, value in fields]
    which = "" if full else f", the {len(MATTER)} that most runs set"
    width = max(len(name) for name, _ in rows)
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)
    return f"{__doc__}{_HELP.format(chips=', '.join(flags.CHIPS), which=which)}{listing}"


def _text(field: flags.Field) -> str:
    """Its type, its range, its default, who has it, and what it means."""
    default = "" if field.default is None else f"default {field.default!r}"
    text = ", ".join(filter(None, (field.kind, field.allowed, default, f"of {field.of}" if field.of else "")))
    return f"{text}: {field.meaning}" if field.meaning else text


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
    from jaxagent.observe.metrics import check_trackers

    check_trackers(invocation.config.trackers)
    if invocation.dry_run:
        from jaxagent.plan import run

        devices.use_virtual_cpus(invocation.config.mesh)
        run.run(invocation.config, invocation.dry_run_chip)
        return None
    if invocation.config.fleet is not None:
        from jaxagent.fleet import local

        return local.run(invocation.config, argv)
    quiet_libraries()
    config = devices.provide_for(invocation.config)
    from jaxagent import loop
    from jaxagent.plan import memory

    loop.run(memory.for_devices(config))
    return None


if __name__ == "__main__":
    devices.use_huge_pages()
    sys.exit(main())
