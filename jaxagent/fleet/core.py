"""What all calls to the coordinator share: its state, who waits for what, and the one rule of when an answer leaves.

**An answer leaves only when everything that happened by then is on disk**: `written`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import pathlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from jaxagent.config.errors import failure_line
from jaxagent.fleet.admission import UnknownWorkerError
from jaxagent.fleet.book import Book
from jaxagent.fleet.fence import FencedError
from jaxagent.fleet.intake import Bell, Intake
from jaxagent.fleet.members import Member, Members
from jaxagent.fleet.status import Watch

logger = logging.getLogger("jaxagent.fleet.coordinator")
T = TypeVar("T")
THREADS = 16  # that write and read episodes
FENCE_S = 1.0  # between two looks whether another coordinator has taken over


class CoordinatorError(RuntimeError):
    """The coordinator must end; the next one goes on from what is on disk. One line."""


class Core:
    """The state of a running coordinator. Lives on one event loop.

    Args:
      book: what is on disk.
      folder: whose free space counts.
      members: who is there.
      clock: seconds that do not run backwards.

    Attributes:
      asking: the long poll of every engine that waits for episodes, which is woken when it may get some.
      stirred: set when there may be something to play.
      news: rings when there may be something to train.
      said: why the trainer has ended the run; "": it has not.
      closing: long polls end.
      failed: gets the exception that must end the process.
    """

    def __init__(self, book: Book, folder: pathlib.Path, members: Members, clock: Callable[[], float] = time.monotonic):
        self.book, self.folder, self.members, self.clock = book, folder, members, clock
        self.asking, self.stirred, self.news = dict[str, Bell](), Bell(), Bell()
        self.intake, self.watch = Intake(), Watch(clock)
        self.said, self.closing = "", False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.disk = concurrent.futures.ThreadPoolExecutor(THREADS, "disk")
        self.judging = concurrent.futures.ThreadPoolExecutor(1, "judge")
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def ended(self) -> str:
        """Why the run is over; "": it goes on."""
        record = self.book.rules.record
        if self.said or record.published < self.book.plan.steps:
            return self.said
        if any(record.wanted(which.group) for which in record.damaged()):
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

    async def written(self, written: concurrent.futures.Future[None] | None = None) -> None:
        """Waits until what happened is on disk.

        Raises:
          CoordinatorError: it will not be; the process ends.
        """
        try:
            waiting = asyncio.wrap_future(self.book.written() if written is None else written)
            waiting.add_done_callback(self._look)
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.fail(f"the ledger takes no more lines: {failure_line(error)}")
            raise CoordinatorError("the coordinator ends, since its ledger takes no more lines; ask again") from None

    def _look(self, written: asyncio.Future[None]) -> None:
        """Sees a failure also where nobody waits any more."""
        if not written.cancelled() and (error := written.exception()) is not None:
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
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
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

    def known(self, name: str, now: float) -> Member:
        """Who calls. Raises UnknownWorkerError: it must join; RefusedCallError: it must end."""
        self.members.check_newest(name)
        member = self.members.get(name)
        if member is None:
            raise UnknownWorkerError(f"worker {name} is not known: join again.")
        member.heard = now
        return member

    def gone(self, name: str, why: str) -> bool:
        """A process is not there any more; what it played waits again. False: nobody had the name."""
        lost = self.book.rules.leave(name)
        member = self.members.remove(name)
        if member is not None:
            logger.info("%s %s %s; %d episodes wait again", member.role, name, why, len(lost))
            self.stirred.set()
        return member is not None
