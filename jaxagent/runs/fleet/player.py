"""An engine process: the parts of a run, a driver with its own mesh, and the loop of fleet/worker.py around them.

An attempt is played by the very functions of a run of one process: its number, its temperature and its limits follow
from (config, step, round, sample), so its tokens are those that such a run would sample with the same weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxagent.config import Config, ConfigError
from jaxagent.data import codec
from jaxagent.data.codec import Packed
from jaxagent.engine.driver import Driver
from jaxagent.engine.requests import EngineError
from jaxagent.fleet import settings
from jaxagent.fleet.client import Client
from jaxagent.fleet.manifest import WeightsError
from jaxagent.fleet.neighbours import Done
from jaxagent.fleet.vitals import Vitals
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.weight_server import WeightServer, listening_host
from jaxagent.fleet.wire import Job
from jaxagent.fleet.worker import EngineWorker
from jaxagent.rollout.workers import LATE, STOP_TIMEOUT_S, Rollout, guarded, no_episode
from jaxagent.runs import attempts, devices
from jaxagent.runs.checks import OPD
from jaxagent.runs.fleet import probe
from jaxagent.runs.fleet.engine_weights import EngineVersions, VersionReader, blank
from jaxagent.runs.parts import Parts, open_parts
from jaxagent.types import Episode, StopReason, Task

logger = logging.getLogger(__name__)

CANCEL_S = 5.0  # for the loop of the episodes to take an order
Facts = Callable[[jax.sharding.Mesh], Mapping[str, Any]]


@dataclasses.dataclass(eq=False)
class EnginePlayer:
    """Plays a run's attempts; what `fleet.worker.EngineWorker` calls."""

    parts: Parts  # of the run, opened in this process
    driver: Driver  # started; which weights it has does not matter
    versions: EngineVersions  # where weights come from
    trainers_probe: Callable[[], bytes | None]  # gives the content of the trainer's probe; None where there is none
    facts: Mapping[str, Any]  # of this process, for a probe that differs
    server_numbers: Callable[[], Mapping[str, float]] = dict  # of the weights that this process hands on

    def __post_init__(self) -> None:
        assert self.parts.cfg.fleet is not None
        self._strict = self.parts.cfg.fleet.rule == "pinned" and self.parts.cfg.numerics == "exact"
        # Steps of the other stage that samples so.
        self._before = self.parts.cfg.opd.steps if self.parts.cfg.opd and OPD in self.parts.cfg.stages else 0
        self._begun = False  # before it plays anything it compares itself with the trainer
        self._version = -1
        self._rollouts: dict[int, Rollout] = {}  # by step
        self._tasks: dict[str, asyncio.Task[Any]] = {}  # by lease; the two are of the episodes' loop
        self._unwanted: set[str] = set()
        # The last two are of the newest version: until it was on the devices, and for how long nothing was sampled.
        names = ("failed", "cut_off", "probe_differs", "weights_came_s", "swap_s")
        self._counts = dict.fromkeys(names, 0.0)

    # ---------------------------------------------------------------- weights

    def hold(self, version: int) -> None:
        """Has the driver serve a version; before the first one, compares this process with the trainer.

        Raises:
          ConfigError: this process does not compute what the trainer computes, where it must.
        """
        if not self._begun:
            self._begin()
            self._begun = True
        if version != self._version:
            self._swap(version)
        self.versions.forget(version - self.parts.cfg.rl.staleness - 1)

    def expect(self, version: int) -> None:
        """Fetches a version ahead of its use, and returns at once."""
        self.versions.expect(version)

    def _swap(self, version: int) -> None:
        started = time.monotonic()
        params = self.versions.params(version)
        there = time.monotonic()
        self.driver.update_params(params, version)
        self._version = version
        self._counts |= {"weights_came_s": there - started, "swap_s": time.monotonic() - there}

    def _begin(self) -> None:
        """What needs version 0: the comparison with the trainer, and roles that keep what RL begins with."""
        expected = self.trainers_probe()
        if expected is None:
            logger.warning(
                "The trainer has left no probe: whether this process computes what it computes is not known."
            )
        else:
            try:
                self._swap(0)
                self._compare(expected)
            except WeightsError as failure:
                if self._strict:
                    raise WeightsError(f"the probe needs version 0, by which engines are compared: {failure}") from None
                logger.warning("Not compared with the trainer: %s", failure)
        self.parts.roles.freeze(lambda folder: self.parts.export(self.versions.params(0), folder))

    def _compare(self, expected: bytes) -> None:
        differs = probe.compare(expected, probe.probe(self.parts, self.driver), self.facts)
        if differs and self._strict:
            raise ConfigError(
                f"This engine does not compute what the trainer computes: {differs}. With fleet.rule='pinned' and "
                "numerics='exact' all processes must: make them equal, or use --config.numerics=fast."
            )
        if differs:
            self._counts["probe_differs"] = 1.0
            logger.warning("This engine does not compute what the trainer computes: %s.", differs)

    # ---------------------------------------------------------------- episodes

    def play(self, job: Job, report: Done) -> None:
        """Begins an attempt at the job's task on the episodes' loop; `report` gets its result.

        Raises:
          ConfigError: this process has other data than the trainer.
        """
        task = self._task(job)
        rl, tasks = self.parts.cfg.rl, len(self.parts.train)
        number = attempts.first(rl, job.group.step, job.group.round, self._before)
        number += attempts.ahead(job.group.number, tasks, attempts.first(rl, 1, 0, 0))
        attempt = attempts.numbered(self._rollout(job.group.step), number)
        self.parts.workers.begin(self._episode(job, task, attempt, report))

    def cancel(self, lease: str) -> None:
        """Cancels the attempt of a lease, also one that has not begun yet."""

        async def on_the_loop() -> None:
            if lease in self._tasks:
                self._tasks[lease].cancel()
            else:  # not begun yet, or over
                self._unwanted.add(lease)

        with contextlib.suppress(TimeoutError):
            self.parts.workers.run(on_the_loop(), CANCEL_S)

    def places(self) -> int:
        """The number of episodes that are played at once."""
        return self.parts.cfg.concurrent_episodes

    def numbers(self) -> dict[str, Any]:
        """The counters of the player, the driver and the weights, which every beat tells.

        Raises:
          EngineError: generation has failed for good: the process must end, and not fail every episode that it gets.
        """
        self.driver.check()
        stats, of_weights = self.driver.stats(), self.versions.numbers()
        moved = sum(count for name, count in stats.items() if name != "free_slot_s")  # which grows while nothing moves
        return {
            **self._counts,
            **of_weights,
            **self.server_numbers(),
            "tokens": stats.get("sampled_tokens", 0.0),
            "progress": float(moved + of_weights["weights_got_bytes"]),
        }

    async def _episode(self, job: Job, task: Task, attempt: Rollout, report: Done) -> None:
        lease, version, result = job.work.lease, self._version, None
        if lease in self._unwanted:
            self._unwanted.discard(lease)
            return report(None, version)
        current = asyncio.current_task()
        assert current is not None
        self._tasks[lease] = current
        try:
            episode = await self._in_time(task, job.sample, attempt)
            if episode.stop_reason is StopReason.ENGINE_ERROR:
                self.driver.check()  # else every episode that this process gets would fail
            self._counts["failed"] += episode.stop_reason.is_failure
            result, version = await asyncio.to_thread(_packed, episode), _oldest(episode, version)
        except EngineError as failure:
            logger.error("An episode is given up, since generation has failed: %s", failure)
        finally:
            del self._tasks[lease]
            report(result, version)

    async def _in_time(self, task: Task, sample: int, attempt: Rollout) -> Episode:
        """Every attempt has limits of its own; this one is for what hangs all the same.

        One that is played again, since its sandbox was lost, has it anew.
        """

        async def limited(task: Task, sample: int) -> Episode:
            limit = asyncio.timeout(self.parts.cfg.env.episode_timeout_s + STOP_TIMEOUT_S)
            try:
                async with limit:
                    return await attempt(task, sample)
            except TimeoutError:
                if not limit.expired():  # the rollout's own
                    raise
            self._counts["cut_off"] += 1
            return no_episode(task, sample, StopReason.CANCELLED, LATE)

        return await guarded(limited, task, sample)

    def _task(self, job: Job) -> Task:
        source = self.parts.train
        task = source[job.task.row] if job.task.row < len(source) else None
        if task is None or task.id != job.task.id:
            has = f"has '{task.id}' there" if task is not None else f"has {len(source)} tasks"
            raise ConfigError(
                f"The trainer's task {job.task.row} is '{job.task.id}', and {source.name} {has}: this process has "
                "other data. Give it the trainer's."
            )
        return task

    def _rollout(self, step: int) -> Rollout:
        if step not in self._rollouts:
            self._rollouts = {
                s: r for s, r in self._rollouts.items() if s >= step - 2 * self.parts.cfg.rl.staleness - 2
            }
            self._rollouts[step] = attempts.of_step(self.parts, self.driver, step)
        return self._rollouts[step]


