"""A run in virtual time: workers, a trainer and their misfortunes around the real coordinator. No JAX, no clock.

Weights are a chain of digests, and an episode's digest tells its weights, so one wrong version anywhere shows in every
version after it. `Oracle` is the same run without coordinator, workers or time: a plain synchronous loop.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any

from jaxagent.fleet.admission import Answer, Batch, Coordinator, LeasedEpisode, Outcome, UnknownWorkerError
from jaxagent.fleet.events import Event, from_line, to_line
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from jaxagent.fleet.record import Record

SILENT = (Outcome.DUPLICATE, Outcome.LATE)


def digest(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True)
class Faults:
    """Chances per occasion, and how the run is laid out."""

    crash: float = 0.0  # of the coordinator, per call: before or after its events are on disk
    lost_answer: float = 0.0  # per call, of a coordinator that lives
    kill: float = 0.0  # of a worker, per episode begun
    pause: float = 0.0  # of a worker, per episode begun: silent for a while, then it goes on
    twice: float = 0.0  # a result is sent twice
    trainer_kill: float = 0.0  # per step
    forged: float = 0.0  # a stored result is sent again with another digest, or a result with another version
    damage: float = 0.0  # per batch that is read: one of its episodes cannot be read any more
    churn: float = 0.0  # per step: a worker joins for good, or leaves
    told: float = 0.5  # somebody sees a worker's end, and says so before its lease runs out


class Oracle:
    """What `pinned` must come to.

    Args:
      plan: the rules.
      usable: of a group played under weights.
      result: digest of an episode played under weights; None: `episode`.
    """

    def __init__(
        self,
        plan: Plan,
        usable: Callable[[GroupId, str], bool],
        result: Callable[[EpisodeId, str], str] | None = None,
    ):
        result = result or episode
        self.versions = ["initial"]
        self.batches: list[tuple[GroupId, ...]] = []
        self.played: list[tuple[GroupId, ...]] = []
        for step in range(plan.steps):
            weights = self.versions[max(0, step - plan.staleness)]
            played: list[GroupId] = []
            kept: list[GroupId] = []
            for number in range(plan.rounds):
                groups = [
                    GroupId(step, number, k) for k in range(plan.groups_per_round or plan.groups_per_step - len(kept))
                ]
                played += groups
                kept += [group for group in groups if plan.rounds == 1 or usable(group, weights)]
                if len(kept) >= plan.groups_per_step:
                    break
            self.batches.append(tuple(kept[: plan.groups_per_step]))
            self.played.append(tuple(played))
            results = [result(EpisodeId(g, s), weights) for g in self.batches[-1] for s in range(plan.attempts)]
            self.versions.append(digest(self.versions[-1], results))


def episode(which: EpisodeId, weights: str, play: str = "") -> str:
    """The digest of a played episode; `play` where another play of it is another sample."""
    return digest(which, weights, play)


def snapshot(of: Record) -> dict[str, Any]:
    """All of a record as plain values: two with equal snapshots behave alike."""
    return {
        "versions": list(of.versions),
        "groups": {
            group: (record.usable, sorted(record.results.items()), sorted(record.damaged))
            for group, record in sorted(of.groups.items())
        },
        "batches": sorted((step, batch.groups, batch.left_out) for step, batch in of.batches.items()),
        "rounds": sorted(of._rounds.items()),
        "untrained": sorted(of._untrained),
        "formed": of.formed,
        "kept": of.kept,
    }


class Process:
    """An engine worker's process."""

    def __init__(self, serial: int, places: int):
        self.serial, self.places = serial, places
        self.name: str | None = None  # None: it must join
        self.holding: dict[str, LeasedEpisode] = {}  # plays, or has not handed in
        self.alive = True
        self.silent_until = 0.0


Duration = Callable[["World", LeasedEpisode], float]


