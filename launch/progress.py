"""Whether a process of a run gets somewhere, by the file in which it says so (JAXAGENT_VITALS).

    python -m launch.progress FILE           # exit code 1: it hangs, and one line says in what (a liveness probe)
    python -m launch.progress FILE --begun   # exit code 1 as well where the process has not said anything yet

A process writes phase, budget and time into the file whenever it gets somewhere, never by a clock. So a process that is
alive and stuck is seen, and one that compiles for an hour is left alone: only it knows how long its phase may take.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence

from jaxagent.config.command import Parser, exit_code
from jaxagent.fleet import vitals


def overdue(path: pathlib.Path, now: float, pid: int | None = None) -> str | None:
    """Why the process hangs, "" where it does not, and None where it has not said anything yet.

    Args:
      path: of its vitals.
      now: seconds of the machine's monotonic clock.
      pid: of the process; what another one left in the file is not its. None: whoever wrote last.
    """
    sign = vitals.read(path)
    if sign is None or (pid is not None and sign.pid != pid):
        return None
    over_s = sign.overdue_s(now)
    silent_s = over_s + sign.budget_s
    return f"it {sign.phase}: no progress for {silent_s:.0f} s of {sign.budget_s:.0f}" if over_s > 0 else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 it gets somewhere, 1 it hangs, 2 the file is something else."""
    return exit_code(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = Parser(
        prog="python -m launch.progress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=pathlib.Path, metavar="FILE", help="the process's JAXAGENT_VITALS")
    parser.add_argument("--begun", action="store_true", help="no file yet is a failure")
    args = parser.parse_args(argv)
    why = overdue(args.file, time.monotonic())
    if why is None:
        print(f"'{args.file}' is not there yet.")
        return int(args.begun)
    print(why or "it gets somewhere")
    return int(bool(why))


if __name__ == "__main__":
    sys.exit(main())
