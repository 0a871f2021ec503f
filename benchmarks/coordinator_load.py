"""How much a coordinator bears: many pretended engines that take, hand in and beat, over HTTP, with files and ledger.

    python -m benchmarks.coordinator_load [--engines=128] [--rate=200] [--seconds=60] [--folder=DIR] [--quick]

The coordinator is a process of its own; the engines are threads of others. Together they hand in `--rate` episodes of
50 KiB (as sent) a second. A trainer trains every step at once and saves every second one. `take_p99_ms`: of calls that
got episodes. `loop_lag_ms`: the most that the coordinator's event loop was late. `rss_growth_mib`: of its process, from
the end of the first fifth of the time to the end. `--quick` is a tenth of all that. The last line is JSON.

`--idle` has the engines wait, with nothing to play, and measures what of a processor the coordinator takes for that
(`idle_cores`), and within what time all that there is to play next has been taken (`wake_ms`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxagent.data.codec import Packed
from jaxagent.fleet import server
from jaxagent.fleet.admission import Outcome
from jaxagent.fleet.client import Client
from jaxagent.fleet.plan import EpisodeId, Plan
from jaxagent.fleet.wire import TaskRef

TOKEN = "a token of the benchmark"
EPISODE_BYTES = 50 << 10
PROCESSES = 4  # of engines
SERVE = "import sys, json; from jaxagent.fleet import server; from jaxagent.fleet.plan import Plan; "
SERVE += "server.run(sys.argv[1], Plan(**json.loads(sys.argv[2])), sys.argv[3])"
NOISE = random.Random(0).randbytes(EPISODE_BYTES)


def packed(which: EpisodeId) -> Packed:
    """Bytes that do not shrink, with an episode's form."""
    of = {"task": {"id": f"t{which.group.number}"}, "sample": which.sample, "group": which.group}
    first = json.dumps(of).encode()
    content = first + b"\n" + NOISE[: EPISODE_BYTES - 200].replace(b"\n", b" ")
    return Packed(hashlib.sha256(first).hexdigest(), zlib.compress(content, 1))


class Engine:
    """A pretended engine: so many episodes a second, a beat every two seconds."""

    def __init__(self, url: str, seed: int, rate: float, end: float):
        self.client = Client(url, TOKEN, 60.0)
        self.random, self.rate, self.end = random.Random(seed), rate, end
        self.takes: list[float] = []
        self.puts: list[float] = []
        self.name = self.client.join("engine", {"host": f"load-{seed}"}).name

    def beats(self) -> None:
        """Until the end."""
        while time.time() < self.end:
            self.client.beat(self.name, [], "plays", 0.0, {"tokens_per_s": 1.0})
            time.sleep(2.0)

    def run(self) -> None:
        """Takes and hands in, at its rate."""
        due = time.time() + self.random.random() / self.rate
        held: list[Any] = []
        while time.time() < self.end:
            if not held:
                begun = time.perf_counter()
                held = self.client.take(self.name, 4, [], wait_s=0.0)
                if held:
                    self.takes.append(time.perf_counter() - begun)
                else:
                    time.sleep(0.02)
                continue
            time.sleep(max(0.0, due - time.time()))
            due = max(due + 1 / self.rate, time.time() - 1.0)
            job = held.pop()
            body = packed(job.work.episode)
            begun = time.perf_counter()
            outcome = self.client.put(job.work, job.work.version, body).outcome
            self.puts.append(time.perf_counter() - begun)
            assert outcome in (Outcome.STORED, Outcome.DUPLICATE, Outcome.LATE), outcome


def load(url: str, seeds: range, rate: float, end: float) -> tuple[list[float], list[float]]:
    """A process of engines."""
    engines = [Engine(url, seed, rate, end) for seed in seeds]
    with concurrent.futures.ThreadPoolExecutor(2 * len(engines)) as threads:
        waiting = [threads.submit(work) for engine in engines for work in (engine.run, engine.beats)]
        for one in waiting:
            one.result()
    return [s for engine in engines for s in engine.takes], [s for engine in engines for s in engine.puts]


def train(client: Client, plan: Plan, over: threading.Event) -> None:
    """Trains what is there, until `over`."""
    for version in range(plan.steps):
        first = 0 if version == 0 else plan.admitted(version - 1)
        tasks = {
            step: [[TaskRef(k, f"t{k}") for k in range(plan.groups_per_step)]]
            for step in range(first, plan.admitted(version))
        }
        client.publish(version, f"w{version}", "load", tasks)
        if version and version % 2 == 0:
            client.keep(version)
        while client.batch(version, wait_s=1.0) is None:
            if over.is_set():
                return


def wait(url: str, seeds: range, end: float) -> list[float]:
    """A process of engines that wait: when each got something."""

    def one(seed: int) -> float:
        client = Client(url, TOKEN, 60.0)
        name = client.join("engine", {"host": f"idle-{seed}"}).name
        while time.time() < end:
            if client.take(name, 4, [], wait_s=10.0):
                return time.time()
        return end

    with concurrent.futures.ThreadPoolExecutor(len(seeds)) as threads:
        return list(threads.map(one, seeds))


