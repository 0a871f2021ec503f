"""An engine process's loop around whatever plays: join, beat, take, hold the right weights, play, hand in. No JAX.

    taking thread     places free -> `take` (long poll) -> `Player.hold` the version -> `Player.play`
    beating thread    several times a lease: what it holds, where it stands, its numbers -> what to give up, what is new
    sending threads   results, one by one, until the coordinator has answered
    renewing thread   with `in_flight`: the newest version, as soon as it is told of

What is in hand is bounded: places, and as many results that wait to be sent. While the coordinator is away, episodes go
on, results wait in memory, and all of it is told to the next coordinator. A version that cannot be had is never
replaced by another one: the episodes go back, and others may play them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxagent.data.codec import Packed
from jaxagent.fleet.admission import Outcome, UnknownWorkerError
from jaxagent.fleet.client import Client
from jaxagent.fleet.manifest import WeightsError
from jaxagent.fleet.neighbours import Player
from jaxagent.fleet.plan import Rule
from jaxagent.fleet.vitals import WEIGHTS, Vitals, Whereabouts
from jaxagent.fleet.wire import Job

logger = logging.getLogger(__name__)

ROLE = "engine"
BEATS_PER_LEASE = 4
LONG_POLL_S = 10.0
SENDERS = 4
LOOK_S = 0.5  # between two looks of a thread that waits for another one
MOST_REFUSED = 16  # results in a row
LEAST_PAUSE_S, MOST_PAUSE_S = 0.5, 30.0  # after a version that could not be had; doubled from time to time
LEAVE_S = 5.0  # to say goodbye to a coordinator that may be away
STOP_S = 5.0  # for threads to end
# Where it can stand; one that comes earlier hides the later ones.
ENDING, EMPTYING, JOINING = "ending", "emptying", "joining"
PLAYING, ASKING, WAITING = "playing", "asking for episodes", "waiting for a place"
PHASES = (ENDING, WEIGHTS, EMPTYING, JOINING, PLAYING, ASKING, WAITING)


@dataclasses.dataclass
class _JobInHand:
    """An episode in hand."""

    job: Job
    state: Literal["waiting", "playing", "unsent"] = "waiting"
    unwanted: bool = False


@dataclasses.dataclass(eq=False)
class EngineWorker:
    """The loop. `run` returns when the run has ended or the worker was told to end."""

    link: Client  # to the coordinator
    player: Player
    facts: Mapping[str, Any]  # what `join` tells of this process
    rule: Rule
    # Without progress for so long, a phase counts as a hang; more than the link waits for a coordinator.
    budget_s: float
    watch: Vitals | None = None  # is told of phases and progress; None: nobody

    def __post_init__(self) -> None:
        self._stands = Whereabouts(PHASES, self.budget_s, self.watch)
        self._joining = threading.Lock()
        self._changed = threading.Condition()  # guards all below
        self._name, self._lease_s = "", 1.0
        self._in_hand: dict[str, _JobInHand] = {}  # by lease
        self._version = self._newest = -1  # that the player holds, that there is; -1: none
        self._reason = ""  # why it ends
        self._grace_s: float | None = 0.0  # for what runs then; None: until it has ended
        self._failure: BaseException | None = None
        self._counts = dict.fromkeys(
            ("episodes", "late", "refused", "conflicts", "cancelled", "given_back", "weights_failed", "joins"), 0.0
        )
        self._in_vain = 0  # results in a row that were not taken
        self._seconds = {"idle_s": 0.0, "weights_s": 0.0}
        self._looked = time.monotonic()
        self._results: collections.deque[tuple[str, Packed, int]] = collections.deque()
        self._left = False  # said goodbye: nobody joins again
        self._over = threading.Event()  # threads end

    # ---------------------------------------------------------------- for the process

    def run(self) -> str:
        """Works until the run has ended, or `end` was called. Returns why it ends.

        Raises:
          RuntimeError: it plays nothing that the coordinator takes.
          Exception: what a thread died of: the coordinator is away for longer than the link waits, or a defect.
        """
        self._join("")
        loops: list[Callable[[], None]] = [self._beating, self._taking, *[self._sending] * SENDERS]
        if self.rule == "in_flight":
            loops.append(self._renewing)
        threads = [threading.Thread(target=self._guarded, args=(loop,), daemon=True) for loop in loops]
        for thread in threads:
            thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._reason or self._failure)
            if self._failure is None:
                with self._stands.phase(ENDING):
                    self._wind_up()
        finally:
            with self._changed:
                self._over.set()
                self._changed.notify_all()
            deadline = time.monotonic() + STOP_S
            for thread in threads:  # one that waits for an answer ends with the process
                thread.join(max(0.0, deadline - time.monotonic()))
        if self._failure is not None:
            raise self._failure
        return self._reason

    @property
    def joined(self) -> bool:
        """Whether the coordinator knows it, or did."""
        return bool(self._name)

    def end(self, reason: str, grace_s: float | None = 5.0) -> None:
        """Ends the work: nothing new is begun, what waits is given back, results are sent.

        Args:
          reason: what `run` returns.
          grace_s: for what runs; then it is given up. None: it may end.
        """
        with self._changed:
            shorter = self._grace_s is None or (grace_s is not None and grace_s < self._grace_s)
            if not self._reason or shorter:  # told to hurry
                self._grace_s = grace_s
            self._reason = self._reason or reason
            self._changed.notify_all()

    def numbers(self) -> dict[str, Any]:
        """What every beat tells."""
        numbers, places = self.player.numbers(), float(self.player.places())
        with self._changed:
            self._account()
            states = [job_in_hand.state for job_in_hand in self._in_hand.values()]
            in_hand = {name: float(states.count(name)) for name in ("waiting", "playing", "unsent")}
            own = {"version": float(self._version), "places": places}
            return {**numbers, **self._counts, **self._seconds, **in_hand, **own}

    # ---------------------------------------------------------------- threads

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as failure:  # whatever it is, the process must not go on without this thread
            with self._changed:
                if not self._over.is_set():
                    self._failure = self._failure or failure
                self._changed.notify_all()

    def _beating(self) -> None:
        while not self._over.wait(self._lease_s / BEATS_PER_LEASE):
            numbers = self.numbers()
            self._stands.progress(numbers.get("progress", 0.0))
            name = self._name
            try:
                beat = self.link.beat(name, self._leases(), *self._stands.now(), numbers)
            except UnknownWorkerError:
                self._join(name)
                continue
            self._learn(beat.newest, beat.cancel, beat.ended)
            if beat.soon >= 0 and not beat.drain:
                self.player.expect(beat.soon)
            if beat.drain:
                self.end("the coordinator wants fewer engines", None)

    def _taking(self) -> None:
        pause_s = LEAST_PAUSE_S
        while not self._ending():
            if not (free := self._free()):
                with self._stands.phase(WAITING), self._changed:
                    self._changed.wait_for(lambda: self._free() or self._ending(), LOOK_S)
                continue
            name = self._name
            try:
                with self._stands.phase(ASKING):
                    jobs = self.link.take(name, free, self._leases(), LONG_POLL_S)
            except UnknownWorkerError:
                self._join(name)
                continue
            with self._changed:
                if jobs or not self._running():  # an empty answer is no progress of what is stuck meanwhile
                    self._stands.sign()
                self._in_hand |= {job.work.lease: _JobInHand(job) for job in jobs}
            try:
                self._begin(jobs)
                pause_s = LEAST_PAUSE_S
            except (WeightsError, OSError) as failure:
                self._give_back(jobs)
                pause_s = self._without(jobs[0].work.version, failure, pause_s)

    def _sending(self) -> None:
        while not self._over.is_set():
            with self._changed:
                if not self._changed.wait_for(lambda: self._results or self._over.is_set(), LOOK_S):
                    continue
                if not self._results:
                    return
                lease, packed, version = self._results.popleft()
            answer = self.link.put(self._in_hand[lease].job.work, version, packed)
            with self._changed:
                self._counts["episodes"] += answer.outcome is Outcome.STORED
                self._counts["late"] += answer.outcome is Outcome.LATE
                self._counts["refused"] += answer.outcome is Outcome.REFUSED
                self._counts["conflicts"] += answer.outcome is Outcome.CONFLICT
                not_taken = answer.outcome in (Outcome.REFUSED, Outcome.CONFLICT)
                self._in_vain = self._in_vain + 1 if not_taken else 0
                in_vain = self._in_vain
                del self._in_hand[lease]
                self._changed.notify_all()
            self._stands.sign(results=1)
            if not_taken:
                logger.error("An episode was not taken (%s): %s", answer.outcome.value, answer.reason)
            if in_vain >= MOST_REFUSED:  # a defect, or hardware that errs: a process that plays on hides it
                raise RuntimeError(
                    f"The coordinator has taken none of the last {in_vain} episodes that this process has played. "
                    f"The last one: {answer.outcome.value}, {answer.reason}"
                )

    def _renewing(self) -> None:
        pause_s = LEAST_PAUSE_S
        while not self._ending():
            with self._changed:
                self._changed.wait_for(lambda: self._newest > self._version or self._ending(), LOOK_S)
                version = self._newest if self._newest > self._version else None
            if version is None or self._ending():
                continue
            try:
                self._swap(version)
                pause_s = LEAST_PAUSE_S
            except (WeightsError, OSError) as failure:
                pause_s = self._without(version, failure, pause_s)

    # ---------------------------------------------------------------- weights

    def _begin(self, jobs: Sequence[Job]) -> None:
        """Plays them under the version that they ask for.

        Raises:
          WeightsError, OSError: it cannot be had.
        """
        for job in jobs:
            self._hold(job.work.version)
            lease = job.work.lease
            with self._changed:
                self._account()
                if self._in_hand[lease].unwanted or self._ending():  # told so while the weights came
                    del self._in_hand[lease]
                    continue
                self._in_hand[lease].state = "playing"
            playing = self._stands.phase(PLAYING)
            playing.__enter__()

            def report(packed: Packed | None, version: int, lease: str = lease, playing: Any = playing) -> None:
                playing.__exit__(None, None, None)
                self._finish(lease, packed, version)

            self.player.play(job, report)

    def _hold(self, version: int) -> None:
        """Has the version that `pinned` names; with `in_flight`, one that is not older. Or the work is to end."""
        if self.rule == "in_flight":
            with self._changed:
                self._newest = max(self._newest, version)  # the renewing thread is at it
                self._changed.notify_all()
            while self._version < version and not self._ending():
                with self._stands.phase(WEIGHTS), self._changed:
                    self._changed.wait_for(lambda: self._version >= version or self._ending(), LOOK_S)
        elif self._version != version:
            with self._stands.phase(EMPTYING), self._changed:  # what was given up needs a moment; nothing else is left
                self._changed.wait_for(lambda: not self._running() or self._ending())
            if not self._ending():
                self._swap(version)

    def _swap(self, version: int) -> None:
        started = time.monotonic()
        try:
            with self._stands.phase(WEIGHTS):
                self.player.hold(version)
        finally:
            with self._changed:
                self._seconds["weights_s"] += time.monotonic() - started
        with self._changed:
            self._version = version
            self._changed.notify_all()
        self._stands.sign()

    def _without(self, version: int, failure: Exception, pause_s: float) -> float:
        """Waits after a version that could not be had. Returns the next pause."""
        stays = f"; version {self._version} stays in use" if self._version >= 0 else ""
        logger.warning("Version %d cannot be had%s: %s", version, stays, failure)
        with self._changed:
            self._counts["weights_failed"] += 1
            self._changed.wait_for(self._ending, pause_s)
        return min(2 * pause_s, MOST_PAUSE_S)

    def _give_back(self, jobs: Sequence[Job]) -> None:
        """What was not begun: the next `take` does not name it, and it waits again for anybody."""
        with self._changed:
            for job in jobs:
                job_in_hand = self._in_hand.get(job.work.lease)
                if job_in_hand is not None and job_in_hand.state == "waiting":
                    del self._in_hand[job.work.lease]
                    self._counts["given_back"] += 1

    # ---------------------------------------------------------------- what is in hand

    def _join(self, before: str) -> None:
        """Joins, unless another thread has done so since the name was `before`."""
        with self._joining:
            if self._name != before or self._left:
                return
            with self._changed:
                holding = [(lease, job_in_hand.job.work.episode) for lease, job_in_hand in self._in_hand.items()]
            with self._stands.phase(JOINING):
                joined = self.link.join(ROLE, self.facts, holding)
            with self._changed:
                self._name, self._lease_s = joined.name, joined.lease_s
                self._counts["joins"] += 1
            self._learn(joined.newest, joined.cancel, joined.ended)

    def _learn(self, newest: int, unwanted: Sequence[str], why_over: str) -> None:
        with self._changed:
            self._newest = max(self._newest, newest)
            stop = []
            for lease in unwanted:
                job_in_hand = self._in_hand.get(lease)
                if (
                    job_in_hand is not None and job_in_hand.state != "unsent"
                ):  # a finished one costs nothing more to hand in
                    job_in_hand.unwanted = True
                    stop += [lease] if job_in_hand.state == "playing" else []
            self._changed.notify_all()
        for lease in stop:
            self.player.cancel(lease)
        if why_over:
            self.end(f"the run has ended: {why_over}", 0.0)

    def _finish(self, lease: str, packed: Packed | None, version: int) -> None:
        with self._changed:
            self._account()
            if packed is None:
                self._counts["cancelled"] += 1
                del self._in_hand[lease]
            else:
                self._in_hand[lease].state = "unsent"
                self._results.append((lease, packed, version))
            self._changed.notify_all()
        self._stands.sign()

    def _wind_up(self) -> None:
        """Lets running episodes end where there is time, hands in what has ended, and gives back the rest."""
        began = time.monotonic()
        with self._changed:
            while self._failure is None and any(
                job_in_hand.state != "waiting" for job_in_hand in self._in_hand.values()
            ):
                if self._grace_s is not None and time.monotonic() >= began + self._grace_s:
                    break
                self._changed.wait(LOOK_S if self._grace_s is None else min(LOOK_S, self._grace_s))
            running = [lease for lease, job_in_hand in self._in_hand.items() if job_in_hand.state == "playing"]
        for lease in running:
            self.player.cancel(lease)
        self._left = True

        def leave() -> None:
            with contextlib.suppress(Exception):  # then the lease runs out
                self.link.leave(self._name)

        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)

    def _ending(self) -> bool:
        return bool(self._reason) or self._over.is_set()

    def _leases(self) -> list[str]:
        with self._changed:
            return list(self._in_hand)

    def _running(self) -> int:
        return sum(job_in_hand.state == "playing" for job_in_hand in self._in_hand.values())

    def _free(self) -> int:
        """Places to fill; fewer where results cannot be sent, so that what is in memory has a bound."""
        places = self.player.places()
        with self._changed:
            unsent = sum(job_in_hand.state == "unsent" for job_in_hand in self._in_hand.values())
            return max(0, places - (len(self._in_hand) - unsent) - max(0, unsent - places))

    def _account(self) -> None:
        """Adds the time since the last change to what was idle; under the lock."""
        now = time.monotonic()
        if not self._running():
            self._seconds["idle_s"] += now - self._looked
        self._looked = now
