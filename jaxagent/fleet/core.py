"""The coordinator's state, and its calls of who is there and of the trainer; playing.py has those of engines.

Each gives what is answered. **An answer leaves only when everything that happened by then is on disk**: api.py waits
for that (`on_disk`). The trainer's calls are for who has joined as the trainer, and was not replaced since.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import hmac
import logging
import pathlib
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from jaxagent.config.errors import failure_line
from jaxagent.fleet import episodes, wire
from jaxagent.fleet.admission import Answer, Outcome, UnknownWorkerError
from jaxagent.fleet.book import Book
from jaxagent.fleet.fence import FencedError
from jaxagent.fleet.intake import Bell, Call, Intake, Row
from jaxagent.fleet.members import Member, Members
from jaxagent.fleet.record import BoundError
from jaxagent.fleet.status import Watch, note_damaged
from jaxagent.fleet.vitals import WEIGHTS
from jaxagent.fleet.wire import BadMessageError, RefusedCallError

logger = logging.getLogger("jaxagent.fleet.coordinator")
T = TypeVar("T")
THREADS = 16  # that write and read episodes
LONGEST_SWEEP_S = 1.0
FENCE_S = 1.0  # between two looks whether another coordinator has taken over


class CoordinatorError(RuntimeError):
    """The coordinator must end; the next one goes on from what is on disk. One line."""


class Core:
    """The state of a running coordinator. Lives on one event loop.

    Args:
      folder: whose free space counts.
      clock: seconds that do not run backwards.

    Attributes:
      asking: the long poll of every engine that waits for episodes, which is woken when it may get some.
      stirred: set when there may be something to play.
      news: rings when there may be something to train.
      end_reason: why the trainer has ended the run; "": it has not.
      closing: long polls end.
      failed: gets the exception that must end the process.
    """

    def __init__(self, book: Book, folder: pathlib.Path, members: Members, clock: Callable[[], float] = time.monotonic):
        self.book, self.folder, self.members, self.clock = book, folder, members, clock
        self.asking, self.stirred, self.news = dict[str, Bell](), Bell(), Bell()
        self.intake, self.watch = Intake(), Watch(clock)
        self.end_reason, self.closing = "", False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.disk = concurrent.futures.ThreadPoolExecutor(THREADS, "disk")
        self.judging = concurrent.futures.ThreadPoolExecutor(1, "judge")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._compacting = asyncio.Lock()

    @property
    def why_over(self) -> str:
        """Why the run is over; "": it goes on."""
        record = self.book.rules.record
        if self.end_reason or record.published < self.book.plan.steps:
            return self.end_reason
        if any(record.is_needed(which.group) for which in record.damaged()):
            return ""
        return "all steps are trained"

    def ring(self) -> None:
        """Everybody who waits looks again."""
        for waiting in (self.news, *self.asking.values()):
            waiting.set()

    def stir(self) -> None:
        """There may be something to play, or to train."""
        self.stirred.set()
        self.news.set()

    def look_again(self, name: str) -> None:
        """The long poll of this engine looks again, if there is one."""
        if (asking := self.asking.get(name)) is not None:
            asking.set()

    async def on_disk(self) -> None:
        """Waits until what happened is on disk.

        Raises:
          CoordinatorError: it will not be; the process ends.
        """
        try:
            waiting = asyncio.wrap_future(self.book.flush())
            waiting.add_done_callback(self._look)
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.fail(f"the ledger takes no more lines: {failure_line(error)}")
            raise CoordinatorError("the coordinator ends, since its ledger takes no more lines; ask again") from None

    def _look(self, writing: asyncio.Future[None]) -> None:
        """Sees a failure also where nobody waits any more."""
        if not writing.cancelled() and (error := writing.exception()) is not None:
            self.fail(f"the ledger takes no more lines: {failure_line(error)}")

    async def watch_fence(self) -> None:
        """Ends the process soon after another one has taken the folder over, also where nobody calls; for ever."""
        while True:
            await asyncio.sleep(FENCE_S)
            try:
                await self.in_thread(self.disk, self.book.check_fence)
            except FencedError as error:
                self.fail(failure_line(error))
            except OSError as error:  # the next line that is to be written says so too
                logger.warning("whether this is still the coordinator cannot be seen: %s", failure_line(error))

    def fail(self, reason: str) -> None:
        """The process must end."""
        if not self.failed.done():
            logger.critical("%s", reason)
            self.failed.set_exception(CoordinatorError(reason))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that outlives its request."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda future: future.cancelled() or future.exception())
        return task

    async def in_thread(self, threads: concurrent.futures.Executor, call: Callable[..., T], *args: Any) -> T:
        """What would hold up the loop."""
        return await asyncio.get_running_loop().run_in_executor(threads, call, *args)

    async def close(self, seconds: float) -> None:
        """Waits so long for what is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        self.disk.shutdown(wait=False, cancel_futures=True)
        self.judging.shutdown(wait=False, cancel_futures=True)

    # ---------------------------------------------------------------- who is there

    def member(self, name: str, now: float) -> Member:
        """Who calls. Raises UnknownWorkerError: it must join; RefusedCallError: it must end."""
        self.members.check_newest(name)
        member = self.members.get(name)
        if member is None:
            raise UnknownWorkerError(f"worker {name} is not known: join again.")
        member.heard_at = now
        return member

    def remove(self, name: str, why: str) -> bool:
        """A process is not there any more; what it played waits again. False: nobody had the name."""
        waiting_again = self.book.rules.leave(name)
        member = self.members.remove(name)
        if member is not None:
            logger.info("%s %s %s; %d episodes wait again", member.role, name, why, len(waiting_again))
            self.stirred.set()
        return member is not None

    async def join(self, call: Call) -> Row:
        """POST: a process begins, or comes back."""
        row = call.row
        role, facts = wire.text(row, "role"), wire.table(row, "facts")
        holding = wire.entries(row, "holding", wire.holding_of)
        try:
            self.members.check(role, facts, wire.text(row, "run", ""), wire.whole_number(row, "wire"))
        except RefusedCallError as error:
            logger.warning("%s on %s may not join: %s", role, facts.get("host", "?"), error)
            raise
        now, rules, was = self.clock(), self.book.rules, wire.text(row, "was", "")
        name, cancel, newest = "", (), rules.record.published
        key = call.headers.get(wire.KEY, "") or secrets.token_hex(16)
        if role == "trainer":
            name = self.members.name_of_trainer(self.book.epoch, was, wire.whole_number(facts, "rank", 0), key)
            self.end_reason = ""  # one that comes back goes on
        if was:
            self.remove(was, "joins again")
        if role == "engine":
            name, cancel = rules.join(now, holding)
        for other in self.members.add(name, role, facts, now, key):
            differs = () if (it := self.members.get(other)) is None else it.differs.items()
            told = "; ".join(f"{fact} is {theirs!r}, not {ours!r}" for fact, (ours, theirs) in differs)
            self.remove(other, f"differs from the trainer: {told}")
        member = self.members.get(name)
        assert member is not None
        labels = f", differs: {member.differs}" if member.differs else ""
        logger.info("%s %s joins from %s, holding %d%s", role, name, facts.get("host", "?"), len(holding), labels)
        self.stirred.set()
        book, why_over = self.book, self.why_over
        joined = wire.Joined(name, book.epoch, book.run, book.plan.lease_s, newest, cancel, why_over, member.key)
        return dataclasses.asdict(joined)

    async def beat(self, call: Call) -> Row:
        """POST: a process lives."""
        row = call.row
        name, now = wire.text(row, "name"), self.clock()
        member = self.member(name, now)
        cancel: tuple[str, ...] = ()
        member.phase, member.phase_s = wire.text(row, "phase", ""), wire.number(row, "phase_s", 0)
        if member.role == "engine":
            holding = wire.entries(row, "holding", wire.lease)
            fetching = member.phase == WEIGHTS and member.phase_s < self.book.plan.lease_s
            cancel = self.book.rules.beat(now, name, holding, fetching)
        member.numbers = wire.numbers(row, "numbers")
        rules = self.book.rules
        return dataclasses.asdict(
            wire.Beat(rules.record.published, cancel, self.why_over, member.drain, rules.soon(name))
        )

    async def leave(self, call: Call) -> Row:
        """POST: a process ends, or was seen to end."""
        return {"left": self.remove(wire.text(call.row, "name"), "leaves")}

    async def drain(self, call: Call) -> Row:
        """POST: a process is to finish what it has."""
        name = wire.text(call.row, "name")
        member = self.members.get(name)
        if member is not None:
            member.drain = True
            self.look_again(name)
            logger.info("%s %s is to finish what it has and leave", member.role, name)
        return {"drains": member is not None}

    async def sweeps(self) -> None:
        """Looks for who has been silent for too long, for ever."""
        lease_s = self.book.plan.lease_s
        while True:
            await asyncio.sleep(min(lease_s / 4, LONGEST_SWEEP_S))
            now = self.clock()
            if self.book.rules.expire(now):
                self.stirred.set()
            living = self.book.rules.holding()
            silent = [engine for engine in self.members.of("engine") if engine.name not in living]
            for member in [*silent, *self.members.silent(now, lease_s)]:
                self.remove(member.name, f"was silent for {now - member.heard_at:.1f} s")

    # ---------------------------------------------------------------- the trainer

    def check_trainer(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises UnknownWorkerError; RefusedCallError: who calls is no trainer."""
        name, key = headers.get(wire.NAME, ""), headers.get(wire.KEY, "")
        member = self.member(name, self.clock()) if name else None
        if member is None or member.role != "trainer":
            who = f"{member.role} {name}" if member else "a process that has not joined"
            raise RefusedCallError("refused", f"{who} asks for {path}, which is the trainer's alone.")
        if not hmac.compare_digest(member.key.encode(), key.encode("utf-8", "replace")):
            raise UnknownWorkerError(f"this process is not {name}: join.")

    async def batch(self, call: Call) -> Row:
        """POST: what a step trains on."""
        step = wire.whole_number(call.row, "step")
        begun = now = self.clock()
        end = now + min(wire.LONGEST_POLL_S, wire.number(call.row, "wait_s", 0))
        while True:
            try:
                batch = self.book.batch(step)
            except ValueError as error:
                raise BadMessageError(str(error)) from None
            except BoundError as error:
                self.fail(str(error))
                raise CoordinatorError(str(error)) from None
            if batch is not None or now >= end or self.closing:
                break
            await self.news.rings(end - now)
            now = self.clock()
        waited = self.clock() - begun
        self.members.waited(call.headers[wire.NAME], waited)
        if batch is not None:
            self.watch.formed(batch, waited)
        return {"batch": None if batch is None else wire.batch_to(batch)}

    async def publish(self, call: Call) -> Row:
        """POST: a version's weights can be fetched."""
        row = call.row
        version, digest = wire.whole_number(row, "version"), wire.text(row, "digest")
        answer = self.book.publish(version, digest, wire.text(row, "lineage"), wire.tasks_of(row))
        await self.on_disk()
        if answer.outcome is Outcome.STORED:
            logger.info("%s", self.watch.published(version, self.members))
            self.ring()
        elif answer.outcome is Outcome.DUPLICATE:
            self.stirred.set()  # it may have brought the tasks of further steps
        else:
            logger.error("%s: %s", answer.outcome.name, answer.reason)
        versions = self.book.rules.record.versions
        digest_row = {"digest": versions[version]} if version < len(versions) else {}
        return wire.answer_to(answer) | digest_row

    async def damaged(self, call: Call) -> Row:
        """POST: an episode of a batch cannot be read. LATE: it can be read here, or is another one by now."""
        which, digest = wire.episode(call.row.get("episode")), wire.text(call.row, "digest")
        damage = await self.in_thread(self.disk, self.book.why_damaged, which)
        answer = Answer(Outcome.LATE)
        if damage or which in self.book.rules.record.damaged():
            answer = self.book.rules.damaged(which, digest)
        await self.on_disk()
        note_damaged(self.folder, which, damage, answer)
        self.ring()
        return wire.answer_to(answer)

    async def keep(self, call: Call) -> Row:
        """POST: the trainer's state is saved."""
        answer, forgotten = self.book.keep(wire.whole_number(call.row, "step"))
        await self.on_disk()
        if forgotten:
            self.spawn(self._forget(forgotten))
        return wire.answer_to(answer)

    async def _forget(self, digests: list[tuple[episodes.Key, str]]) -> None:
        """Files, and lines where there are many: that they are forgotten is on disk."""
        async with self._compacting:
            await self.in_thread(self.disk, self.book.files.forget, digests)
            logger.info("%d episodes are forgotten", len(digests))
            if (compacting := self.book.compact()) is None:
                return
            try:
                count = await asyncio.shield(asyncio.wrap_future(compacting))
                logger.info("the ledger has %d lines less", count)
            except Exception as error:  # a full disk leaves the ledger as it was; all else ends the next append
                logger.warning("the ledger is not compacted: %s", failure_line(error))

    async def end(self, call: Call) -> Row:
        """POST: the run is over."""
        self.end_reason = wire.text(call.row, "reason") or "the trainer has ended"
        logger.info("the run is over: %s", self.end_reason)
        self.ring()
        return {"ended": self.end_reason}
