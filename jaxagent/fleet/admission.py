"""The coordinator as a state machine: calls of workers and of the trainer in, decisions and events out.

It has no clock, no files and no sockets: time is an argument, and what must survive is a list of events that its owner
writes to the ledger. The rule for the owner is one sentence: **an answer leaves only when every event that exists by
then is on disk.** After a crash, a new one is built from the events that reached the disk; callers that got no answer
call again, and every call may come twice.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable

from jaxagent.fleet.events import (
    BatchFormed,
    EpisodeDamaged,
    EpisodeStored,
    Event,
    GroupClosed,
    StateKept,
    VersionPublished,
)
from jaxagent.fleet.leases import Leases, Worker, attempts
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from jaxagent.fleet.record import Repairs, StoredResult, replayed


class UnknownWorkerError(LookupError):
    """The caller's lease ran out, or the coordinator is a new process: it must join again, and say what it plays."""


class Outcome(enum.Enum):
    """What became of something that was handed in."""

    STORED = "stored"
    DUPLICATE = "duplicate"  # the same was there already
    LATE = "late"  # another play of the same episode was there already, or the group is long trained; dropped
    CONFLICT = "conflict"  # something else is there that should be equal: a defect, or hardware that errs
    REFUSED = "refused"  # it breaks the rules; `reason` says which


@dataclasses.dataclass(frozen=True)
class Answer:
    """The outcome, and what to do about it."""

    outcome: Outcome
    reason: str = ""  # of a conflict or a refusal
    complete: bool = False  # all attempts of the group are stored: judge it, and call `close`


