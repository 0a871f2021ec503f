"""Keeps one process of a run going on its node, by the rule of all launchers (fleet/restarts.py).

    python -m launch.keep --name=engine --folder=/tmp/engine -- \\
        python -m jaxagent.join --role=engine --coordinator=http://host:8500 --config=configs/search_r1.py
    python -m launch.keep --print -- COMMAND...      # says what would be started

The process has a group of its own, which ends with it. It is started again when it fails, and killed and started again
when it shows no progress for longer than its phase may take (launch/progress.py); its output is shown and, with its
signs of life and the stacks of its threads, kept in --folder. Exit code 0 (done), 2 (a mistake of the user's) or a
signal to this program end it: SIGTERM is handed on, and after --grace_s the group is killed.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from jaxagent.config import ConfigError
from jaxagent.config.command import exit_code, number, seconds
from jaxagent.config.ranges import at_least
from jaxagent.fleet.child import Program
from jaxagent.fleet.supervise import Gang, Supervisor
from jaxagent.io import files
from jaxagent.launch import processes


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the process's last start; 75 where that hung, 128 + N where signal N ended it."""
    return exit_code(lambda: run(*arguments(argv)))


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the command behind `--`.

    Raises:
      ConfigError: no command, or a flag that is none.
    """
    parser = processes.parser("keep", __doc__)
    parser.add_argument("--name", default="process", help="what messages and files call it")
    parser.add_argument(
        "--folder", "--vitals", type=pathlib.Path, metavar="DIR", help="without it, progress is not watched"
    )
    parser.add_argument("--start_s", type=seconds, default=600.0, help="until its first sign of life")
    parser.add_argument("--restarts", type=number(int, at_least(0)), default=100, help="then its exit code is ours")
    parser.add_argument("--grace_s", type=seconds, default=120.0, help="after SIGTERM, to save")
    parser.add_argument("--said", type=pathlib.Path, metavar="FILE", help="for its exit code, unless asked to end")
    parser.add_argument("--print", action="store_true", help="say what would be started, and stop")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to keep alive")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("No command: put what is to be kept alive behind '--'.")
    return args, command


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Keeps the command alive until it is done, until it has failed too often, or until a signal comes."""
    if args.print:
        print(f"{processes.shown(command)}\nstarted again {args.restarts} times at most")
        return 0
    folder = args.folder or pathlib.Path(tempfile.mkdtemp(prefix="jaxagent-"))
    program = Program(args.name, tuple(command), on_console=True, watched=args.folder is not None)
    gang = Gang(args.name, lambda start: [program])
    supervisor = Supervisor([gang], folder, {}, args.restarts, args.start_s, grace_s=args.grace_s)
    try:
        code = supervisor.run()
    except OSError as error:
        raise ConfigError(f"Cannot start '{command[0]}': {error.strerror}.") from error
    if code == 1 and supervisor.newest_code:
        code = supervisor.newest_code
    code = code if code >= 0 else 128 - code
    if args.said and not supervisor.asked:
        args.said.parent.mkdir(parents=True, exist_ok=True)
        files.replace(args.said, f"{code}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
