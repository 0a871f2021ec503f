"""What `benchmarks.async` computes from what processes have left: speed-ups, recovery, and the model beside them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import async_processes as processes
from benchmarks.async_processes import Setup
from benchmarks.async_simulation import Costs, Layout, simulate
from jaxagent.fleet import vitals

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOOK_S = 0.02
FIRST = 5  # steps in which connections are made
TOKEN_S = 1e-6  # in the model, whose engines must decode something


@dataclasses.dataclass(frozen=True)
class Run:
    """Of a whole run, without the start of its processes."""

    wall_s: float
    step_s: float  # mean of the steps that the model counts, too: without the last `staleness`
    ages: dict[int, int]  # episodes by staleness, of these steps
    trainer_waits: float  # share of their time in which the trainer has no batch


def measured(marks: Sequence[Mapping[str, Any]], setup: Setup) -> Run:
    """From the trainer's marks of an undisturbed run."""
    at = {row["number"]: row["at"] for row in marks if row["what"] == processes.PUBLISHED}
    counted = setup.steps - setup.staleness
    ages, waited = Counter[int](), 0.0
    for row in marks:
        if row["what"] == processes.TRAINS and row["number"] < counted:
            ages.update({int(age): count for age, count in row["ages"].items()})
            waited += row["at"] - at[row["number"]]
    seconds = at[counted] - at[0]
    return Run(at[setup.steps] - at[0], seconds / counted, dict(sorted(ages.items())), waited / seconds)


def between(marks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds from version to version, without the first ones."""
    at = [row["at"] for row in marks if row["what"] == processes.PUBLISHED]
    steps = [1e3 * (after - before) for before, after in itertools.pairwise(at)][FIRST:]
    return {"median": round(statistics.median(steps), 1), "least": round(min(steps), 1)}


def modelled(setup: Setup) -> Run:
    """The same run in virtual time (`async_simulation.py`): the same waits, and processes that cost nothing."""
    turns = setup.turns * setup.groups * setup.attempts  # of a step, each of one token
    costs = Costs(decode_s=TOKEN_S, sequence_s=0.0, prefill_device_s=0.0, update_device_s=setup.train_s / turns)
    report = simulate(
        setup.plan,
        Layout(setup.engines, 1),
        costs,
        lambda which: [(1.0, seconds) for seconds in setup.waits(which)],
        uncounted=0,
    )
    return Run(0.0, report.step_s, report.ages, report.trainer_waits)


def off(model: Run, real: Run) -> dict[str, float]:
    """How far the model is off.

      step_percent     its step time, of the measured one
      ages_percent     which share of the episodes has another staleness there
      waits_points     its share of the time in which the trainer waits, less the measured share, in percentage points
    """  # fmt: skip
    total = sum(real.ages.values())
    moved = sum(abs(model.ages.get(age, 0) - real.ages.get(age, 0)) for age in {*model.ages, *real.ages}) / 2
    return {
        "step_percent": round(100 * (model.step_s / real.step_s - 1), 1),
        "ages_percent": round(100 * moved / total, 1),
        "waits_points": round(100 * (model.trainer_waits - real.trainer_waits), 1),
    }


# -------------------------------------------------------------------- processes


@contextlib.contextmanager
def started(command: Sequence[str], log: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process group of its own, which does not outlive the block."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT)
    with open(log, "ab") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait(20)


def sleeping(folder: pathlib.Path, setup: Setup) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """A fleet of async_processes.py."""
    folder.mkdir(parents=True)
    (folder / processes.SETUP).write_text(json.dumps(dataclasses.asdict(setup)), encoding="utf-8")
    return started(processes.program("fleet", folder), folder / "console.log")


def run(folder: pathlib.Path, setup: Setup, limit_s: float) -> Run:
    """A whole undisturbed run."""
    with sleeping(folder, setup) as fleet:
        ended(fleet, folder / "console.log", limit_s)
    return measured(processes.marks(folder), setup)


def ended(process: subprocess.Popen[bytes], log: pathlib.Path, limit_s: float) -> None:
    """Waits for a good end."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = -1
    if code:
        raise SystemExit(
            f"the run did not end well within {limit_s:.0f} s ({code}): {log.read_text(encoding='utf-8')[-3000:]}"
        )


# -------------------------------------------------------------------- recovery


def recovery(folder: pathlib.Path, engine: str, limit_s: float) -> dict[str, float]:
    """Kills coordinator, engine and trainer of a run that goes on in `folder`; seconds until each works again.

      coordinator           until the first result of an episode is on its disk again; the engines' pauses included
      coordinator_answers   until it answers calls
      engine                until it plays episodes again
      requeue               until the coordinator has given back what the engine played
      trainer               until it trains again: the step that it was in, or the next one
    """  # fmt: skip
    found: dict[str, float] = {}
    seconds = _Watched(folder, limit_s)
    epoch = seconds.status()["epoch"]
    seconds.kill("coordinator")
    found["coordinator_answers"] = seconds.until(lambda: seconds.status()["epoch"] > epoch)
    found["coordinator"] = seconds.until(lambda: seconds.status()["calls"].get("put", 0) > 0)
    seconds.until(lambda: len(seconds.members(engine)) == 1 and seconds.plays(engine))
    (before,) = seconds.members(engine)
    seconds.kill(engine)
    found["requeue"] = seconds.until(lambda: before not in seconds.members(engine))
    found["engine"] = seconds.until(lambda: before not in seconds.members(engine) and seconds.plays(engine))
    seconds.until(lambda: seconds.sign("trainer").phase.startswith(processes.TRAINS))
    old = seconds.sign("trainer").pid
    seconds.kill("trainer")

    def trains() -> bool:
        sign = seconds.sign("trainer")
        return sign.pid != old and sign.phase.startswith(processes.TRAINS)

    found["trainer"] = seconds.until(trains)
    return {name: round(value, 2) for name, value in found.items()}


class _Watched:
    """A fleet's folder, and a clock that starts with each kill."""

    def __init__(self, folder: pathlib.Path, limit_s: float):
        self._folder, self._limit_s = folder, limit_s
        self._begun = time.monotonic()

    def status(self) -> dict[str, Any]:
        return processes.client_of(self._folder, patience_s=self._limit_s).status()

    def members(self, engine: str) -> dict[str, Any]:
        found = self.status()["members"]["engine"]
        return {name: row for name, row in found.items() if row["process"] == engine}

    def plays(self, engine: str) -> bool:
        return any(row["playing"] for row in self.members(engine).values())

    def sign(self, name: str) -> vitals.Sign:
        found = vitals.read(self._folder / vitals.FOLDER / f"{name}.json")
        return found or vitals.Sign(0, "", 0.0, 0.0, 0)

    def kill(self, name: str) -> None:
        pid = self.sign(name).pid
        self._begun = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    def until(self, what: Callable[[], bool]) -> float:
        """Seconds since the kill."""
        begun = time.monotonic()
        while not what():
            if time.monotonic() - begun > self._limit_s:
                raise SystemExit(f"nothing came for {self._limit_s:.0f} s; see {self._folder}/logs")
            time.sleep(LOOK_S)
        return time.monotonic() - self._begun


def wait_for(what: Callable[[], bool], process: subprocess.Popen[bytes], log: pathlib.Path, limit_s: float) -> None:
    """Until a run has come so far."""
    until = time.monotonic() + limit_s
    while not what():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"the run did not come so far: {log.read_text(encoding='utf-8')[-3000:]}")
        time.sleep(0.1)


def python(*arguments: str) -> list[str]:
    """A command of this Python."""
    return [sys.executable, *arguments]
