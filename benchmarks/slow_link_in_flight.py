"""For how long does an engine stand still when it takes new weights, that come over a slow link? For slow_link.py.

The real coordinator, client, engine loop, player and driver with a model of 36 MB, rule `in_flight`: one episode at a
time is played while the next version comes. Dispatches are timed inside the driver's thread. Afterwards all episodes
are played again by another engine that takes each version, straight from the trainer's folder, after the same dispatch:
equal digests say that the weights which came and every token before and after each swap are what they should be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import jax
import numpy as np

from benchmarks.slow_link_pinned import LIMIT_S, Link, beating
from benchmarks.slow_proxy import SlowProxy
from jaxagent.config import flags
from jaxagent.data.codec import Packed
from jaxagent.engine.driver import Driver
from jaxagent.engine.executor import Executor
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.scheduler import Scheduler
from jaxagent.fleet import manifest, weight_reader, weights
from jaxagent.fleet.client import Client
from jaxagent.fleet.neighbours import Done
from jaxagent.fleet.settings import plan_of
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.wire import Job, TaskRef
from jaxagent.fleet.worker import EngineWorker
from jaxagent.models.params import Params
from jaxagent.runs.fleet import trees
from jaxagent.runs.fleet.engine_weights import EngineVersions, VersionReader, blank, place
from jaxagent.runs.fleet.player import EnginePlayer
from jaxagent.runs.parts import Parts, open_parts
from tests import tiny_run
from tests.fleet.served import TOKEN, Served

FLAGS = (
    "--config.stages=rl", "--config.fleet=on", "--config.fleet.rule=in_flight", "--config.rl.staleness=2",
    "--config.numerics=fast", "--config.env.concurrent_episodes=1", "--config.engine.kv_on_update=keep",
    "--config.model.embed_dim=384", "--config.model.num_heads=6",
    "--config.model.num_kv_heads=2", "--config.model.head_dim=64", "--config.model.mlp_dim=1536",
    "--config.env.turn_tokens=240",
)  # fmt: skip
COPIES = 9  # of a version, timed alone


@dataclasses.dataclass
class Watched:
    """What the driver's thread did, by the machine's monotonic clock."""

    dispatches: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    swaps: list[tuple[int, bool]] = dataclasses.field(default_factory=list)  # after so many; with a turn under way

    def gap(self, index: int) -> float:
        """Seconds between a dispatch and the one before it."""
        return self.dispatches[index][0] - self.dispatches[index - 1][1]


@contextlib.contextmanager
def watched(after: Callable[[int], None] = lambda count: None) -> Iterator[Watched]:
    """Of the one driver that works meanwhile. `after` is called in its thread with the number of dispatches so far."""
    seen, generate, forget = Watched(), Executor.generate, Scheduler.forget

    def timed(self: Executor, *arguments: Any) -> Any:
        began = time.monotonic()
        result = generate(self, *arguments)
        seen.dispatches.append((began, time.monotonic()))
        after(len(seen.dispatches))
        return result

    def swapped(self: Scheduler, recompute: bool) -> None:
        seen.swaps.append((len(seen.dispatches), bool(self.ledger.active.any())))
        forget(self, recompute)

    with mock.patch.object(Executor, "generate", timed), mock.patch.object(Scheduler, "forget", swapped):
        yield seen


class Player(EnginePlayer):
    """The real one; knows what it played, in order, and when weights came."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.played: list[tuple[Job, Packed | None]] = []
        self.held: list[tuple[int, float, float]] = []  # version, from when until when it came and was swapped

    def hold(self, version: int) -> None:
        """See `Player`."""
        began = time.monotonic()
        super().hold(version)
        self.held.append((version, began, time.monotonic()))

    def play(self, job: Job, done: Done) -> None:
        """See `Player`."""

        def over(packed: Packed | None, version: int) -> None:
            self.played.append((job, packed))
            done(packed, version)

        super().play(job, over)


def run(folder: pathlib.Path, link: Link, steps: int, layers: int) -> dict[str, Any]:
    """Plays `steps` steps, of which each publishes a version, and plays them again. 9 MB are a layer of the model."""
    folder.mkdir(parents=True)
    sizes = (f"--config.rl.steps={steps}", f"--config.model.num_layers={layers}")
    cfg = flags.parse_argv(tiny_run.argv(folder / "run", *FLAGS, *sizes)).config
    published = folder / "weights"
    with open_parts(cfg, lambda line: None) as parts:
        with watched() as seen, contextlib.ExitStack() as opened:
            served = opened.enter_context(Served(folder / "coordinator", plan_of(cfg), config=""))
            shared = opened.enter_context(WeightServer([published], TOKEN))
            proxy = opened.enter_context(SlowProxy(shared.url, link.delay_s, link.bytes_per_s))
            driver = opened.enter_context(parts.engine(blank(parts.spec, parts.mesh), -1))
            client = served.client()
            name = client.join("trainer", {"process": "trainer", "source": proxy.url}).name
            opened.enter_context(beating(client, name))
            player = opened.enter_context(engine(parts, driver, served.client(), folder))
            train(parts, client, published)
        played = [(job, packed.digest) for job, packed in player.played if packed is not None]
        versions = {version: placed(parts, published, version) for version, _, _ in player.held}
        again = replayed(parts, [job for job, _ in played], versions, player.held, seen.swaps)
        copies_s = copied(parts, versions[0])
    if again != [digest for _, digest in played]:
        raise SystemExit("the episodes are not those that an engine without the link plays")
    return {"megabytes": round(proxy.passed / len(player.held) / 1e6, 1), **told(seen, player, copies_s)}


