"""Steps of a run made again, and compared with its record: every token and log-prob, bit for bit.

    python -m jaxagent.replay --config.workdir=runs/search_r1 --step=12                        # all episodes of a step
    python -m jaxagent.replay --config.workdir=runs/search_r1 --step=12 --episode=TASK#ATTEMPT
    python -m jaxagent.replay --config.workdir=runs/search_r1 --verify=5                       # and a certificate

For --step the nearest bundle before it is restored, the steps between are trained again from the recorded episodes, and
the step's episodes are sampled again with the weights that come out, through engine and environment. What differs is
named: step, episode, position, both values. The config is the run's own, and nothing of it can be overridden.

Where the environment cannot be run again (it says so of itself, as roles behind HTTP do, or with --recorded), its side
is taken from the record, and the policy's tokens are sampled again in the recorded contexts.

--verify trains every step again from the first bundle to the last, and compares each later bundle, the exported policy
and the results that the run wrote down; the episodes of K steps are sampled again, drawn by the newest seal. It writes
WORKDIR/replay/verify-K-*.json and .txt, which name what is NOT CHECKED. Exit codes: 0 everything is equal, 1 something
differs, 2 a mistake in the command, or nothing that could be made again, 3 INCOMPLETE: what --verify made again is
equal, and rewards or the trained policy could not be made again or compared; it says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxagent.config import Config, ConfigError, flags, nearest
from jaxagent.config.command import Parser, count, exit_code, number, quiet_libraries
from jaxagent.config.ranges import at_least, between
from jaxagent.evaluate import stored_config
from jaxagent.runs import devices

WORKDIR = "config.workdir"
VERDICTS = {"passed": 0, "failed": 1, "incomplete": 3}  # exit codes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code. `argv[0]` is the program's name."""
    argv = list(sys.argv if argv is None else argv)
    if flags.wants_help(argv):
        print(parser().format_help())
        return 0
    return exit_code(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    options, rest = parser().parse_known_args(argv[1:])
    if (options.step is None) == (options.verify is None):
        raise ConfigError("Say either --step=N or --verify=K.")
    if options.episode and options.step is None:
        raise ConfigError("--episode is of one step: say --step=N too.")
    if options.draw is not None and options.verify is None:
        raise ConfigError("--draw chooses the steps of --verify=K, which is not there.")
    config = read_config([argv[0], *rest])
    quiet_libraries()
    config = devices.provide_for(config)
    # Late imports: what they name loads jax, which costs seconds.
    from jaxagent import loop
    from jaxagent.replay import run

    content = run.run(config, options, loop.rl_stage)
    print(run.last_line(content))
    return VERDICTS[content["verdict"]]


def read_config(argv: Sequence[str]) -> Config:
    """The config of the run in `--config.workdir`.

    Raises:
      ConfigError: there is no run; a flag that is none of this program's.
    """
    for arg in argv[1:]:
        name = arg.lstrip("-").partition("=")[0]
        if (arg.startswith("-") and name == "config") or (name.startswith("config.") and name != WORKDIR):
            raise ConfigError(f"--{name}: a replay has the run's own config, of which nothing but the workdir is said.")
        if arg.startswith("-") and name != WORKDIR:
            raise ConfigError(f"Unknown flag '{arg}'. {nearest(name, [*vars(parser().parse_args([])), WORKDIR])}")
    return flags.parse_config(argv, (), stored_config)


def parser() -> argparse.ArgumentParser:
    """The flags of this program alone."""
    out = Parser(
        prog="python -m jaxagent.replay",
        usage="%(prog)s --config.workdir=RUN (--step=N [--episode=ID] | --verify=K) [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    out.add_argument("--step", type=number(int, at_least(0)), help="make the episodes of this step again, from 0")
    out.add_argument("--episode", default="", help="only this one, 'task#attempt', or 'task' for all attempts at it")
    out.add_argument("--verify", type=count, help="train all again, and sample so many steps, drawn by chance")
    out.add_argument(
        "--draw", type=number(int, between(0, 2**32 - 1)), help="a number of yours that decides, with the seal, which"
    )
    out.add_argument("--recorded", action="store_true", help="take the environment's side from the record")
    out.add_argument("--stage", default="", help="'rl' or 'opd' (default: the last of them that the run has)")
    return out
