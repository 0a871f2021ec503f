"""A run whose work is waiting: the real coordinator, engine loop, client and supervisor, around sleeps. No JAX.

    python -m benchmarks.async_processes fleet|coordinator|trainer|engine FOLDER [NAME]

`fleet` is the supervisor, which starts the others. An episode is its turns' waits, drawn from its id alone; an update
is a sleep; weights are a chain of digests of what was trained. FOLDER/setup.json has the `Setup`, FOLDER/marks.jsonl
gets what the trainer did and when, by the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
import threading
import time
import zlib
from typing import Any

import numpy as np

from jaxagent.config.errors import ConfigError
from jaxagent.data.codec import Packed
from jaxagent.fleet import local, settings
from jaxagent.fleet.admission import Batch
from jaxagent.fleet.child import VITALS, Program
from jaxagent.fleet.client import Client
from jaxagent.fleet.neighbours import Done
from jaxagent.fleet.plan import EpisodeId, Plan, Rule
from jaxagent.fleet.supervise import Gang, Supervisor
from jaxagent.fleet.vitals import Vitals
from jaxagent.fleet.wire import Job, TaskRef
from jaxagent.fleet.worker import EngineWorker
from jaxagent.io import files

TOKEN = "a token of the benchmark"
SETUP, MARKS, SAVED = "setup.json", "marks.jsonl", "saved.json"
BUDGET_S = 600.0  # of every phase: nothing here counts as a hang
PATIENCE_S = 60.0
PUBLISHED, TRAINS = "published", "trains"  # marks


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run. Seconds are those of the machine: nothing is scaled."""

    steps: int = 12
    groups: int = 8
    attempts: int = 4
    staleness: int = 0
    rule: Rule = "pinned"
    engines: int = 6
    turns: int = 3
    wait_s: float = 1.0  # of a turn's environment: the median
    wait_sigma: float = 1.0  # of its logarithm
    train_s: float = 2.0  # an update
    seed: int = 0

    @property
    def plan(self) -> Plan:
        """The rules."""
        return Plan(self.steps, self.groups, self.attempts, staleness=self.staleness, rule=self.rule)

    @property
    def places(self) -> int:
        """Of an engine: a whole step has room in one, so that nobody waits for a place, whatever the rule."""
        return self.groups * self.attempts

    def waits(self, which: EpisodeId) -> list[float]:
        """Of an episode's turns: a function of its id, so that all runs have equal work."""
        drawn = np.random.Generator(np.random.PCG64([self.seed, *which.group, which.sample]))
        return drawn.lognormal(np.log(self.wait_s), self.wait_sigma, self.turns).tolist()


def program(role: str, folder: pathlib.Path, name: str = "") -> tuple[str, ...]:
    """The command of a process."""
    return (sys.executable, "-m", "benchmarks.async_processes", role, str(folder), name or role)


def supervise(folder: pathlib.Path, setup: Setup) -> int:
    """Starts everything, and starts again what dies."""
    address = folder / local.ADDRESS_FILE

    def coordinator(start: int) -> list[Program]:
        listen = (
            json.loads(address.read_text(encoding="utf-8"))["url"].removeprefix("http://") if start else "127.0.0.1:0"
        )
        return [Program("coordinator", (*program("coordinator", folder), listen))]

    def gone(name: str) -> None:
        if name.startswith("engine") and address.exists():
            _leave(client_of(folder, patience_s=1.0), name)

    def engine(number: int) -> list[Program]:
        return [Program(f"engine-{number}", program("engine", folder, f"engine-{number}"))]

    gangs = [
        Gang("coordinator", coordinator, needed=True),
        Gang("trainer", lambda start: [Program("trainer", program("trainer", folder))], True, ready=address.exists),
        *(Gang(f"engine-{i}", lambda start, i=i: engine(i), ready=address.exists) for i in range(setup.engines)),
    ]
    return Supervisor(gangs, folder, {}, restarts=1000, start_s=BUDGET_S, on_end=gone).run()


def _leave(client: Client, process: str) -> None:
    """As `fleet.local` does it: its episodes wait again at once."""
    try:
        for member, row in client.status()["members"]["engine"].items():
            if row["process"] == process:
                client.leave(member)
    except (OSError, RuntimeError):  # the coordinator is away: then the lease runs out
        pass


def client_of(folder: pathlib.Path, patience_s: float = PATIENCE_S) -> Client:
    """Of the coordinator that writes there, with its token."""
    url = json.loads((folder / local.ADDRESS_FILE).read_text(encoding="utf-8"))["url"]
    secret = folder / settings.TOKEN_FILE
    return Client(url, secret.read_text(encoding="utf-8").strip() if secret.exists() else TOKEN, patience_s)


# -------------------------------------------------------------------- an engine


