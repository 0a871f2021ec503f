"""The coordinator's calls of the trainer: a step's batch, a version, what is saved, and the end."""

from __future__ import annotations

import asyncio
import hmac
import logging

from aiohttp import web

from jaxagent.config.errors import failure_line
from jaxagent.fleet import episodes, wire
from jaxagent.fleet.admission import Answer, Outcome, UnknownWorkerError
from jaxagent.fleet.core import CoordinatorError, Core
from jaxagent.fleet.intake import reply
from jaxagent.fleet.record import BoundError
from jaxagent.fleet.status import note_damaged
from jaxagent.fleet.wire import BadMessageError, RefusedCallError

logger = logging.getLogger("jaxagent.fleet.coordinator")


class Training:
    """Handlers. They are for who has joined as the trainer, and was not replaced since."""

    def __init__(self, core: Core):
        self.core = core
        self._compacting = asyncio.Lock()

    def _trainer(self, request: web.Request) -> str:
        """The name of the trainer that calls. Raises UnknownWorkerError; RefusedCallError: it is none."""
        name, key = request.headers.get(wire.NAME, ""), request.headers.get(wire.KEY, "")
        member = self.core.known(name, self.core.clock()) if name else None
        if member is None or member.role != "trainer":
            who = f"{member.role} {name}" if member else "a process that has not joined"
            raise RefusedCallError("refused", f"{who} asks for {request.path}, which is the trainer's alone.")
        if not hmac.compare_digest(member.key.encode(), key.encode("utf-8", "replace")):
            raise UnknownWorkerError(f"this process is not {name}: join.")
        return name

    async def batch(self, request: web.Request) -> web.Response:
        """POST: what a step trains on."""
        row = await self.core.intake.call(request)
        name, step = self._trainer(request), wire.whole(row, "step")
        begun = now = self.core.clock()
        end = now + min(wire.LONGEST_POLL_S, wire.number(row, "wait_s", 0))
        while True:
            try:
                found = self.core.book.batch(step)
            except ValueError as error:
                raise BadMessageError(str(error)) from None
            except BoundError as error:
                self.core.fail(str(error))
                raise CoordinatorError(str(error)) from None
            if found is not None or now >= end or self.core.closing:
                break
            await self.core.news.rings(end - now)
            now = self.core.clock()
        waited = self.core.clock() - begun
        self.core.members.waited(name, waited)
        if found is not None:
            self.core.watch.formed(found, waited)
        await self.core.written()
        return reply({"batch": None if found is None else wire.batch_to(found)})

    async def publish(self, request: web.Request) -> web.Response:
        """POST: a version's weights can be fetched."""
        row = await self.core.intake.call(request)
        self._trainer(request)
        version, digest, lineage = wire.whole(row, "version"), wire.text(row, "digest"), wire.text(row, "lineage")
        answer, written = self.core.book.publish(version, digest, lineage, wire.tasks_of(row))
        await self.core.written(written)
        if answer.outcome is Outcome.STORED:
            logger.info("%s", self.core.watch.published(version, self.core.members))
            self.core.ring()
        elif answer.outcome is Outcome.DUPLICATE:
            self.core.stirred.set()  # it may have brought the tasks of further steps
        else:
            logger.error("%s: %s", answer.outcome.name, answer.reason)
        versions = self.core.book.rules.record.versions
        kept = {"digest": versions[version]} if version < len(versions) else {}
        return reply(wire.answer_to(answer) | kept)

    async def damaged(self, request: web.Request) -> web.Response:
        """POST: an episode of a batch cannot be read. LATE: it can be read here, or is another one by now."""
        row = await self.core.intake.call(request)
        self._trainer(request)
        which, digest = wire.episode(row.get("episode")), wire.text(row, "digest")
        wrong = await self.core.in_thread(self.core.disk, self.core.book.why_damaged, which)
        answer = Answer(Outcome.LATE)
        if wrong or which in self.core.book.rules.record.damaged():
            answer = self.core.book.damaged(which, digest)
        await self.core.written()
        note_damaged(self.core.folder, which, wrong, answer)
        self.core.ring()
        return reply(wire.answer_to(answer))

    async def keep(self, request: web.Request) -> web.Response:
        """POST: the trainer's state is saved."""
        row = await self.core.intake.call(request)
        self._trainer(request)
        answer, forgotten = self.core.book.keep(wire.whole(row, "step"))
        await self.core.written()
        if forgotten:
            self.core.spawn(self._forget(forgotten))
        return reply(wire.answer_to(answer))

    async def _forget(self, keys: list[episodes.Key]) -> None:
        """Files, and lines where there are many: that they are forgotten is on disk."""
        async with self._compacting:
            await self.core.in_thread(self.core.disk, self.core.book.forget, keys)
            logger.info("%d episodes are forgotten", len(keys))
            if (compacting := self.core.book.compact()) is None:
                return
            try:
                count = await asyncio.shield(asyncio.wrap_future(compacting))
                logger.info("the ledger has %d lines less", count)
            except Exception as error:  # a full disk leaves the ledger as it was; all else ends the next append
                logger.warning("the ledger is not compacted: %s", failure_line(error))

    async def end(self, request: web.Request) -> web.Response:
        """POST: the run is over."""
        row = await self.core.intake.call(request)
        self._trainer(request)
        self.core.said = wire.text(row, "reason") or "the trainer has ended"
        logger.info("the run is over: %s", self.core.said)
        self.core.ring()
        await self.core.written()
        return reply({"ended": self.core.said})