@dataclasses.dataclass(frozen=True)
class LeasedEpisode:
    """One episode to play."""

    episode: EpisodeId
    lease: str
    version: int  # `pinned`: exactly this one; `in_flight`: this one or newer


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a step trains on. Its digests name the files."""

    step: int
    groups: tuple[GroupId, ...]
    left_out: tuple[GroupId, ...]
    results: dict[EpisodeId, StoredResult]  # of both
    ages: dict[int, int]  # episodes to learn from, by versions of staleness


class Coordinator:
    """Who plays what, and what is trained. Not thread-safe.

    Args:
      initial: digest of version 0; "": the trainer publishes it, and until then there is nothing to play.
      epoch: which coordinator process of the run this is; each has its own.
      past: the events of the processes before.
      exact: numerics are exact: with `pinned`, two plays of an episode are equal.
    """

    def __init__(self, plan: Plan, initial: str = "", epoch: int = 0, past: Iterable[Event] = (), exact: bool = True):
        self.plan = plan
        self.record = replayed(plan, initial, past)
        self.conflicts: list[str] = []
        self.repairs = Repairs(self.record, exact)
        self._leases = Leases(plan, self._needs_no_player, epoch)
        self._events: list[Event] = []
        self.record.take_new_groups()
        self._leases.wait(attempts(plan, sorted(self.record.groups)))

    def take_events(self) -> list[Event]:
        """What happened since this was called last, to be written before the next answer leaves."""
        events, self._events = self._events, []
        return events

    # ---------------------------------------------------------------- workers

    def join(self, now: float, holding: Iterable[tuple[str, EpisodeId]] = ()) -> tuple[str, tuple[str, ...]]:
        """A worker process begins, or comes back. Returns its id, and the leases to give up.

        Args:
          now: seconds, of any clock that does not run backwards.
          holding: lease and episode of all that it plays: it goes on with those that nobody else plays.

        Raises:
          ValueError: what it calls a lease is none.
        """
        self.expire(now)
        name = self._leases.new_id()
        self._leases.workers[name] = Worker(now)
        given_up = [lease for lease, episode in holding if not self._leases.adopt(name, lease, episode)]
        return name, tuple(given_up)

    def beat(self, now: float, name: str, holding: Iterable[str], fetching: bool = False) -> tuple[str, ...]:
        """A worker lives, and holds these leases. Returns those to give up: stored, or played by somebody else.

        Args:
          holding: leases of all that it plays or has not handed in.
          fetching: weights come for what it holds, and then it asks for more: it counts as one that asks.

        Raises:
          UnknownWorkerError: it must join again.
        """
        worker = self._alive(now, name)
        if fetching:
            worker.asked_at = now
        return tuple(lease for lease in holding if lease not in worker.running)

    def take(self, now: float, name: str, places: int, holding: Iterable[str]) -> list[LeasedEpisode]:
        """Episodes for a worker with so many free places: a group's attempts at most, so that workers that ask in turn
        fill evenly. None is an answer, too, to be asked for again.

        Args:
          holding: leases of all that it plays or has not handed in. Others of its leases were in an answer that it
            never got; they wait again. With `pinned` it gets no other version while it still plays what it should
            give up.

        Raises:
          UnknownWorkerError: it must join again.
        """
        worker = self._alive(now, name)
        leases = set(holding)
        self._leases.lose(name, [lease for lease in worker.running if lease not in leases])
        if leases and not worker.running and self.plan.rule == "pinned":
            return []
        worker.free, worker.asked_at = places, now
        step = self._choose(worker)
        if step is None:
            return []
        leased = self._leases.give(name, step, min(places, self.plan.attempts))
        worker.free -= len(leased)
        return [LeasedEpisode(episode, lease, self.plan.version(step)) for lease, episode in leased]

    def opening(self, now: float, names: Iterable[str]) -> bool:
        """Whether one of these workers, who have asked and wait, would get something now. They count as asking now."""
        asking = [worker for name in names if (worker := self._leases.workers.get(name))]
        for worker in asking:
            worker.asked_at = now
        of_step = {worker.step: worker for worker in asking}  # those of one step would get the same
        return any(self._choose(worker) is not None for worker in of_step.values())

    def soon(self, name: str) -> int:
        """With `pinned`: the version that an engine would be given work under if it were empty now; -1: none, or it is.

        A guess that costs nothing but a fetch: by the time that it is empty, others may have taken that work.
        """
        worker = self._leases.workers.get(name)
        if worker is None or worker.step is None:
            return -1
        step = self._of_an_empty(worker, [step for step in self._leases.waiting() if step != worker.step])
        return -1 if step is None else self.plan.version(step)

    def leave(self, name: str) -> list[EpisodeId]:
        """A worker ends, or its end was seen. Returns what it played, which waits again."""
        return self._leases.remove(name) if name in self._leases.workers else []

    def expire(self, now: float) -> list[str]:
        """Removes the workers that were silent for longer than the lease. Returns their ids."""
        workers = self._leases.workers  # the one that was heard last stands last
        silent = list(itertools.takewhile(lambda name: now - workers[name].last > self.plan.lease_s, workers))
        for name in silent:
            self._leases.remove(name)
        return silent

    def holding(self) -> dict[str, frozenset[str]]:
        """The workers that are known, with the leases that each has."""
        return {name: frozenset(worker.running) for name, worker in self._leases.workers.items()}

    def leases_of(self, name: str) -> frozenset[str]:
        """The leases of a worker that is known."""
        return frozenset(self._leases.workers[name].running)

    # ---------------------------------------------------------------- results

    def put(self, episode: EpisodeId, lease: str, version: int, digest: str) -> Answer:
        """An episode was played. The first result of an episode stays, whoever played it under whichever lease.

        Args:
          version: of its oldest token.
          digest: of the result; equal results have equal digests.
        """
        if answer := self.expected(episode, lease, version, digest):
            return answer
        group = self.record.groups[episode.group]
        stored = group.results.get(episode.sample)
        result = stored if stored is not None and stored.digest == digest else StoredResult(digest, version, lease)
        self._happen(
            EpisodeStored(episode.group, episode.sample, *result)
        )  # one that is played again stays what it was
        self.repairs.lost.pop(episode, None)
        self._leases.finish(episode)
        return Answer(Outcome.STORED, complete=group.usable is None and self.record.is_complete(episode.group))

    def expected(self, episode: EpisodeId, lease: str, version: int, digest: str) -> Answer | None:
        """What `put` will answer where it stores nothing; None: it will store the result. Only conflicts are noted."""
        group = self.record.groups.get(episode.group)
        if group is None and self.record.forgotten(episode.group):
            return Answer(Outcome.LATE)
        if group is None or not 0 <= episode.sample < self.plan.attempts:
            return Answer(Outcome.REFUSED, f"{_name(episode)} was given to nobody.")
        if not self.record.is_needed(episode.group):
            return Answer(Outcome.LATE)
        if reason := self._wrong_version(episode, version):
            return Answer(Outcome.REFUSED, reason)
        stored = group.results.get(episode.sample)
        if stored is None or (episode.sample in group.damaged and stored.digest == digest):
            return None
        if episode.sample not in group.damaged:
            return self._compare(episode, stored, lease, digest)
        if self.repairs.takes_another(episode):
            return None
        difference = (
            f"{_name(episode)} was {stored.digest}, is damaged on disk, and was {digest} when it was played again."
        )
        self.repairs.lost[episode] = difference
        self._leases.finish(episode)
        return self._conflict(difference)

    def damaged(self, episode: EpisodeId, digest: str) -> Answer:
        """A stored result can no longer be read: the episode waits again, where playing it gives what it was.

        Args:
          digest: of the result that cannot be read. LATE: it is another one by now, or forgotten.
        """
        group = self.record.groups.get(episode.group)
        stored = None if group is None else group.results.get(episode.sample)
        if group is None or stored is None or stored.digest != digest:
            return Answer(Outcome.LATE)
        if refusal := self.repairs.refusal(episode):
            return Answer(Outcome.REFUSED, refusal)
        if episode.sample in group.damaged:
            return Answer(Outcome.DUPLICATE)
        self._happen(EpisodeDamaged(episode.group, episode.sample))
        self._leases.wait([episode])
        return Answer(Outcome.STORED)

    def found_again(self, episode: EpisodeId) -> None:
        """The file of a damaged result is whole: somebody has put it back."""
        result = self.record.groups[episode.group].results[episode.sample]
        self._happen(EpisodeStored(episode.group, episode.sample, *result))
        self.repairs.lost.pop(episode, None)

    def close(self, group: GroupId, usable: bool) -> Answer:
        """A complete group was judged; `usable` is a function of its results. Opens a further round when one is due."""
        record = self.record.groups.get(group)
        if record is None and self.record.forgotten(group):
            return Answer(Outcome.DUPLICATE)
        if record is None or len(record.results) < self.plan.attempts:
            return Answer(Outcome.REFUSED, f"group {tuple(group)} is not complete.")
        if record.usable is not None:
            if record.usable == usable:
                return Answer(Outcome.DUPLICATE)
            return self._conflict(f"group {tuple(group)} was judged usable={record.usable}, and now {usable}.")
        self._happen(GroupClosed(group, usable))
        return Answer(Outcome.STORED)

    # ---------------------------------------------------------------- the trainer

    def batch(self, step: int) -> Batch | None:
        """What a step trains on; None: not all of it is there yet. Asked again, it is the same.

        Only a damaged episode that nobody has trained on may be another sample then (`record.Repairs`).

        Raises:
          BoundError: it would hold too old a token.
          LostEpisodeError: an episode of it cannot be read, and cannot be had again.
          ValueError: a step that is over and forgotten, or whose predecessor has no batch yet.
        """
        if not self.record.kept <= step <= min(self.record.formed, self.plan.steps - 1):
            raise ValueError(
                f"Step {step} was asked for; steps {self.record.kept} to {self.record.formed} can be, of "
                f"{self.plan.steps}."
            )
        formed = self.record.batches.get(step) or self.record.form(step)
        if formed is None:
            return None
        self.repairs.check((*formed.groups, *formed.left_out))
        if not all(map(self.record.is_complete, (*formed.groups, *formed.left_out))):
            return None
        ages = self.record.ages(formed)
        if step == self.record.formed:
            self._happen(formed)
        return self._filled(formed, ages)

    def publish(self, version: int, digest: str) -> Answer:
        """A step is trained and its weights can be fetched. A trainer that replays steps publishes them again."""
        if version < len(self.record.versions):
            if self.record.versions[version] == digest:
                return Answer(Outcome.DUPLICATE)
            return self._conflict(f"version {version} was {self.record.versions[version]}, and now is {digest}.")
        if version > min(self.record.published + 1, self.record.formed):
            return Answer(Outcome.REFUSED, f"version {version} comes after {self.record.published} without its batch.")
        self._happen(VersionPublished(version, digest))
        return Answer(Outcome.STORED)

    def keep(self, step: int) -> Answer:
        """The trainer's state before `step` is saved: the batches of earlier steps, and their results, are forgotten.

        `publish` still compares all versions.
        """
        if step <= self.record.kept:
            return Answer(Outcome.DUPLICATE)
        if step > self.record.published:
            return Answer(Outcome.REFUSED, f"step {step} is beyond the newest version, {self.record.published}.")
        self._happen(StateKept(step))
        return Answer(Outcome.STORED)

    # ---------------------------------------------------------------- inside

    def _choose(self, worker: Worker) -> int | None:
        """The step whose episodes a worker gets.

        `in_flight`: the oldest. `pinned`: an engine plays one step's groups at a time, since that is one version. An
        empty one goes to the oldest step that has less than its share of the engines, so that S + 1 cohorts arise
        without being assigned. It helps another step only when that one's engines are full, or have not asked for a
        while: an engine that helps keeps that step's version until its longest episode ends. Where weights come slowly
        all would else help whoever still fetches them, and no cohort would be left.
        """
        waiting = self._leases.waiting()
        if not waiting or self.plan.rule == "in_flight":
            return waiting[0] if waiting else None
        if worker.step is not None:
            return worker.step if worker.step in waiting else None
        return self._of_an_empty(worker, waiting)

    def _of_an_empty(self, worker: Worker, waiting: list[int]) -> int | None:
        """The step that an empty engine goes to, of those that wait."""
        share = -(-len(self._leases.workers) // (self.plan.staleness + 1))
        other = None
        for step in waiting:
            players = self._leases.players(step)
            if len(players) < share:
                return step
            if other is None and all(p.free <= 0 or worker.asked_at - p.asked_at > self.plan.lease_s for p in players):
                other = step
        return other

    def _wrong_version(self, episode: EpisodeId, version: int) -> str:
        """Why a result of this version cannot be the episode's; "" where it can."""
        admitted, newest = self.plan.version(episode.group.step), self.record.published
        if self.plan.rule == "pinned":
            return "" if version == admitted else f"{_name(episode)} has version {version}; it is pinned to {admitted}."
        if admitted <= version <= newest:
            return ""
        return f"{_name(episode)} has version {version}, which is none of {admitted} to {newest}."

    def _compare(self, episode: EpisodeId, stored: StoredResult, lease: str, digest: str) -> Answer:
        """A second result. With `pinned` it must be equal; with `in_flight` another play is another sample."""
        if digest == stored.digest:
            return Answer(Outcome.DUPLICATE)
        if self.plan.rule == "in_flight" and lease != stored.lease:
            return Answer(Outcome.LATE)
        return self._conflict(f"{_name(episode)} was {stored.digest}, and now is {digest} (lease {lease}).")

    def _conflict(self, reason: str) -> Answer:
        self.conflicts.append(reason)
        return Answer(Outcome.CONFLICT, reason)

    def _filled(self, formed: BatchFormed, ages: dict[int, int]) -> Batch:
        results = {
            EpisodeId(group, sample): result
            for group in (*formed.groups, *formed.left_out)
            for sample, result in sorted(self.record.groups[group].results.items())
        }
        return Batch(formed.step, formed.groups, formed.left_out, results, ages)

    def _happen(self, event: Event) -> None:
        self.record.apply(event)
        self._events.append(event)
        self._leases.wait(attempts(self.plan, self.record.take_new_groups()))

    def _alive(self, now: float, name: str) -> Worker:
        self.expire(now)
        worker = self._leases.workers.pop(name, None)
        if worker is None:
            raise UnknownWorkerError(f"worker {name} is not known: join again.")
        self._leases.workers[name], worker.last = worker, now
        return worker

    def _needs_no_player(self, episode: EpisodeId) -> bool:
        group = self.record.groups.get(episode.group)
        if group is None or not 0 <= episode.sample < self.plan.attempts or episode in self.repairs.lost:
            return True
        if not self.record.is_needed(episode.group):
            return True
        return episode.sample in group.results and episode.sample not in group.damaged


def _name(episode: EpisodeId) -> str:
    return f"episode {tuple(episode.group)}/{episode.sample}"
