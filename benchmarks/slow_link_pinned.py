"""How long does the trainer wait where engines fetch every version over a slow link? Rule `pinned`, for slow_link.py.

The real coordinator, client, engine loop, weight servers and fetchers, in threads of one process, around work that
sleeps: an episode is one wait, an update another. A version is random bytes of a function of its number, so an engine
that read other bytes would be refused by their digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.async_processes import Setup, Sleeper, tasks_of
from benchmarks.slow_proxy import SlowProxy
from jaxagent.fleet import manifest, weight_reader, weights
from jaxagent.fleet.client import Client
from jaxagent.fleet.leaves import Leaves
from jaxagent.fleet.manifest import MissingError, WeightsError
from jaxagent.fleet.plan import Plan
from jaxagent.fleet.weight_ahead import Ahead
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.wire import Sources
from jaxagent.fleet.worker import EngineWorker
from tests.fleet.served import TOKEN, Served

LEASE_S = 4.0  # an engine beats four times as often, and learns so what it may fetch ahead of time
LIMIT_S = 120.0  # for a fetch, and for processes to end
LEAVES = 4  # of a version


@dataclasses.dataclass(frozen=True)
class Link:
    """Between the trainer and all engines; engines are near each other."""

    delay_s: float = 0.2  # one way
    bytes_per_s: float = 20e6


@dataclasses.dataclass(frozen=True)
class Case:
    """A run."""

    staleness: int
    engines: int
    play_s: float  # an episode, in the median
    megabytes: float  # a version
    train_s: float = 3.0
    steps: int = 10
    ahead: bool = True  # engines fetch ahead of time what they are told

    @property
    def setup(self) -> Setup:
        """Its work."""
        own = dataclasses.asdict(self)
        shared = {name: own[name] for name in ("staleness", "engines", "train_s", "steps")}
        return Setup(groups=4, attempts=2, turns=1, wait_s=self.play_s, wait_sigma=0.1, **shared)

    @property
    def plan(self) -> Plan:
        """Its rules."""
        return dataclasses.replace(self.setup.plan, lease_s=LEASE_S)

    def tree(self, version: int) -> Leaves:
        """A version."""
        count = int(self.megabytes * 1e6 / LEAVES)
        random = np.random.default_rng(version)
        return {(f"leaf{i}",): random.integers(0, 256, count, np.uint8) for i in range(LEAVES)}


@dataclasses.dataclass(frozen=True)
class Waits:
    """What came of a run."""

    trainer_s: list[float]  # waited for the batch, of each step after the first S + 1, which fill the pipeline
    transfer_s: float  # of a version, in the median: from an engine's question to its last byte, on its disk
    step_s: float  # mean

    def told(self) -> dict[str, float]:
        """For a table."""
        return {
            "wait_s": round(statistics.mean(self.trainer_s), 3),
            "wait_most_s": round(max(self.trainer_s), 3),
            "transfer_s": round(self.transfer_s, 2),
            "step_s": round(self.step_s, 2),
        }


class Engine(Sleeper):
    """A player that has its weights from others, as `runs.fleet.engine_weights.EngineVersions` has them, and sleeps."""

    def __init__(self, case: Case, client: Client, folder: pathlib.Path, own_url: str):
        super().__init__(case.setup)
        self._case, self._client, self._own = case, client, folder
        self._fetcher = WeightFetcher(folder, TOKEN, own_url)
        self._ahead = Ahead(self._fetch_ahead)
        self.transfers_s: list[float] = []

    def hold(self, version: int) -> None:
        """See `Player`."""
        with self._ahead.instead(version):
            if not weights.path_of(self._own, version).exists():
                self._fetch(version, LIMIT_S)
            sources = self._sources(version)
            with weight_reader.hold(self._own, version, sources.lineage) as held:
                held.read()
                if held.manifest.digest != sources.digest:
                    raise WeightsError(f"version {version} is not what was published")
        weights.delete(self._own, version - self._case.staleness - 1)
        super().hold(version)

    def expect(self, version: int) -> None:
        """See `Player`."""
        if self._case.ahead:
            self._ahead.expect(version)

    def numbers(self) -> dict[str, Any]:
        """See `Player`."""
        numbers, fetched = super().numbers(), self._fetcher.numbers()
        progress = numbers["progress"] + fetched["weights_got_bytes"]
        return {**numbers, **fetched, "progress": progress, "versions": weights.versions(self._own)}

    def _fetch_ahead(self, version: int, wanted: Callable[[], bool]) -> None:
        if not weights.path_of(self._own, version).exists():
            self._fetch(version, 0.0, wanted)

    def _fetch(self, version: int, deadline_s: float, wanted: Callable[[], bool] = lambda: True) -> None:
        began = time.monotonic()
        self._fetcher.fetch(lambda: self._sources(version), deadline_s, still_wanted=wanted)
        self.transfers_s.append(time.monotonic() - began)

    def _sources(self, version: int) -> Sources:
        if (sources := self._client.weights(version)) is None:
            raise MissingError(f"the coordinator knows of no version {version}.")
        return sources


def run(folder: pathlib.Path, case: Case, link: Link | None) -> Waits:
    """A whole run; None: without the slow link."""
    folder.mkdir(parents=True)
    versions = folder / "weights"
    with contextlib.ExitStack() as opened:
        served = opened.enter_context(Served(folder / "coordinator", case.plan, config=""))
        shared = opened.enter_context(WeightServer([versions], TOKEN))
        url = shared.url
        if link is not None:
            url = opened.enter_context(SlowProxy(url, link.delay_s, link.bytes_per_s)).url
        client = served.client()
        name = client.join("trainer", {"process": "trainer", "source": url}).name
        opened.enter_context(beating(client, name))
        players = [opened.enter_context(engine(folder / f"engine-{i}", case, served)) for i in range(case.engines)]
        waits, published = train(client, case, versions)
    transfers = [seconds for player in players for seconds in player.transfers_s]
    counted = case.staleness + 1
    step_s = (published[-1] - published[counted]) / (len(published) - counted - 1)
    return Waits(waits[counted:], statistics.median(transfers), step_s)


@contextlib.contextmanager
def engine(folder: pathlib.Path, case: Case, served: Served) -> Iterator[Engine]:
    """An engine's loop, in a thread of its own."""
    folder.mkdir()
    client = served.client()
    with WeightServer([folder], TOKEN) as own:
        player = Engine(case, client, folder, own.url)
        facts = {"process": folder.name, "source": own.url}
        worker = EngineWorker(client, player, facts, "pinned", LIMIT_S)
        thread = threading.Thread(target=worker.run, name=folder.name, daemon=True)
        thread.start()
        try:
            yield player
        finally:
            worker.end("the run is over", 0.0)
            thread.join(LIMIT_S)


@contextlib.contextmanager
def beating(client: Client, name: str) -> Iterator[None]:
    """The trainer lives: who is silent for a lease is no source of weights any more."""
    over = threading.Event()

    def beats() -> None:
        while not over.wait(LEASE_S / 4):
            client.beat(name, ())

    thread = threading.Thread(target=beats, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LIMIT_S)


def train(client: Client, case: Case, versions: pathlib.Path) -> tuple[list[float], list[float]]:
    """The trainer: seconds for which it waited for each step's batch, and when each version was published."""
    waits, published = [], []

    def publish(version: int) -> None:
        digest = weights.publish(versions, manifest.shares(case.tree(version)), "run", version).digest
        client.publish(version, digest, "run", tasks_of(case.plan, version))
        weights.delete(versions, version - case.staleness - 1)
        published.append(time.monotonic())

    publish(0)
    for step in range(case.steps):
        asked = time.monotonic()
        while client.batch(step, 10.0) is None:
            if time.monotonic() - asked > LIMIT_S:
                raise SystemExit(f"step {step} has no batch after {LIMIT_S:.0f} s")
        waits.append(time.monotonic() - asked)
        time.sleep(case.train_s)
        publish(step + 1)
    client.end("all steps are trained")
    return waits, published
