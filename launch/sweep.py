"""Runs a grid over config fields, one run after another or as a Slurm array, and ends in a table and a plot.

    python -m launch.sweep --config=configs/search_r1.py --grid rl.objective.clip_high=0.2,0.28 --workdir=runs/s
    python -m launch.sweep --config=configs/search_r1.py --grid preset=laptop,laptop+gspo --seeds=0,1 --workdir=runs/s
    python -m launch.sweep ... --config.rl.steps=20   # the same in all runs
    python -m launch.sweep ... --share=warm_start     # runs that differ only after the warm start share one per seed
    python -m launch.sweep ... --slurm="--gres=gpu:4 --time=8:00:00"     # writes a job array and stops
    python -m launch.sweep ... --table_only                              # table and plot of what has finished

The same command again goes on: finished runs are skipped, an interrupted one resumes from its checkpoint.

Ctrl-C or SIGTERM ends the sweep with exit code 130 or 143: the run under way gets one SIGTERM, so that it saves, and is
killed where it has not ended after --grace_s. So is a run that is longer under way than --run_timeout_s. A second
Ctrl-C kills it at once. A sweep that is killed itself takes its run with it.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from jaxagent.config import ConfigError, nearest
from jaxagent.config.command import exit_code, number, seconds
from jaxagent.config.errors import Stopped, ending_signals
from jaxagent.config.ranges import at_least
from jaxagent.fleet.child import Child, Program
from jaxagent.io import files
from jaxagent.launch import grid, processes, table
from jaxagent.observe.files import LOCK_FILE, REPORT_FILE, SUMMARY_FILE

_ARRAY = """#!/bin/bash
#SBATCH --job-name=sweep
#SBATCH --array=0-{last}
#SBATCH --output={output}
#SBATCH --signal=B:TERM@120
{options}
# One line of commands.txt per array task. SIGTERM comes 120 s before the limit: the run, which takes the place of the
# batch shell (B:), saves and exits.
command=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {commands})
exec bash -c "exec ${{command:?is not in commands.txt}}"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all runs finished (or the array was written), 1 some failed, 2 a user's mistake.

    130 and 143: Ctrl-C or SIGTERM has ended it.
    """
    return exit_code(lambda: sweep(*arguments(argv)))


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The sweep's own flags, and the overrides that hold for all of its runs.

    Raises:
      ConfigError: a flag that is neither.
    """
    parser = processes.parser("sweep", __doc__)
    parser.add_argument("--config", required=True, help="FILE[:PRESET]")
    parser.add_argument("--grid", action="append", default=[], metavar="FIELD=V,V", help="once per axis")
    parser.add_argument("--seeds", type=_seeds, default=[0], help="comma-separated")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="one folder per run is made in it")
    parser.add_argument("--share", default="", metavar="STAGE", help="do the stages up to this one once for all")
    parser.add_argument("--run_timeout_s", type=seconds, default=24 * 3600.0, help="deadline of one run")
    parser.add_argument("--grace_s", type=seconds, default=120.0, help="for a run that is asked to end, to save")
    parser.add_argument("--slurm", default=None, metavar="OPTIONS", help="write a job array with these sbatch options")
    parser.add_argument("--table_only", action="store_true")
    args, fixed = parser.parse_known_args(argv)
    for arg in fixed:
        if not arg.startswith("--config.") or "=" not in arg:
            raise ConfigError(f"Unknown flag '{arg}'. {nearest(arg.partition('=')[0].lstrip('-'), vars(args))}")
    if args.share and args.slurm is not None:
        raise ConfigError("--share copies what an earlier run left: it cannot go with --slurm.")
    return args, fixed


def _seeds(text: str) -> list[int]:
    return [number(int, at_least(0))(seed) for seed in text.split(",")]


def sweep(args: argparse.Namespace, fixed: Sequence[str]) -> int:
    """Does what the command line says; returns the exit code."""
    runs = grid.runs(args.config, args.grid, args.seeds, args.workdir, args.share, fixed)
    args.workdir.mkdir(parents=True, exist_ok=True)
    if args.slurm is not None:
        print(f"Submit with: sbatch {write_array(runs, args.workdir, shlex.split(args.slurm))}")
        return 0
    failed = []
    if not args.table_only:
        with open(args.workdir / LOCK_FILE, "ab") as alone, Ending() as ending:
            files.lock(alone.fileno(), args.workdir)
            failed = [run for run in runs if not execute(run, args.run_timeout_s, args.grace_s, ending)]
    print(table.write(runs, args.workdir))
    for run in failed:
        print(f"failed: {run.workdir} (see log.txt in it)", file=sys.stderr)
    return 1 if failed else 0