@contextlib.contextmanager
def engine(parts: Parts, driver: Driver, client: Client, folder: pathlib.Path) -> Iterator[Player]:
    """An engine's loop, in a thread of its own."""
    own = folder / "engine"
    own.mkdir()
    with WeightServer([own], TOKEN) as server:
        fetcher = WeightFetcher(own, TOKEN, server.url)
        reader = VersionReader(folder / "none", own, fetcher, LIMIT_S)
        versions = EngineVersions(parts.cfg, parts.spec, parts.mesh, client, reader)
        player = Player(parts, driver, versions, lambda: None, {}, server.numbers)
        facts = {"process": "engine", "source": server.url}
        worker = EngineWorker(client, player, facts, "in_flight", LIMIT_S)
        thread = threading.Thread(target=worker.run, name="engine", daemon=True)
        thread.start()
        try:
            yield player
        finally:
            worker.end("the run is over", 0.0)
            thread.join(LIMIT_S)


def train(parts: Parts, client: Client, folder: pathlib.Path) -> None:
    """The trainer, whose updates take no time: version v is what it began with, times 1 + v / 100."""
    plan, policy = plan_of(parts.cfg), trees.paths(jax.device_get(parts.init_params()))
    tasks = [TaskRef(row, parts.train[row].id) for row in range(plan.groups_per_step)]

    def publish(version: int) -> None:
        first = 0 if version == 0 else plan.admitted(version - 1)
        tree = {path: (leaf * np.float32(1 + version / 100)).astype(leaf.dtype) for path, leaf in policy.items()}
        digest = weights.publish(folder, manifest.shares(tree), "run", version).digest
        client.publish(version, digest, "run", {step: [tasks] for step in range(first, plan.admitted(version))})

    publish(0)
    for step in range(plan.steps):
        asked = time.monotonic()
        while client.batch(step, 10.0) is None:
            if time.monotonic() - asked > LIMIT_S:
                raise SystemExit(f"step {step} has no batch after {LIMIT_S:.0f} s")
        publish(step + 1)
    client.end("all steps are trained")


# -------------------------------------------------------------------- afterwards


def placed(parts: Parts, folder: pathlib.Path, version: int) -> Params:
    """A version, from the trainer's folder, on the devices."""
    with weight_reader.hold(folder, version, "run") as held:
        return place(held.read(), parts.spec, parts.mesh)


def replayed(
    parts: Parts,
    jobs: Sequence[Job],
    versions: Mapping[int, Params],
    held: Sequence[tuple[int, float, float]],
    swaps: Sequence[tuple[int, bool]],
) -> list[str]:
    """Digests of the same episodes, played by an engine that takes each version after as many dispatches."""
    after = {count: version for (version, _, _), (count, _) in zip(held, swaps, strict=True)}

    def take(count: int) -> None:
        if count in after:
            driver._weights = (versions[after[count]], after[count])  # taken before the next dispatch

    digests = []
    with watched(take), parts.engine(versions[after[0]], after[0]) as driver:
        player = EnginePlayer(parts, driver, cast(EngineVersions, None), lambda: None, {})
        for job in jobs:
            over: queue.SimpleQueue[Packed | None] = queue.SimpleQueue()
            player.play(job, lambda packed, version, over=over: over.put(packed))
            packed = over.get(timeout=LIMIT_S)
            digests.append("" if packed is None else packed.digest)
    return digests


def copied(parts: Parts, params: Params) -> list[float]:
    """Seconds that the device takes alone to lay a version out as the engine wants it: all that a swap must do."""
    model, seconds = LanguageModel(parts.spec, parts.cfg.engine.cache_dtype), []
    with jax.set_mesh(parts.mesh):
        for _ in range(1 + COPIES):
            began = time.monotonic()
            jax.block_until_ready(model.place(params))
            seconds.append(time.monotonic() - began)
    return seconds[1:]  # the first one compiles


def told(seen: Watched, player: Player, copies_s: Sequence[float]) -> dict[str, Any]:
    """The figures."""
    pauses = [seen.gap(count) for count, active in seen.swaps if active and 0 < count < len(seen.dispatches)]
    if not pauses:
        raise SystemExit("no swap came within a turn")
    between = [seen.gap(i) for i in range(1, len(seen.dispatches))]
    came = [(began, ended) for version, began, ended in player.held if version > 0]
    during, alone = list[float](), list[float]()
    for began, ended in seen.dispatches:
        fetching = any(start <= began <= end for start, end in came)
        (during if fetching else alone).append(ended - began)
    copy_s = min(copies_s)  # what it takes undisturbed
    milliseconds = {
        "pause_ms": statistics.median(pauses),
        "pause_most_ms": max(pauses),
        "copy_ms": copy_s,
        "over_copy_ms": statistics.median(pauses) - copy_s,
        "over_copy_most_ms": max(pauses) - copy_s,
        "gap_ms": statistics.median(between),
        "dispatch_ms": statistics.median(alone),
        "dispatch_while_it_comes_ms": statistics.median(during),
    }
    figures = {name: round(1e3 * seconds, 2) for name, seconds in milliseconds.items()}
    coming_s = statistics.median(end - start for start, end in came)
    return {"swaps": len(pauses), "coming_s": round(coming_s, 2), "episodes": len(player.played), **figures}