def _packed(episode: Episode) -> Packed:
    try:
        return codec.pack(episode)
    except ValueError as error:  # an environment's number that is not finite
        failed = no_episode(episode.task, episode.sample, StopReason.ENV_ERROR, f"its result cannot be sent: {error}")
        return codec.pack(failed)


def _oldest(episode: Episode, begun: int) -> int:
    """The version of an episode's oldest token; of one without tokens that with which it began."""
    versions = (t.policy_versions[t.action_mask] for t in episode.trajectories)
    return min((int(token_versions.min()) for token_versions in versions if len(token_versions)), default=begun)


def budget_s(cfg: Config) -> float:
    """Seconds without progress after which what plays counts as hanging: a tool may rightly be silent for long."""
    assert cfg.fleet is not None
    return max(cfg.fleet.hang_s, cfg.env.episode_timeout_s + 2 * STOP_TIMEOUT_S)


def run(
    cfg: Config,
    link: Client,
    token: str,
    name: str,
    host: str,
    facts: Facts,
    watch: Vitals | None = None,
    begun: Callable[[EngineWorker], None] = lambda worker: None,
) -> str:
    """One engine process, from its beginning to its end. Returns why it ended.

    Args:
      cfg: of the run, with this process's own mesh.
      name: of the process, and of its folder.
      facts: of the process, on its mesh.
      begun: is called with the worker before it joins, so that a signal can end it.

    Raises:
      ConfigError: the config, the data or this machine are not the run's.
      CoordinatorGoneError: the coordinator was away for too long.
      EngineError: generation has failed for good.
    """
    fleet, fleet_folder = settings.of(cfg), pathlib.Path(cfg.workdir) / settings.FOLDER
    own, trainers_folder = fleet_folder / settings.ENGINES / name / settings.WEIGHTS, fleet_folder / settings.WEIGHTS
    own.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        parts = stack.enter_context(open_parts(cfg, lambda line: logger.info("%s", line)))
        server = stack.enter_context(WeightServer([own], token, listening_host(host), address=host))
        driver = stack.enter_context(parts.engine(blank(parts.spec, parts.mesh), -1))
        parts.roles.start()
        fetcher = WeightFetcher(own, token, server.url)
        reader = VersionReader(trainers_folder, own, fetcher, fleet.hang_s / 2)
        versions = EngineVersions(cfg, parts.spec, parts.mesh, link, reader)
        own_facts = {**facts(parts.mesh), "source": server.url}
        expected_probe = functools.partial(_trainers_probe, trainers_folder, own, link, fetcher)
        player = EnginePlayer(parts, driver, versions, expected_probe, own_facts, server.numbers)
        logger.info("%s is ready after %.1f s", name, time.monotonic() - started)
        worker = EngineWorker(link, player, own_facts, fleet.rule, budget_s(cfg), watch)
        begun(worker)
        stack.enter_context(devices.collector_frozen())
        return worker.run()


def _trainers_probe(
    trainers_folder: pathlib.Path, own: pathlib.Path, link: Client, fetcher: WeightFetcher
) -> bytes | None:
    """What the trainer's probe gave: from its folder, or from whoever shares it; it is then shared here, too."""
    with contextlib.suppress(FileNotFoundError):
        return (trainers_folder / probe.FILE).read_bytes()
    sources = link.weights(0)
    content = None if sources is None else fetcher.small(reversed(sources.urls), probe.FILE)
    if content is not None:
        (own / probe.FILE).write_bytes(content)
    return content