class Sleeper:
    """A player (fleet/neighbours.py) whose episodes only wait."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._version = -1
        self._ended = 0
        self._loop = asyncio.new_event_loop()
        self._playing: dict[str, asyncio.Task[None]] = {}
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def hold(self, version: int) -> None:
        """There are no weights."""
        self._version = version

    def expect(self, version: int) -> None:
        """See `Player`."""

    def play(self, job: Job, done: Done) -> None:
        """See `Player`."""
        self._loop.call_soon_threadsafe(self._begin, job, self._version, done)

    def cancel(self, lease: str) -> None:
        """See `Player`."""

        def on_the_loop() -> None:
            if lease in self._playing:
                self._playing[lease].cancel()

        self._loop.call_soon_threadsafe(on_the_loop)

    def places(self) -> int:
        """See `Player`."""
        return self._setup.places

    def numbers(self) -> dict[str, Any]:
        """See `Player`."""
        return {"progress": float(self._ended)}

    def _begin(self, job: Job, version: int, done: Done) -> None:
        lease, which = job.work.lease, job.work.episode

        def over(task: asyncio.Task[None]) -> None:
            self._ended += 1
            del self._playing[lease]
            done(None if task.cancelled() else packed(which, version), version)

        task = self._playing[lease] = self._loop.create_task(self._wait(which))
        task.add_done_callback(over)

    async def _wait(self, which: EpisodeId) -> None:
        for seconds in self._setup.waits(which):
            await asyncio.sleep(seconds)


def packed(which: EpisodeId, version: int) -> Packed:
    """Bytes with an episode's form."""
    of = {"task": {"id": f"t{which.group.number}"}, "sample": which.sample, "group": which.group, "version": version}
    first = json.dumps(of).encode()
    return Packed(hashlib.sha256(first).hexdigest(), zlib.compress(first + b"\n{}", 1))


def play(folder: pathlib.Path, setup: Setup, name: str) -> None:
    """An engine's process."""
    signs = signs_of()
    signs.phase("starts", BUDGET_S)
    facts = {"process": name, "host": "127.0.0.1"}
    EngineWorker(client_of(folder), Sleeper(setup), facts, setup.rule, BUDGET_S, signs).run()


# -------------------------------------------------------------------- the trainer


def train(folder: pathlib.Path, setup: Setup) -> None:
    """The trainer's process: from what is saved to the end."""
    signs, client, plan = signs_of(), client_of(folder), setup.plan
    signs.phase("starts", BUDGET_S)
    client.join("trainer", {"process": "trainer", "host": "127.0.0.1"})
    saved = (
        json.loads((folder / SAVED).read_text(encoding="utf-8"))
        if (folder / SAVED).exists()
        else {"version": 0, "digest": ""}
    )
    if not saved["version"]:
        _wait_for_engines(client, setup.engines)
    version, digest = saved["version"], saved["digest"]
    client.publish(version, digest, "benchmark", tasks_of(plan, version))
    _mark(folder, PUBLISHED, version)
    for step in range(version, setup.steps):
        signs.phase(f"waits for step {step}", BUDGET_S, done=step)
        while (batch := client.batch(step, 10.0)) is None:
            signs.tick()
        signs.phase(f"trains step {step}", BUDGET_S, done=step)
        _mark(folder, TRAINS, step, batch)
        time.sleep(setup.train_s)
        digest = hashlib.sha256((digest + repr([r.digest for r in batch.results.values()])).encode()).hexdigest()
        client.publish(step + 1, digest, "benchmark", tasks_of(plan, step + 1))
        _mark(folder, PUBLISHED, step + 1)
        files.replace(folder / SAVED, json.dumps({"version": step + 1, "digest": digest}))
        client.keep(step + 1)
    client.end("all steps are trained")


def tasks_of(plan: Plan, version: int) -> dict[int, list[list[TaskRef]]]:
    """Of the steps that a version admits."""
    first = 0 if version == 0 else plan.admitted(version - 1)
    one_round = [TaskRef(k, f"t{k}") for k in range(plan.groups_per_step)]
    return {step: [one_round] for step in range(first, plan.admitted(version))}


def _wait_for_engines(client: Client, count: int) -> None:
    """The start of processes is not measured."""
    until = time.monotonic() + PATIENCE_S
    while len(client.status()["members"]["engine"]) < count:
        if time.monotonic() > until:
            raise SystemExit(f"{count} engines did not join within {PATIENCE_S:.0f} s")
        time.sleep(0.05)


def _mark(folder: pathlib.Path, what: str, number: int, batch: Batch | None = None) -> None:
    row = {"what": what, "number": number, "at": time.monotonic(), "pid": os.getpid()}
    row["ages"] = {} if batch is None else {str(age): count for age, count in batch.ages.items()}
    with open(folder / MARKS, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def marks(folder: pathlib.Path) -> list[dict[str, Any]]:
    """What the trainer did. A line that is not whole is left out."""
    path = folder / MARKS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


# -------------------------------------------------------------------- every process


def signs_of() -> Vitals:
    """Where the supervisor looks."""
    return Vitals(pathlib.Path(os.environ[VITALS]) if VITALS in os.environ else None)


def main() -> None:
    """One process."""
    role, folder, name, *more = sys.argv[1:]
    path = pathlib.Path(folder)
    setup = Setup(**json.loads((path / SETUP).read_text(encoding="utf-8")))
    if role == "coordinator":
        from jaxagent.fleet import server  # late: the other processes need no web server

        signs = signs_of()
        signs.phase("serves", BUDGET_S)
        server.run(path, setup.plan, TOKEN, more[0], alive=signs.tick)
    elif role == "fleet":
        raise SystemExit(supervise(path, setup))
    else:
        {"trainer": train, "engine": functools.partial(play, name=name)}[role](path, setup)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
