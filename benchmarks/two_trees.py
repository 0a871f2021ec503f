"""Compares this checkout with another one: the step time of runs by turns, and their metrics bit for bit.

    git worktree add ../before 6b60016
    python -m benchmarks.two_trees --other=../before --policy=runs/search_r1/policy    # ten runs, ten minutes

Both run `configs/search_r1.py`, stage RL alone, from the same exported policy (`--config.stages=('warm_start',)` makes
one). The last line is JSON. `this_s`, `other_s`: seconds of a step, the median of a run without its first step, the
mean over runs; `ratio`: of the two; `least_ratio`: of the means of each step's fastest run. `differs`: metrics with
other values in the two trees and one value in all runs of each, so that neither clocks nor the order of arrival are
the reason, and those that only one of the trees has.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

HERE = pathlib.Path(__file__).resolve().parents[1]
RUN_S = 1_200.0  # longest run
Rows = list[dict[str, float]]  # of a run: one row of metrics per step


def play(tree: pathlib.Path, policy: pathlib.Path, steps: int, flags: Sequence[str]) -> Rows:
    """One run of a checkout, in a process of its own.

    Raises:
      SystemExit: it failed; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        command = [sys.executable, "-m", "jaxagent.main", "--config=configs/search_r1.py"]
        command += ["--config.stages=('rl',)", f"--config.model.path={policy}", f"--config.workdir={workdir}"]
        command += [f"--config.rl.steps={steps}", f"--config.eval.every={steps + 1}", *flags]
        done = subprocess.run(
            command,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=RUN_S,
        )
        if done.returncode:
            raise SystemExit(f"The run of {tree} ended with {done.returncode}:\n{done.stdout[-2000:]}")
        with (workdir / "metrics.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]


def compare(this: Sequence[Rows], other: Sequence[Rows]) -> dict[str, object]:
    """What the last line says, of runs of the two trees."""
    mine, others = _times(this), _times(other)
    medians = [[statistics.median(run) for run in side] for side in (mine, others)]
    this_s, other_s = map(statistics.mean, medians)
    return {
        "this_s": this_s,
        "other_s": other_s,
        "ratio": this_s / other_s,
        "least_ratio": _least(mine) / _least(others),
        "runs": medians,
        "differs": differing(this, other),
    }


def differing(this: Sequence[Rows], other: Sequence[Rows]) -> list[str]:
    """The metrics that differ between the trees and not between a tree's runs; those that one tree alone has, too."""
    found = set()
    for step in range(min(map(len, (*this, *other)))):
        mine, others = ([run[step] for run in side] for side in (this, other))
        for name in {name for row in (*mine, *others) for name in row}:
            a, b = ({json.dumps(row[name]) for row in side if name in row} for side in (mine, others))
            in_all = [all(name in row for row in side) for side in (mine, others) if any(name in row for row in side)]
            if all(in_all) and (len(in_all) == 1 or (len(a) == len(b) == 1 and a != b)):
                found.add(name)
    return sorted(found)


def _times(runs: Sequence[Rows]) -> list[list[float]]:
    """Seconds of each step of each run, without the first step and those that evaluate."""
    return [[row["time/step_s"] for row in run if "time/step_s" in row][1:] for run in runs]


def _least(runs: Sequence[Sequence[float]]) -> float:
    return statistics.mean(min(step) for step in zip(*runs, strict=True))


def main() -> None:
    """Prints a line per run, and a last line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=pathlib.Path, required=True, help="the other checkout")
    parser.add_argument("--policy", type=pathlib.Path, required=True, help="an exported policy, which both begin with")
    parser.add_argument("--runs", type=int, default=5, help="of each checkout; 2 at least, to know what differs")
    parser.add_argument("--steps", type=int, default=10)
    args, flags = parser.parse_known_args()
    policy, trees = args.policy.resolve(), {"other": args.other.resolve(), "this": HERE}
    if args.runs < 2 or args.steps < 4:
        parser.error("--runs must be 2 at least, and --steps 4")
    for wanted in (policy / "config.json", trees["other"] / "jaxagent" / "main.py"):
        if not wanted.is_file():
            parser.error(f"there is no file {wanted}")
    rows: dict[str, list[Rows]] = {name: [] for name in trees}
    for run in range(args.runs):
        for name, tree in trees.items():
            rows[name].append(play(tree, policy, args.steps, flags))
            seconds = statistics.median(_times(rows[name][-1:])[0])
            print(f"run {run + 1}/{args.runs}, {name}: {seconds:.3f} s a step", flush=True)
    print(json.dumps(compare(rows["this"], rows["other"])))


if __name__ == "__main__":
    main()
