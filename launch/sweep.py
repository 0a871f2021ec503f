"""Runs a grid over config fields, one run after another or as a Slurm array, and ends in a table and a plot.

    python -m launch.sweep --config=configs/search_r1.py --grid rl.objective.clip_high=0.2,0.28 --workdir=runs/s
    python -m launch.sweep --config=configs/search_r1.py --grid preset=laptop,laptop+gspo --seeds=0,1 --workdir=runs/s
    python -m launch.sweep ... --config.rl.steps=20   # the same in all runs
    python -m launch.sweep ... --share=warm_start     # runs that differ only after the warm start share one per seed
    python -m launch.sweep ... --slurm="--gres=gpu:4 --time=8:00:00"     # writes a job array and stops
    python -m launch.sweep ... --table_only                              # table and plot of what has finished

The same command again goes on: finished runs are skipped, an interrupted one resumes from its checkpoint.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from jaxagent.config import ConfigError, nearest
from jaxagent.config.command import Parser, exit_code, number, seconds
from jaxagent.config.ranges import at_least
from jaxagent.io import files
from jaxagent.launch import grid, table
from jaxagent.observe.files import LOCK_FILE, REPORT_FILE, SUMMARY_FILE

_ARRAY = """#!/bin/bash
#SBATCH --job-name=sweep
#SBATCH --array=0-{last}
#SBATCH --output={workdir}/slurm-%A_%a.log
#SBATCH --signal=TERM@120
{options}
# One line of commands.txt per array task. SIGTERM comes 120 s before the limit: the run saves and exits.
exec bash -c "exec $(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {workdir}/commands.txt)"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all runs finished (or the array was written), 1 some failed, 2 a user's mistake."""
    return exit_code(lambda: sweep(*arguments(argv)))


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The sweep's own flags, and the overrides that hold for all of its runs.

    Raises:
      ConfigError: a flag that is neither.
    """
    parser = Parser(
        prog="python -m launch.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="FILE[:PRESET]")
    parser.add_argument("--grid", action="append", default=[], metavar="FIELD=V,V", help="once per axis")
    parser.add_argument("--seeds", type=_seeds, default=[0], help="comma-separated")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="one folder per run is made in it")
    parser.add_argument("--share", default="", metavar="STAGE", help="do the stages up to this one once for all")
    parser.add_argument("--run_timeout_s", type=seconds, default=24 * 3600.0, help="deadline of one run")
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
        with open(args.workdir / LOCK_FILE, "ab") as alone:
            files.lock(alone.fileno(), args.workdir)
            failed = [run for run in runs if not execute(run, args.run_timeout_s)]
    print(table.write(runs, args.workdir))
    for run in failed:
        print(f"failed: {run.workdir} (see log.txt in it)", file=sys.stderr)
    return 1 if failed else 0


def execute(run: grid.Run, timeout_s: float) -> bool:
    """Runs one point to its end, unless it is finished already; True when it has a summary."""
    if run.summary is not None:
        print(f"{run.workdir}: finished already", flush=True)
        return True
    if run.base is not None and not run.workdir.exists():
        if not execute(run.base, timeout_s):
            print(f"{run.workdir}: cannot start, {run.base.workdir} failed", flush=True)
            return False
        take_over(run.base.workdir, run.workdir)
    run.workdir.mkdir(parents=True, exist_ok=True)
    print(f"{run.workdir}: running", flush=True)
    with open(run.workdir / "log.txt", "ab") as log:
        try:
            subprocess.run(run.command, stdout=log, stderr=subprocess.STDOUT, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            print(f"{run.workdir}: stopped after {timeout_s:.0f} s", flush=True)
    return run.summary is not None


def take_over(base: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies a finished run's bundles, logs and compiled programs, but not what says that it is finished."""
    copying = folder.with_name(folder.name + ".copying")
    shutil.rmtree(copying, ignore_errors=True)
    ended = shutil.ignore_patterns(SUMMARY_FILE, REPORT_FILE, "policy", "log.txt")
    shutil.copytree(base, copying, ignore=ended)
    copying.rename(folder)  # whole or not at all


def write_array(runs: Sequence[grid.Run], workdir: pathlib.Path, options: Sequence[str]) -> pathlib.Path:
    """Writes commands.txt and array.sbatch; returns the latter's path."""
    (workdir / "commands.txt").write_text("".join(shlex.join(run.command) + "\n" for run in runs))
    script = workdir / "array.sbatch"
    lines = "\n".join(f"#SBATCH {option}" for option in options)
    script.write_text(_ARRAY.format(last=len(runs) - 1, workdir=workdir.resolve(), options=lines))
    return script


if __name__ == "__main__":
    sys.exit(main())
