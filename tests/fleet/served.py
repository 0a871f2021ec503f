"""A real coordinator on 127.0.0.1, with engines and a trainer that only pretend: episodes and weights are digests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import pathlib
import random
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxagent.config.command import bound_socket
from jaxagent.data import codec
from jaxagent.data.codec import Packed
from jaxagent.fleet import server, worker
from jaxagent.fleet.admission import Batch, Outcome
from jaxagent.fleet.client import Client
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from jaxagent.fleet.wire import TaskRef
from jaxagent.fleet.worker import EngineWorker
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory
from tests.fleet import world

TOKEN = "a token of the tests"
FACTS = {"config": "c0", "jaxlib": "1", "threads": 2, "host": "here"}
WAIT_S = 60.0


def until(condition: Callable[[], Any]) -> None:
    """Waits for what comes true in the end."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def task_of(step: int, round_: int, index: int) -> TaskRef:
    """Which task a group plays: a function of its number."""
    row = 1000 * step + 100 * round_ + index
    return TaskRef(row, f"task-{row}")


def tasks_of(plan: Plan, version: int) -> dict[int, list[list[TaskRef]]]:
    """What comes with a version."""
    further = plan.groups_per_round or plan.groups_per_step
    sizes = [plan.first_round] + [further] * (plan.rounds - 1)
    first = 0 if version == 0 else plan.admitted(version - 1)
    return {
        step: [[task_of(step, r, k) for k in range(size)] for r, size in enumerate(sizes)]
        for step in range(first, plan.admitted(version))
    }


def played(which: EpisodeId, weights: str, play: str = "") -> Episode:
    """An episode whose tokens and reward tell which one it is, and under which weights it was played."""
    text = hashlib.sha256(repr((tuple(which.group), which.sample, weights, play)).encode()).digest()
    kinds = np.array([TokenKind.PROMPT] + [TokenKind.ACTION] * 31, np.uint8)
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    action = kinds == TokenKind.ACTION
    return Episode(
        task=Task(task_of(*which.group).id, "What?", ("x",)),
        sample=which.sample,
        trajectories=(
            Trajectory(
                tokens,
                kinds,
                np.where(action, -0.5, 0).astype(np.float32),
                np.where(action, 0, -1).astype(np.int32),
                np.zeros(32, np.int32),
            ),
        ),
        reward=float(text[0] % 3 == 0),
        rewards={},
        stop_reason=StopReason.ANSWER,
        turns=1,
        text=play,
    )


def packed(which: EpisodeId, weights: str, play: str = "") -> Packed:
    return codec.pack(played(which, weights, play))


def usable(episodes: list[Episode]) -> bool:
    """Whether a group has signal: its rewards differ."""
    return len({episode.reward for episode in episodes}) > 1


def oracle(plan: Plan) -> world.Oracle:
    """The run without coordinator, engines or time."""

    def judged(group: GroupId, weights: str) -> bool:
        return usable([played(EpisodeId(group, sample), weights) for sample in range(plan.attempts)])

    return world.Oracle(plan, judged, lambda which, weights: packed(which, weights).digest)


class Served:
    """A coordinator in a thread of this process. Its port stays the same when it is started again."""

    def __init__(self, folder: pathlib.Path, plan: Plan, **settings):
        self.folder, self.plan, self.settings = folder, plan, {"config": "c0", **settings}
        with bound_socket("127.0.0.1", 0) as address:
            self.port = address.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def start(self) -> Served:
        self.failure = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        address = self.folder / server.ADDRESS
        address.unlink(missing_ok=True)
        self._thread.start()
        deadline = time.monotonic() + WAIT_S
        while self._thread.is_alive() and not address.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        if self.failure is not None:
            raise self.failure
        assert address.exists()
        return self

    def stop(self) -> None:
        """As SIGTERM does."""
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(WAIT_S)
            assert not self._thread.is_alive()

    def ended(self) -> BaseException | None:
        """Waits until it ends by itself; returns what it raised."""
        assert self._thread is not None
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.failure

    def __enter__(self) -> Served:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def _run(self) -> None:
        async def main() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await server.serve(self.folder, self.plan, TOKEN, address, stop=self._stop, **self.settings)

        try:
            with bound_socket("127.0.0.1", self.port) as address, server.log(self.folder):
                asyncio.run(main())
        except BaseException as failure:
            self.failure = failure

    def client(self, patience_s: float = WAIT_S) -> Client:
        return Client(self.url, TOKEN, patience_s)

    def trainer(self, patience_s: float = WAIT_S) -> Client:
        """A client that has joined as the trainer."""
        found = self.client(patience_s)
        found.join("trainer", FACTS)
        return found

    def both(self) -> Client:
        """A client for whoever engine it joins as, whose calls of a trainer are those of one that has joined."""
        found, trainer = self.client(), self.trainer()
        for call in ("batch", "damaged", "publish", "keep", "end"):
            setattr(found, call, getattr(trainer, call))
        return found