def idle(folder: pathlib.Path, engines: int, seconds: float) -> dict[str, float]:
    """Engines that wait, and then all get something."""
    plan = Plan(steps=2, groups_per_step=engines, attempts=1, staleness=0, lease_s=60)
    with contextlib.ExitStack() as stack:
        process, url = stack.enter_context(coordinator(folder, plan))
        client = Client(url, TOKEN, 60.0)
        client.join("trainer", {})
        end = time.time() + 600.0
        waiting = waiters(stack, wait, engines, url, end)
        while len(client.status()["members"]["engine"]) < engines:
            time.sleep(1.0)
        time.sleep(5.0)
        before = cpu_s(process.pid)
        time.sleep(seconds)
        took = cpu_s(process.pid) - before
        before = cpu_s(process.pid)
        client.publish(0, "w0", "load", {0: [[TaskRef(k, f"t{k}") for k in range(engines)]]})
        begun = time.time()
        woken = [at for one in waiting for at in one.result(600)]
        woke = cpu_s(process.pid) - before
        lag = client.status()["loop_lag_s"]["last_minute_most"]
    return {
        "engines": engines,
        "idle_cores": round(took / seconds, 4),
        "wake_ms": round(1e3 * (max(woken) - begun), 1),
        "wake_cpu_ms": round(1e3 * woke, 1),
        "loop_lag_ms": round(1e3 * lag, 1),
    }


def cpu_s(pid: int) -> float:
    """Processor time of a process."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Of a process."""
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.contextmanager
def coordinator(folder: pathlib.Path, plan: Plan) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Its process, and its address."""
    arguments = [str(folder), json.dumps(dataclasses.asdict(plan)), TOKEN]
    process = subprocess.Popen([sys.executable, "-c", SERVE, *arguments])
    try:
        address = folder / server.ADDRESS
        while not address.exists():
            if process.poll() is not None:
                raise SystemExit("the coordinator did not start")
            time.sleep(0.02)
        yield process, json.loads(address.read_text(encoding="utf-8"))["url"]
    finally:
        process.terminate()
        process.wait(30)


def waiters(stack: contextlib.ExitStack, work: Callable[..., Any], engines: int, url: str, *more: float) -> list[Any]:
    """Has processes do the work of engines; futures."""
    share = -(-engines // PROCESSES)
    parts = [range(at, min(engines, at + share)) for at in range(0, engines, share)]
    context = multiprocessing.get_context("spawn")
    workers = stack.enter_context(concurrent.futures.ProcessPoolExecutor(len(parts), context))
    return [workers.submit(work, url, part, *more) for part in parts]


def measure(folder: pathlib.Path, engines: int, rate: float, seconds: float) -> dict[str, float]:
    """Everything."""
    groups = max(4, int(rate / 4))  # a step is about four seconds
    plan = Plan(steps=100_000, groups_per_step=groups, attempts=4, staleness=2, rule="in_flight", lease_s=10)
    with contextlib.ExitStack() as stack:
        process, url = stack.enter_context(coordinator(folder, plan))
        client, over = Client(url, TOKEN, 60.0), threading.Event()
        client.join("trainer", {})
        trainer = threading.Thread(target=train, args=(client, plan, over), daemon=True)
        trainer.start()
        begun = time.time()
        end = begun + seconds
        waiting = waiters(stack, load, engines, url, rate / engines, end)
        time.sleep(seconds / 5)
        before, lags = rss_mib(process.pid), list[float]()
        while time.time() < end - 1:
            time.sleep(min(5.0, max(0.0, end - 1 - time.time())))
            lags.append(Client(url, TOKEN, 60.0).status()["loop_lag_s"]["last_minute_most"])
        after = rss_mib(process.pid)
        found = [one.result(120) for one in waiting]
        takes, puts = ([seconds for one in found for seconds in one[which]] for which in (0, 1))
        over.set()
        trainer.join(60)
        status = client.status()
    return {
        "episodes_per_s": round(len(puts) / seconds, 1),
        "wanted_per_s": rate,
        "engines": engines,
        "take_p50_ms": round(1e3 * statistics.median(takes), 2),
        "take_p99_ms": round(1e3 * statistics.quantiles(takes, n=100)[-1], 2),
        "put_p50_ms": round(1e3 * statistics.median(puts), 2),
        "put_p99_ms": round(1e3 * statistics.quantiles(puts, n=100)[-1], 2),
        "loop_lag_ms": round(1e3 * max(lags, default=0.0), 1),
        "rss_mib": round(after, 1),
        "rss_growth_mib": round(after - before, 1),
        "versions": status["steps"]["newest_version"],
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=128)
    parser.add_argument("--rate", type=float, default=200.0, help="episodes a second, of all engines together")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", help="on the disk that is to be measured; default: a temporary one")
    parser.add_argument("--idle", action="store_true", help="the engines wait: what the coordinator takes for that")
    parser.add_argument("--quick", action="store_true", help="a tenth of the engines, of the rate and of the time")
    options = parser.parse_args()
    part = 10 if options.quick else 1
    engines, rate, seconds = max(1, options.engines // part), options.rate / part, options.seconds / part
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = idle(pathlib.Path(folder), engines, seconds) if options.idle else None
        print(json.dumps(found or measure(pathlib.Path(folder), engines, rate, seconds)))


if __name__ == "__main__":
    main()
