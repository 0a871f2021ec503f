"""Kills and stops the processes of a real fleet again and again, and compares what comes out with a plain loop.

    python -m benchmarks.fleet_soak                          # 200 kill -9, 20 SIGSTOPs
    python -m benchmarks.fleet_soak --kills=20 --stops=2     # a look

The command, the supervisor, the coordinator, its calls, ledger and files, and the loop of engine processes are the real
ones; what plays sleeps, and what trains makes digests (benchmarks/fleet_soak_process.py). No JAX. Two engines become
four after a third of the disturbances, and one after two thirds. The last line is JSON. Exit code 1: something was
lost, doubled or came out differently.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from benchmarks import fleet_soak_process as process
from jaxagent.fleet import manifest, restarts, settings, supervise, vitals, weights
from jaxagent.fleet.book import Book
from jaxagent.fleet.child import LOGS
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from jaxagent.fleet.server import ADDRESS, LEDGER

ROOT = pathlib.Path(__file__).resolve().parents[1]
GROUPS, ATTEMPTS, STALENESS = 4, 4, 1
HANG_S, LEASE_S = 30.0, 4.0
RECOVERS_S = 60.0  # longest wait for one recovery, under load
BEGINS_S = 5.0  # for a victim to begin its work, before another one is drawn
WAKES_S = 10.0  # a stopped process that runs again for so long has been woken
HANGS_S = 90.0  # longest wait for a stopped process to be found
LOOK_S = 0.03
BETWEEN_S = 1.0  # longest pause between two disturbances, but for what they wait for
# Phases of a process that starts.
BEGINNINGS = (process.OPENING, process.UNWANTED, "begins", "reads its ledger", "is joining")
MEASURED = 0.3  # part of the kills after which a recovery is waited for; the others come on top of each other
SHARES = {"coordinator": 5, "trainer-0": 3, "trainer-1": 2, "engine": 10}  # of the disturbances


def run(
    workdir: pathlib.Path, kills: int, stops: int, steps: int, seed: int = 0, seconds: float = 3600.0
) -> dict[str, Any]:
    """Runs everything once. Returns what the last line says."""
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / process.PACE).write_text("2", encoding="utf-8")
    command = [sys.executable, "-m", process.MODULE, "--role=command", *config(workdir, steps)]
    began = time.monotonic()
    with open(workdir / "console.log", "wb") as log:
        running = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            soak = Soak(workdir, running, random.Random(seed), steps)
            soak.disturb(kills, stops, seconds)
            (workdir / process.PACE).write_text(str(steps), encoding="utf-8")
            soak.shrink_until(lambda: running.poll() is not None, 60.0 + 60.0 * steps)
            code = running.wait(1)
        finally:
            running.terminate()
            try:
                running.wait(supervise.END_S + 10)
            finally:
                running.kill()
    if code:
        raise RuntimeError(f"The command ended with exit code {code}: {_tail(workdir / 'console.log')}")
    return {**soak.told(), **verdict(workdir, steps), "seconds": round(time.monotonic() - began)}


def config(workdir: pathlib.Path, steps: int) -> list[str]:
    """The command line that all processes get."""
    rl = {"steps": steps, "tasks_per_step": GROUPS, "group_size": ATTEMPTS, "staleness": STALENESS}
    fleet = {"engines": 4, "trainers": 2, "lease_s": LEASE_S, "hang_s": HANG_S, "start_s": 60.0, "restarts": 10_000}
    rows = [f"--config.rl.{k}={v}" for k, v in rl.items()] + [f"--config.fleet.{k}={v}" for k, v in fleet.items()]
    return [
        f"--config={ROOT}/configs/search_r1.py",
        f"--config.workdir={workdir}",
        "--config.fleet=on",
        "--config.mesh.data=2",
        *rows,
    ]


# ---------------------------------------------------------------- disturbing


@dataclasses.dataclass
class Stopped:
    """A process that got SIGSTOP."""

    name: str
    pid: int
    until: float  # it must be found
    stacks: int  # bytes that were written before
    found: int  # times that one of its name was found before
    at: float = dataclasses.field(default_factory=time.monotonic)


class Soak:
    """Kills and stops, and measures recovery."""

    def __init__(self, workdir: pathlib.Path, command: subprocess.Popen[bytes], chance: random.Random, steps: int):
        self.workdir, self.folder, self.command = workdir, workdir / settings.FOLDER, command
        self.chance, self.steps = chance, steps
        self.engines = list(range(process.FIRST_ENGINES))  # that are wanted
        self.stopped: list[Stopped] = []
        self.killed: set[int] = set()
        self.without_stacks = 0
        self.kills: collections.Counter[str] = collections.Counter()
        self.stops: collections.Counter[str] = collections.Counter()
        self.recovery: dict[str, list[float]] = {}

    def disturb(self, kills: int, stops: int, seconds: float) -> None:
        """One thing after the other, for so long at most; what is stopped hangs meanwhile."""
        whole = kills + stops
        self._await(lambda: self._version() >= 0, 120.0)
        began = time.monotonic()
        while True:
            time.sleep(BETWEEN_S * self.chance.random())
            self._look_at_stopped()
            done = sum(self.kills.values()) + sum(self.stops.values())
            part = max(done / whole, (time.monotonic() - began) / seconds)
            if part >= 1 and not self.stopped:
                return
            if part >= 1:  # what was stopped is to be found
                continue
            if part > 1 / 3 and not (self.workdir / process.MORE).exists():
                self.engines = [0, 1, 2, 3]
                (self.workdir / process.MORE).touch()
            if part > 2 / 3:
                self.engines = [0]
            pace = min(2 + int(part * self.steps), self.steps - 1)  # with its last step the run would end
            (self.workdir / process.PACE).write_text(str(pace), encoding="utf-8")
            self.shrink()
            stops_left, kills_left = stops - sum(self.stops.values()), kills - sum(self.kills.values())
            stop = self.chance.random() * (stops_left + max(0, kills_left)) < stops_left
            if stop and self.stopped:  # one at a time: who is found to hang has everybody woken, for the stacks
                stop = False
                if kills_left <= 0:
                    continue
            name = self._victim()
            (self._stop if stop else self._kill)(name)
            if (done + 1) % 20 == 0:
                print(f"{done + 1} of {whole} disturbances, version {self._version()}", flush=True)

    def _version(self) -> int:
        """The newest one; -1: there is none, or nobody knows."""
        now = self.status()
        return -1 if now is None else now["steps"]["newest_version"]

    def _victim(self) -> str:
        """A process that lives, and is not stopped; of the trainer's two none, if one of them is."""
        deadline = time.monotonic() + HANGS_S + RECOVERS_S
        while time.monotonic() < deadline:
            self._look_at_stopped()
            hung = {"trainer" if one.name.startswith("trainer") else one.name for one in self.stopped}
            name = self.chance.choices(list(SHARES), list(SHARES.values()))[0]
            name = f"engine-{self.chance.choice(self.engines)}" if name == "engine" else name
            if name.removesuffix("-0").removesuffix("-1") in hung or name in hung:
                time.sleep(LOOK_S)
                continue
            patience = time.monotonic() + BEGINS_S  # else whoever starts soonest would be most of the victims
            while time.monotonic() < patience:
                if self.pid(name, begun=True) is not None:
                    return name
                time.sleep(LOOK_S)
        raise RuntimeError(f"No process to disturb: {_tail(self.workdir / 'console.log')}")

    def _stop(self, name: str) -> None:
        pid = self.pid(name)
        if pid is None:
            return
        stacks = self.folder / LOGS / f"{name}.stacks"
        size = stacks.stat().st_size if stacks.exists() else 0
        os.kill(pid, signal.SIGSTOP)
        self.stops[_role(name)] += 1
        self.stopped.append(Stopped(name, pid, time.monotonic() + HANGS_S, size, self._hangs(name)))

    def _look_at_stopped(self) -> None:
        for one in list(self.stopped):
            stacks = self.folder / LOGS / f"{one.name}.stacks"
            if not _alive(one.pid):
                self.stopped.remove(one)
                seconds = time.monotonic() - one.at
                if self._hangs(one.name) > one.found:
                    self.recovery.setdefault("hang_found", []).append(seconds)
                    if not stacks.exists() or stacks.stat().st_size <= one.stacks:
                        self.without_stacks += 1
                else:  # it, or another one of its gang, had just been killed
                    self.stops[_role(one.name)] -= 1
            elif _state(one.pid) != "T" and time.monotonic() > one.at + WAKES_S:
                # The supervisor wakes everybody whose stacks it wants where another one hangs.
                self.stopped.remove(one)
                self.stops[_role(one.name)] -= 1
            elif time.monotonic() > one.until:
                raise RuntimeError(f"{one.name} was stopped, and nobody has found it for {HANGS_S:.0f} s.")

    def _hangs(self, name: str) -> int:
        """How often the supervisor has found one of a name to hang."""
        return sum(row["reason"].startswith(f"{name} hangs") for row in _rows(self.folder / restarts.FILE))

    def _kill(self, name: str) -> None:
        before, pid = self.status(), self.pid(name)
        if pid is None:
            return
        began, wall = time.monotonic(), time.time()
        os.kill(pid, signal.SIGKILL)
        self.killed.add(pid)
        self.kills[_role(name)] += 1
        if self.stopped or before is None or self.chance.random() > MEASURED:
            return  # the next one meets a fleet that recovers
        role = _role(name)
        if role == "coordinator":
            self._measure(role, began, lambda: (self.status() or before)["epoch"] != before["epoch"])
        elif role == "engine":
            rows = before["members"]["engine"].items()
            if member := next((m for m, row in rows if row["process"] == name), None):

                def requeued() -> bool:
                    now = self.status()
                    return now is not None and member not in now["members"]["engine"]

                self._measure("requeue", began, requeued)
            self._measure(role, began, lambda: self._saw(name, "asks", wall))
        else:
            self._measure(role, began, lambda: self._saw("trainer", "asks", wall))

    def _measure(self, what: str, began: float, over: Callable[[], bool]) -> None:
        self._await(over, RECOVERS_S)
        self.recovery.setdefault(what, []).append(time.monotonic() - began)

    def shrink(self) -> None:
        """Drains engines that are not wanted any more."""
        for member, row in (self.status() or {"members": {"engine": {}}})["members"]["engine"].items():
            number = row["process"].rpartition("-")[2]
            if number.isdigit() and int(number) not in self.engines and not row["drain"]:
                self._ask("/v1/drain", {"name": member})

    def shrink_until(self, over: Callable[[], bool], seconds: float) -> None:
        """Waits."""

        def look() -> bool:
            self.shrink()
            time.sleep(0.2)
            return over()

        self._await(look, seconds)

    def told(self) -> dict[str, Any]:
        """What was done, and seconds of recovery."""
        rows = {
            what: {"median": round(statistics.median(s), 2), "worst": round(max(s), 2), "of": len(s)}
            for what, s in sorted(self.recovery.items())
        }
        found = restarts.summary(self.folder)["restarts"]
        return {
            "kills": sum(self.kills.values()),
            "stops": sum(self.stops.values()),
            "kills_of": dict(self.kills),
            "stops_of": dict(self.stops),
            "without_stacks": self.without_stacks,
            "restarts": sum(found.values()),
            "recovery_s": rows,
            "load": round(os.getloadavg()[1], 1),
        }

    # ---------------------------------------------------------------- looking

    def pid(self, name: str, begun: bool = False) -> int | None:
        """Of a process that lives; `begun`: and is where it does its work."""
        with contextlib.suppress(ValueError, OSError):
            sign = vitals.read(self.folder / vitals.FOLDER / f"{name}.json")
            if (
                sign is not None
                and sign.pid not in self.killed
                and _alive(sign.pid)
                and not (begun and sign.phase in BEGINNINGS)
            ):
                return sign.pid
        return None

    def status(self) -> dict[str, Any] | None:
        """The coordinator's; None: it is away."""
        return self._ask("/v1/status")

    def _ask(self, path: str, row: dict[str, Any] | None = None) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, urllib.error.URLError):
            url = json.loads((self.folder / ADDRESS).read_text(encoding="utf-8"))["url"]
            token = (self.folder / settings.TOKEN_FILE).read_text(encoding="utf-8").strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            request = urllib.request.Request(url + path, None if row is None else json.dumps(row).encode(), headers)
            with urllib.request.urlopen(request, timeout=1.0) as answer:
                return json.load(answer)
        return None

    def _saw(self, name: str, kind: str, since: float) -> bool:
        return any(row["kind"] == kind and row["at"] > since for row in records(self.workdir, name)[-20:])

    def _await(self, over: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not over():
            if time.monotonic() > deadline:
                raise RuntimeError(f"Nothing came in {seconds:.0f} s: {_tail(self.workdir / 'console.log')}")
            if self.command.poll() not in (None, 0):
                raise RuntimeError(f"The command ended: {_tail(self.workdir / 'console.log')}")
            time.sleep(LOOK_S)


# ---------------------------------------------------------------- what came out


def oracle(plan: Plan) -> tuple[list[str], dict[EpisodeId, str]]:
    """Digests of all versions and episodes of an undisturbed run: a plain loop."""
    chains, episodes = [process.INITIAL], dict[EpisodeId, str]()
    for step in range(plan.steps):
        chain = chains[plan.version(step)]
        ids = [EpisodeId(GroupId(step, 0, k), s) for k in range(GROUPS) for s in range(ATTEMPTS)]
        episodes |= {which: process.played(which, chain).digest for which in ids}
        chains.append(process.learnt(chains[-1], [episodes[which] for which in ids]))
    return [manifest.digest(process.tree(chain)) for chain in chains], episodes


def verdict(workdir: pathlib.Path, steps: int) -> dict[str, Any]:
    """Compares what processes wrote down with each other, and with the plain loop.

    lost: acknowledged episodes that are not in what the trainer was given. doubled: acknowledged as new twice, given to
    the trainer twice, or given otherwise to a trainer that repeats a step.
    """
    folder = workdir / settings.FOLDER
    book = Book(folder / LEDGER, Plan(steps, GROUPS, ATTEMPTS, STALENESS, lease_s=LEASE_S))
    published = list(book.rules.record.versions)
    book.close()
    expected, episodes = oracle(Plan(steps, GROUPS, ATTEMPTS, STALENESS))
    acknowledged: dict[EpisodeId, list[dict[str, Any]]] = {}
    outcomes: collections.Counter[str] = collections.Counter()
    for name in [f"engine-{i}" for i in range(4)]:
        for row in records(workdir, name):
            if row["kind"] == "put":
                outcomes[row["outcome"]] += 1
                acknowledged.setdefault(_id(row["episode"]), []).append(row)
    trained: dict[EpisodeId, str] = {}
    doubled = sum(max(0, sum(row["outcome"] == "stored" for row in rows) - 1) for rows in acknowledged.values())
    steps_trained = 0
    for row in records(workdir, "trainer"):
        if row["kind"] == "trained":
            steps_trained += 1
            doubled += len(row["results"]) - len({tuple(one[:4]) for one in row["results"]})
            for *which, digest in row["results"]:
                doubled += trained.setdefault(_id(which), digest) != digest
    lost = sum(
        trained.get(which) != row["digest"]
        for which, rows in acknowledged.items()
        for row in rows
        if row["outcome"] in ("stored", "duplicate")
    )
    newest = weights.versions(folder / settings.WEIGHTS)[-1]
    return {
        "versions": len(published),
        "as_undisturbed": published == expected and trained == episodes and newest == steps,
        "updates_replayed": steps_trained - steps,
        "episodes": len(trained),
        "acknowledged": len(acknowledged),
        "outcomes": dict(outcomes),
        "lost": lost,
        "doubled": doubled,
        "hangs_told": sum("hangs" in row["reason"] for row in _rows(folder / restarts.FILE)),
    }


def records(workdir: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """What the processes of a name have written down."""
    return _rows(workdir / process.RECORDS / f"{name}.jsonl")


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return []


def _id(row: list[int]) -> EpisodeId:
    return EpisodeId(GroupId(*row[:3]), row[3])


def _role(name: str) -> str:
    return name.partition("-")[0]


def _alive(pid: int) -> bool:
    return _state(pid) not in "ZX"


def _state(pid: int) -> str:
    """A letter of /proc: T is stopped, X not there."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _tail(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-3000:]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="versions; 0 = one for seven disturbances")
    parser.add_argument("--seconds", type=float, default=3600.0, help="nothing is disturbed after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", type=pathlib.Path, help="kept; default: a temporary one, kept after a failure")
    given = parser.parse_args()
    workdir = given.workdir or pathlib.Path(tempfile.mkdtemp(prefix="fleet-soak-"))
    steps = given.steps or max(6, (given.kills + given.stops) // 7)
    print(f"workdir {workdir}", flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the fleet ends, too
    found = run(workdir, given.kills, given.stops, steps, given.seed, given.seconds)
    good = found["as_undisturbed"] and not found["lost"] and not found["doubled"]
    if good and given.workdir is None:
        shutil.rmtree(workdir)
    print(json.dumps(found))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