class Engine:
    """The loop of an engine process in threads, around a player that only pretends: this object.

    Args:
      client: of the coordinator, for this engine alone.
      seed: of how long episodes take, `play_s` at most.
      same: another play of an episode gives the same result.
    """

    def __init__(self, client: Client, seed: int = 0, play_s: float = 0.01, same: bool = True):
        self.client, self.play_s, self.same = client, play_s, same
        self.random = random.Random(seed)
        self.digest, self.version = "", -1
        self.stored, self.failure, self.killed = list[EpisodeId](), None, False
        self._put, client.put = client.put, self.put
        self.worker = EngineWorker(client, self, FACTS, "pinned", WAIT_S)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """It is heard no more, and hands nothing in."""
        self.killed = True
        self.client.close()

    def wait(self) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as failure:
            self.failure = None if self.killed else failure

    def put(self, work, version, packed):
        answer = self._put(work, version, packed)
        assert answer.outcome in (Outcome.STORED, Outcome.DUPLICATE, Outcome.LATE), answer
        if answer.outcome is Outcome.STORED:
            self.stored.append(work.episode)
        return answer

    # ---------------------------------------------------------------- a player

    def hold(self, version):
        sources = self.client.weights(version)
        assert sources is not None
        self.digest, self.version = sources.digest, version

    def expect(self, version):
        pass

    def play(self, job, report):
        assert job.work.version == self.version and job.task == task_of(*job.group)
        result = packed(job.work.episode, self.digest, "" if self.same else job.work.lease)
        threading.Timer(self.play_s * self.random.random(), report, (result, self.version)).start()

    def cancel(self, lease):
        pass

    def places(self):
        return 4

    def numbers(self):
        return {"progress": float(len(self.stored)), "tokens_per_s": 1.0}


class Trainer:
    """The trainer: weights are a chain of digests of what it read."""

    def __init__(self, client: Client, plan: Plan, keep_every: int = 2, train_s: float = 0.0):
        self.client, self.plan, self.keep_every, self.train_s = client, plan, keep_every, train_s
        self.versions = ["initial"]
        self.batches: list[Batch] = []
        self.saved = 0

    def run(self, to: int | None = None) -> None:
        """Trains up to a version, from the newest that was saved."""
        del self.versions[self.saved + 1 :], self.batches[self.saved :]
        self.client.join("trainer", FACTS)
        self._publish(self.saved)
        for step in range(self.saved, self.plan.steps if to is None else to):
            deadline = time.monotonic() + WAIT_S
            while (batch := self.client.batch(step, wait_s=5.0)) is None:
                assert time.monotonic() < deadline, self.client.status()
            self.batches.append(batch)
            time.sleep(self.train_s)
            learnt = [
                self.learnt(which, found.digest)
                for which, found in batch.results.items()
                if which.group in batch.groups
            ]
            self.versions.append(world.digest(self.versions[-1], learnt))
            self._publish(step + 1)
            if (step + 1) % self.keep_every == 0:
                assert self.client.keep(step + 1).outcome in (Outcome.STORED, Outcome.DUPLICATE)
                self.saved = step + 1

    def learnt(self, which: EpisodeId, digest: str) -> str:
        """Reads the body, as a trainer on another host does."""
        body = self.client.episode(which)
        assert body.digest == digest
        assert codec.unpack(body, "here").sample == which.sample
        return digest

    def _publish(self, version: int) -> None:
        answer = self.client.publish(version, self.versions[version], "lineage", tasks_of(self.plan, version))
        assert answer.outcome in (Outcome.STORED, Outcome.DUPLICATE), answer


@contextlib.contextmanager
def engines(url: str, count: int, **settings) -> Iterator[list[Engine]]:
    """Running engines, which end when the run does."""
    with unittest.mock.patch.multiple(worker, LONG_POLL_S=1.0, LOOK_S=0.05, BEATS_PER_LEASE=20):
        found = [Engine(Client(url, TOKEN, WAIT_S), seed, **settings) for seed in range(count)]
        try:
            yield found
            for engine in found:
                engine.wait()
        finally:
            for engine in found:
                engine.kill()