class Ending:
    """Ctrl-C and SIGTERM while it is open, in the main thread; elsewhere it hears nothing.

    Attributes:
      asked: the signal that asked for the end of the run under way; None = none has.
      running: whether a run is under way, which may save before the sweep ends.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.running = False

    def __enter__(self) -> Ending:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._on_signal) for signum in ending_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        signum = signal.Signals(number)
        if not self.running:
            raise Stopped(signum, " between two runs: the same command continues.")
        if self.asked and signum == signal.SIGINT:
            raise Stopped(signum, " again: the run was killed; the same command continues from its last checkpoint.")
        self.asked = self.asked or signum


def execute(run: grid.Run, timeout_s: float, grace_s: float, ending: Ending) -> bool:
    """Runs one point to its end, unless it is finished already; True when it has a summary.

    Args:
      run: the point.
      timeout_s: after which the run is asked to end.
      grace_s: for which it may save then, until it is killed.
      ending: hears what asks for the end of the sweep.

    Raises:
      Stopped: that was asked for, and the run has ended.
    """
    if run.summary is not None:
        print(f"{run.workdir}: finished already", flush=True)
        return True
    if run.base is not None and not run.workdir.exists():
        if not execute(run.base, timeout_s, grace_s, ending):
            print(f"{run.workdir}: cannot start, {run.base.workdir} failed", flush=True)
            return False
        take_over(run.base.workdir, run.workdir)
    run.workdir.mkdir(parents=True, exist_ok=True)
    print(f"{run.workdir}: running", flush=True)
    ending.running = True
    try:
        # In a session of its own, which Ctrl-C at a terminal does not reach: a run that hears it twice saves nothing.
        child = Child(Program("run", run.command, watched=False, log=run.workdir / "log.txt"), run.workdir, {}, 0.0)
        try:
            told = _watch(child, timeout_s, grace_s, ending)
        finally:
            child.kill()  # what it started, and itself where it has not ended
            child.close()
    finally:
        ending.running = False
    if told:
        print(f"{run.workdir}: {told}", flush=True)
    if ending.asked:
        raise Stopped(ending.asked, ": the same command continues.")
    return run.summary is not None


def _watch(child: Child, timeout_s: float, grace_s: float, ending: Ending) -> str:
    """Waits for a run's end, and asks for it once where it must be; what is to be told of that, "" where nothing is."""
    why, until = "", time.monotonic() + timeout_s
    while (code := child.exit_code()) is None:
        time.sleep(0.1)
        late = time.monotonic() > until
        if why and late:
            return f"{why}, and killed after {grace_s:g} s"
        if not why and (ending.asked or late):
            why, until = (
                "asked to end" if ending.asked else f"stopped after {timeout_s:g} s",
                time.monotonic() + grace_s,
            )
            print(f"asked to save and end within {grace_s:g} s; Ctrl-C kills it at once", file=sys.stderr, flush=True)
            child.send(signal.SIGTERM)
            child.send(signal.SIGCONT)  # somebody may have stopped it
    return why and f"{why}, ended with {code if code >= 0 else 128 - code}"


def take_over(base: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies a finished run's bundles, logs and compiled programs, but not what says that it is finished."""
    copying = folder.with_name(folder.name + ".copying")
    shutil.rmtree(copying, ignore_errors=True)
    ended = shutil.ignore_patterns(SUMMARY_FILE, REPORT_FILE, "policy", "log.txt")
    shutil.copytree(base, copying, ignore=ended)
    copying.rename(folder)  # whole or not at all


def write_array(runs: Sequence[grid.Run], workdir: pathlib.Path, options: Sequence[str]) -> pathlib.Path:
    """Writes commands.txt and array.sbatch; returns the latter's path."""
    (workdir / "commands.txt").write_text("".join(shlex.join(run.command) + "\n" for run in runs), encoding="utf-8")
    script = workdir / "array.sbatch"
    lines = "\n".join(f"#SBATCH {option}" for option in options)
    place = workdir.resolve()
    output, commands = (shlex.quote(str(place / name)) for name in ("slurm-%A_%a.log", "commands.txt"))
    script.write_text(
        _ARRAY.format(last=len(runs) - 1, output=output, commands=commands, options=lines), encoding="utf-8"
    )
    return script


if __name__ == "__main__":
    sys.exit(main())
