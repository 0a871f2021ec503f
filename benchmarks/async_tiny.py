"""A tiny real run for `benchmarks.async`: the search recipe with one layer, in one process and in several, with an
environment that answers at once and with a slow one."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence

from benchmarks import async_figures as figures
from jaxagent.fleet import settings, vitals
from jaxagent.observe import jsonl
from tests import tiny_run

STEPS = {"": 30, "slow": 17}  # of the runs whose environment answers at once, and of those where it does not
WARM_UP = 5  # steps that compile
LIMIT_S = 1200.0
FLAGS = (
    "--config.warm_start.max_steps=2", "--config.eval.every=0", "--config.checkpoint.every=10",
    "--config.rl.staleness=0", "--config.rl.entropy_coefficient=0.1", "--config.rl.optimizer.warmup_steps=0",
)  # fmt: skip
FLEET = ("--config.fleet=on", "--config.fleet.engines=1")
# Every episode begins three seconds late: less than episodes of three turns that take a second each.
SLOW = (
    "--config.env=tests.fleet.slow_search:SlowSearch", "--config.env.prompt=plain",
    "--config.env.episode_timeout_s=60", "--config.env.wait_s=3", "--config.env.turn_s=0",
)  # fmt: skip


def command(workdir: pathlib.Path, *extra: str) -> list[str]:
    """Of a run."""
    return figures.python("-m", "jaxagent.main", *tiny_run.argv(workdir, *FLAGS, *extra)[1:])


def compare(folder: pathlib.Path, kind: str = "", repetitions: int = 2) -> dict[str, object]:
    """Prints and returns what a step costs more as several processes. Both layouts by turns.

    Args:
      folder: for the workdirs.
      kind: "slow": with an environment that waits (`SLOW`); "": with one that does not.
      repetitions: of each layout.
    """
    seconds: dict[str, list[dict[str, float]]] = {"one": [], "fleet": []}
    for repetition in range(repetitions):
        for name, extra in (("one", ()), ("fleet", FLEET)):
            workdir = folder / f"tiny-{kind}{name}-{repetition}"
            log = folder / f"{workdir.name}.log"
            flags = (f"--config.rl.steps={STEPS[kind]}", *extra, *(SLOW if kind else ()))
            with figures.started(command(workdir, *flags), log) as process:
                figures.ended(process, log, LIMIT_S)
            seconds[name] += timed(list(jsonl.read(workdir / "metrics.jsonl")))
    one, fleet = (medians(rows) for rows in seconds.values())
    print(f"{kind} one process   {told(one)}\n{kind} over HTTP     {told(fleet)}", flush=True)
    ratio = fleet["time/step_s"] / one["time/step_s"]
    return {"ratio": round(ratio, 3), "step_s": {"one": one, "fleet": fleet}}


def timed(records: Sequence[dict[str, object]]) -> list[dict[str, float]]:
    """The times of RL's steps after the warm-up."""
    rows = [row for row in records if "time/rollout_s" in row and "time/step_s" in row][WARM_UP:]
    return [
        {name: value for name, value in row.items() if name.startswith("time/") and isinstance(value, float)}
        for row in rows
    ]


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each time."""
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


def told(times: dict[str, float]) -> str:
    """A line."""
    return "  ".join(f"{name.removeprefix('time/')} {value:.3f}" for name, value in times.items())


def recovery(workdir: pathlib.Path) -> dict[str, float]:
    """Kills in a run of this size; programs are compiled and lie in the cache of programs where one is set."""
    folder, log = workdir / settings.FOLDER, workdir.with_suffix(".log")
    flags = ("--config.rl.steps=1000", "--config.rl.staleness=1", *FLEET[:1], "--config.fleet.engines=2")

    def done() -> int:
        sign = vitals.read(folder / vitals.FOLDER / "trainer.json")
        return -1 if sign is None else sign.done

    with figures.started(command(workdir, *flags), log) as process:
        figures.wait_for(lambda: done() >= 3, process, log, LIMIT_S)
        return figures.recovery(folder, "engine-0", LIMIT_S)