class World:
    """Runs a plan to its end; `check` says what may not happen."""

    def __init__(
        self, plan: Plan, workers: int, seed: int, faults: Faults, duration: Callable[[World, LeasedEpisode], float]
    ):
        self.plan, self.faults, self.duration = plan, faults, duration
        self.random = random.Random(seed)
        self.now, self._count = 0.0, 0
        self._queue: list[tuple[float, int, Callable, tuple]] = []
        self.disk: list[Event] = []  # what the ledger holds
        self.epoch = 0
        self.coordinator = Coordinator(plan, "initial")
        self.versions = ["initial"]  # what the trainer made; workers fetch from here
        self.trained: dict[int, Batch] = {}
        self.begun: dict[str, tuple[EpisodeId, int]] = {}  # by lease: version at the first token
        self.acknowledged: dict[EpisodeId, str] = {}
        self.ages: dict[int, int] = {}
        self.step = self.saved = 0
        self.trainings = 0  # of the trainer's processes
        self.restarts = self.kills = self.forged = self.conflicts = self.refused = self.damaged = 0
        self.idle_s = 0.0  # of the trainer
        self.processes: list[Process] = []
        for _ in range(workers):
            self.start_worker()
        self.at(0.0, self.train, 0)

    # ---------------------------------------------------------------- time

    def at(self, delay: float, action: Callable, *args) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, action, args))

    def chance(self, p: float) -> bool:
        return p > 0 and self.random.random() < p

    def run(self, most_events: int = 200_000) -> None:
        for _ in range(most_events):
            if self.step == self.plan.steps:
                return self.check_end()
            self.now, _, action, args = heapq.heappop(self._queue)
            action(*args)
        raise AssertionError(f"no end: step {self.step} of {self.plan.steps} at {self.now:.0f} s; {self.plan}")

    # ---------------------------------------------------------------- the coordinator's process

    def call(self, method: str, *args, careful: bool = False):
        """A call over the network. None: no answer came; the caller calls again.

        The owner's rule: what happened is on disk before the answer leaves. A crash comes before that or after it.
        """
        answer = getattr(self.coordinator, method)(*args)
        if isinstance(answer, Answer) and answer.complete:  # judged by the same process, in a thread
            self.at(0.2 * self.random.random(), self.judge, args[0].group, self.epoch)
        if not careful and self.chance(self.faults.crash):
            self.restart(on_disk=self.random.random() < 0.5)
            return None
        self.write()
        return None if not careful and self.chance(self.faults.lost_answer) else answer

    def write(self) -> None:
        self.disk += [from_line(to_line(event)) for event in self.coordinator.take_events()]

    def restart(self, on_disk: bool = True) -> None:
        """kill -9, and a new process that reads the ledger."""
        if on_disk:
            self.write()
        self.restarts += 1
        self.epoch += 1
        before = self.coordinator
        self.coordinator = Coordinator(self.plan, "initial", self.epoch, self.disk)
        if on_disk:
            assert snapshot(self.coordinator.record) == snapshot(before.record)
        for group in self.coordinator.record.unjudged():
            self.coordinator.close(group, self.usable(group))
        self.write()

    def judge(self, group: GroupId, epoch: int) -> None:
        if epoch == self.epoch:
            assert self.coordinator.close(group, self.usable(group)).outcome is Outcome.STORED
            self.write()

    def usable(self, group: GroupId) -> bool:
        return self.plan.rounds == 1 or int(digest("usable", group), 16) % 3 > 0

    # ---------------------------------------------------------------- workers

    def start_worker(self) -> None:
        process = Process(len(self.processes), self.random.randint(1, 2 * self.plan.attempts))
        self.processes.append(process)
        self.at(self.random.random(), self.beat, process)
        self.at(self.random.random(), self.take, process)

    def end_worker(self, process: Process, told: bool) -> None:
        process.alive = False
        if told and process.name is not None:
            self.call("leave", process.name, careful=True)

    def join(self, process: Process) -> bool:
        playing = [(lease, work.episode) for lease, work in process.holding.items()]
        answer: tuple[str, tuple[str, ...]] | None = self.call("join", self.now, playing)
        if answer is None:
            return False
        process.name, cancel = answer
        self.give_up(process, cancel)
        return True

    def give_up(self, process: Process, leases: tuple[str, ...]) -> None:
        for lease in leases:
            if self.random.random() < 0.7:  # else the news comes too late, and it goes on
                process.holding.pop(lease, None)

    def known(self, process: Process) -> bool:
        return process.name is not None or self.join(process)

    def beat(self, process: Process) -> None:
        if not process.alive:
            return
        if self.now < process.silent_until:
            return self.at(process.silent_until - self.now, self.beat, process)
        try:
            cancel = self.call("beat", self.now, process.name, list(process.holding)) if self.known(process) else None
            self.give_up(process, cancel or ())
        except UnknownWorkerError:
            process.name = None
        self.at(self.plan.lease_s / 3, self.beat, process)

    def take(self, process: Process) -> None:
        if not process.alive:
            return
        if self.now < process.silent_until:
            return self.at(process.silent_until - self.now, self.take, process)
        works: list[LeasedEpisode] | None = None
        free = process.places - len(process.holding)
        try:
            if free > 0 and self.known(process):
                works = self.call("take", self.now, process.name, free, list(process.holding))
        except UnknownWorkerError:
            process.name = None
        assert works is None or len(works) <= free
        for work in works or []:
            self.begin(process, work)
        self.at(0.7 + self.random.random(), self.take, process)

    def begin(self, process: Process, work: LeasedEpisode) -> None:
        assert work.lease not in self.begun, "a lease was given twice"
        assert work.version < len(self.versions), "a version that does not exist"
        newest = self.coordinator.record.published
        assert work.episode.group.step <= newest + self.plan.staleness, "admitted too early"
        pinned = self.plan.rule == "pinned"
        version = work.version if pinned else self.random.randint(work.version, newest)
        self.begun[work.lease] = (work.episode, version)
        process.holding[work.lease] = work
        if pinned:
            assert len({other.version for other in process.holding.values()}) == 1, "two versions in one engine"
        self.at(self.duration(self, work), self.finish, process, work)
        if self.chance(self.faults.kill):
            self.kills += 1
            self.end_worker(process, self.chance(self.faults.told))
            self.at(5 * self.random.random(), self.start_worker)
        elif self.chance(self.faults.pause):
            process.silent_until = self.now + 3 * self.plan.lease_s * self.random.random()

    def finish(self, process: Process, work: LeasedEpisode) -> None:
        if not process.alive or work.lease not in process.holding:
            return
        if self.now < process.silent_until:
            return self.at(process.silent_until - self.now, self.finish, process, work)
        which, version = self.begun[work.lease]
        text = episode(which, self.versions[version], "" if self.plan.rule == "pinned" else work.lease)
        if self.chance(self.faults.forged):
            self.forge(which, work, version, text)
        answer: Answer | None = self.call("put", which, work.lease, version, text)
        if answer is None:
            return self.at(self.random.random(), self.finish, process, work)
        process.holding.pop(work.lease)
        assert answer.outcome in (Outcome.STORED, *SILENT), answer
        if self.chance(self.faults.twice):
            again: Answer = self.call("put", which, work.lease, version, text, careful=True)
            assert again.outcome in SILENT, again
        if answer.outcome is Outcome.STORED:
            assert which not in self.acknowledged, "stored twice"
        if answer.outcome is not Outcome.LATE:
            assert self.acknowledged.setdefault(which, text) == text, "another result is there"

    def forge(self, which: EpisodeId, work: LeasedEpisode, version: int, text: str) -> None:
        """What no honest worker sends is told apart, and changes nothing."""
        before = snapshot(self.coordinator.record)
        self.forged += 1
        there = self.coordinator.record.groups.get(which.group)
        stored = there is not None and which.sample in there.results and which.sample not in there.damaged
        wrong = [
            (which, work.lease, self.plan.version(which.group.step) - 1, text),
            (which, work.lease, len(self.versions), text),
            (which._replace(sample=self.plan.attempts), work.lease, version, text),
            (which._replace(group=GroupId(self.plan.steps, 0, 0)), work.lease, version, text),
        ]
        for args in wrong:
            outcome = self.call("put", *args, careful=True).outcome
            assert outcome is Outcome.REFUSED or (there is None and outcome is Outcome.LATE), (outcome, args)
        if stored:
            theirs = there.results[which.sample].lease
            assert self.call("put", which, theirs, version, "forged", careful=True).outcome is Outcome.CONFLICT
        assert snapshot(self.coordinator.record) == before

    # ---------------------------------------------------------------- the trainer

    def train(self, training: int) -> None:
        """One step of the trainer's process `training`."""
        if training != self.trainings:
            return
        batch: Batch | None = self.call("batch", self.step)
        if batch is None:
            waited = 0.7 + 0.5 * self.random.random()
            self.idle_s += waited
            return self.at(waited, self.train, training)
        if self.chance(self.faults.damage) and self.damage(batch):
            return self.at(0.1, self.train, training)
        self.check_batch(batch)
        self.at(self.train_s(), self.trained_step, training, batch)

    def damage(self, batch: Batch) -> bool:
        """The trainer cannot read an episode. Whether it is played again, so that the batch must be asked for again."""
        which = self.random.choice(sorted(batch.results))
        text = batch.results[which].digest
        told: Answer | None = self.call("damaged", which, text)
        if told is None:
            told = self.call("damaged", which, text, careful=True)
        trained = batch.step + 1 < len(self.coordinator.record.versions)
        pinned = self.plan.rule == "pinned"
        if told.outcome is Outcome.REFUSED:
            assert trained and not pinned, told
            return False  # somebody puts the file back
        assert told.outcome in (Outcome.STORED, Outcome.DUPLICATE), told
        assert self.call("damaged", which, "another", careful=True).outcome is Outcome.LATE
        self.damaged += 1
        self.acknowledged.pop(which, None)
        if not pinned:  # nobody has trained on it: another sample is as good
            self.trained.pop(batch.step, None)
        return True

    def train_s(self) -> float:
        return 3 * self.random.random()

    def trained_step(self, training: int, batch: Batch) -> None:
        if self.chance(self.faults.trainer_kill):
            self.trainings += 1
            self.step = self.saved  # updates since the bundle are replayed
            return self.at(2.0, self.train, self.trainings)
        learnt = [result.digest for which, result in batch.results.items() if which.group in set(batch.groups)]
        text = digest(self.versions[batch.step], learnt)
        if len(self.versions) == batch.step + 1:
            self.versions.append(text)
        assert self.versions[batch.step + 1] == text, "a replayed step came to other weights"
        self.publish(training, batch.step + 1)

    def publish(self, training: int, version: int) -> None:
        answer: Answer | None = self.call("publish", version, self.versions[version])
        if answer is None:
            return self.at(0.1, self.publish, training, version)
        assert answer.outcome in (Outcome.STORED, Outcome.DUPLICATE), answer
        self.step = version
        if self.random.random() < 0.3 and self.step < self.plan.steps:
            assert self.call("keep", self.step, careful=True).outcome in (Outcome.STORED, Outcome.DUPLICATE)
            self.saved = max(self.saved, self.step)
        self.change_workers()
        self.at(0.0, self.train, training)

    def change_workers(self) -> None:
        """Elasticity: one joins, or one leaves, with or without having finished its work."""
        if self.chance(self.faults.churn):
            living = [process for process in self.processes if process.alive]
            if len(living) > 1 and self.random.random() < 0.5:
                self.end_worker(self.random.choice(living), told=self.random.random() < 0.7)
            else:
                self.start_worker()

    # ---------------------------------------------------------------- what must hold

    def check_batch(self, batch: Batch) -> None:
        assert self.trained.setdefault(batch.step, batch) == batch, "a batch changed"
        ages = [
            batch.step - self.begun[result.lease][1] for w, result in batch.results.items() if w.group in batch.groups
        ]
        assert max(ages, default=0) <= self.plan.bound, f"age {max(ages)} of at most {self.plan.bound}"
        assert sum(batch.ages.values()) == len(ages) == len(batch.groups) * self.plan.attempts
        for age in ages:
            assert batch.ages[age] == ages.count(age)
            self.ages[age] = self.ages.get(age, 0) + 1
        for which, result in batch.results.items():
            assert self.acknowledged.get(which, result.digest) == result.digest, "an acknowledged result was replaced"

    def check_end(self) -> None:
        plan = self.plan
        assert sorted(self.trained) == list(range(plan.steps))
        batches = [self.trained[step] for step in range(plan.steps)]
        played = [which for batch in batches for which in batch.results]
        assert len(played) == len(set(played)), "an episode twice"
        assert set(self.acknowledged) <= set(played), "an acknowledged episode was lost"
        assert all(
            len({w.sample for w in batch.results if w.group == g}) == plan.attempts
            for batch in batches
            for g in batch.groups
        )
        if plan.window == 1:
            oracle = Oracle(plan, lambda group, _: self.usable(group))
            assert [batch.groups for batch in batches] == oracle.batches
            assert [tuple(sorted((*b.groups, *b.left_out))) for b in batches] == oracle.played
            if plan.rule == "pinned":
                assert self.versions == oracle.versions
        else:
            trained = [plan.ordinal(group) for batch in batches for group in batch.groups]
            assert sorted(trained) == list(range(plan.steps * plan.groups_per_step))
            for at, ordinal in enumerate(trained):  # it overtook only what stood within the window
                assert ordinal < min(trained[at:]) + plan.window
        again = Coordinator(plan, "initial", self.epoch + 1, self.disk)
        assert snapshot(again.record) == snapshot(self.coordinator.record)
        assert again.record.versions == self.versions
