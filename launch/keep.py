"""Keeps one process of a run going: starts it again when it fails, kills it when it is stuck, and stops it in time.

    python -m launch.keep --name=engine --vitals=/tmp/engine.vitals -- \\
        python -m jaxagent.join --role=engine --coordinator=http://host:8500 --config=configs/search_r1.py
    python -m launch.keep --print -- COMMAND...      # says what would be started, and how it would be watched

The process has a group of its own, which ends with it. After a failure it is started again: at first after one second,
then after twice as long each time, up to a minute; one that lived for a minute begins anew. Exit code 0 (done), 2 (a
mistake of the user's) or a signal to this program end it: SIGTERM is handed on; after --grace_s the group is killed.
With --vitals it is also killed, and started again, when it has shown no progress for longer than its phase may take
(launch/progress.py); the stacks of its threads are written beside it first.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from jaxagent.config import ConfigError
from jaxagent.config.command import Parser, exit_code, number, seconds
from jaxagent.config.errors import ending_signals
from jaxagent.config.ranges import at_least
from jaxagent.fleet.child import STACKS, VITALS
from jaxagent.io import files
from jaxagent.launch import processes, progress

FINAL = (0, 2)  # done, and a mistake that another start would only repeat
STUCK = 75  # exit code of a process that was killed because it made no progress, where it is not started again
_LONG_S = 60.0  # a process that lived for so long failed for a new reason
_MOST_S = 60.0  # between two starts
_PR_SET_PDEATHSIG = 1


class Child:
    """One process in a group of its own. It is killed when this program is, however that ends."""

    def __init__(self, command: Sequence[str], log: pathlib.Path | None = None, vitals: pathlib.Path | None = None):
        watched = {VITALS: str(vitals), STACKS: f"{vitals}.stacks"} if vitals else {}
        with contextlib.ExitStack() as opened:
            out = opened.enter_context(open(log, "ab")) if log else None
            try:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **watched},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT if out else None,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            except OSError as error:
                raise ConfigError(f"Cannot start '{command[0]}': {error.strerror}.") from error
        self.pid, self.started = self._process.pid, time.monotonic()

    @property
    def code(self) -> int | None:
        """Its exit code as a shell has it (128 + signal), or None while it lives."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def lived_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started

    def terminate(self) -> None:
        """Asks the process, and not what it started, to save and end. A stopped one is woken, so that it can."""
        if self.code is None:
            for signum in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signum)

    def write_stacks(self) -> None:
        """Asks it for the stacks of its threads, and gives it a moment; a process that knows nothing of this ends."""
        for signum in (signal.SIGUSR1, signal.SIGCONT):  # somebody may have stopped it
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)
        self.wait(2.0)

    def kill(self) -> None:
        """Ends the group; what has ended already is no mistake."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or None when it still lives after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=timeout_s)
        return self.code


class Backoff:
    """Seconds until the next start: 1, 2, 4, … up to a minute."""

    def __init__(self, restarts: int):
        self.left, self._next = restarts, 1.0

    def after(self, lived_s: float) -> float | None:
        """How long to wait after a process that lived for so long, or None when it had its last start."""
        if self.left <= 0:
            return None
        self.left -= 1
        if lived_s > _LONG_S:
            self._next = 1.0
        wait, self._next = self._next, min(2 * self._next, _MOST_S)
        return wait


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the process: of its last start, and 143 after SIGTERM where it has none of its own."""
    return exit_code(lambda: run(*arguments(argv)))


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the command behind `--`.

    Raises:
      ConfigError: no command, or a flag that is none.
    """
    parser = Parser(
        prog="python -m launch.keep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--name", default="process", help="what messages call it")
    parser.add_argument("--vitals", type=pathlib.Path, default=None, metavar="FILE", help="watch its progress by this")
    parser.add_argument("--start_s", type=seconds, default=600.0, help="until its first sign of life in --vitals")
    parser.add_argument("--restarts", type=number(int, at_least(0)), default=100, help="then its exit code is ours")
    parser.add_argument("--grace_s", type=seconds, default=120.0, help="after SIGTERM, to save")
    parser.add_argument("--log", type=pathlib.Path, default=None, metavar="FILE", help="for its output, not ours")
    parser.add_argument(
        "--said", type=pathlib.Path, default=None, metavar="FILE", help="for its exit code, unless asked"
    )
    parser.add_argument(
        "--until_eof", action="store_true", help="kill it when standard input closes: its owner is gone"
    )
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
        print(processes.shown(command))
        print(f"watched by {args.vitals or 'its exit alone'}, started again {args.restarts} times at most")
        return 0
    asked: list[int] = []  # signals that came
    for signum in ending_signals():
        signal.signal(signum, lambda number, _: asked.append(number))
    backoff = Backoff(args.restarts)
    while True:
        child = Child(command, args.log, args.vitals)
        try:
            code, why = _watch(child, args, asked)
        finally:
            child.kill()  # what it started, and itself where we fail
        if asked:
            return code
        if args.said:
            files.replace(args.said, f"{code}\n")
        if code in FINAL:
            return code
        wait = backoff.after(child.lived_s)
        after = "not started again" if wait is None else f"again in {wait:.0f} s"
        print(f"{args.name} {why} after {child.lived_s:.0f} s, {after}", file=sys.stderr, flush=True)
        if wait is None:
            return code
        if _sleep(wait, args.until_eof, asked) or asked:
            return 143


def _watch(child: Child, args: argparse.Namespace, asked: list[int]) -> tuple[int, str]:
    """Waits for the child's end, and brings it about where it must be; (exit code, why)."""
    while (code := child.code) is None:
        if gone := _sleep(0.2, args.until_eof, asked):
            asked.append(signal.SIGTERM)
            return 143, gone
        if asked:
            child.terminate()
            code = child.wait(args.grace_s)
            return (143, "did not end when asked") if code is None else (code, "was asked to end")
        if args.vitals and (why := hangs(child, args.vitals, args.start_s)):
            child.write_stacks()
            return STUCK, f"was stuck ({why})"
    return code, f"ended with {code}"


def hangs(child: Child, vitals: pathlib.Path, start_s: float) -> str:
    """Why the child makes no progress; "" where it does."""
    why = progress.overdue(vitals, time.monotonic(), child.pid)
    if why is None and child.lived_s > start_s:
        return f"no sign of life in {start_s:.0f} s"
    return why or ""


def _sleep(wait_s: float, until_eof: bool, asked: list[int]) -> str:
    """Sleeps, less where a signal comes; says so when our owner is gone."""
    until = time.monotonic() + wait_s
    while not asked and (left := until - time.monotonic()) > 0:
        if not until_eof:
            time.sleep(min(left, 0.2))
        elif select.select([sys.stdin], [], [], min(left, 0.2))[0] and not os.read(sys.stdin.fileno(), 1):
            return "lost its owner"
    return ""


def _die_with_parent() -> None:
    """In the child: SIGKILL when this program ends, where the system knows how."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
