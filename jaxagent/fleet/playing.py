"""The coordinator's calls of engines: take episodes, hand results in; and what is done with complete groups.

What stores a result or judges a group goes on when its client has gone.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
from collections.abc import Callable

from aiohttp import web

from jaxagent.config import ConfigError
from jaxagent.config.errors import failure_line
from jaxagent.data import codec
from jaxagent.data.codec import Packed
from jaxagent.fleet import wire
from jaxagent.fleet.admission import Answer, Outcome
from jaxagent.fleet.core import Core
from jaxagent.fleet.episodes import DamagedEpisodeError, name_of
from jaxagent.fleet.intake import Bell, Call, Row, failure, reply
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from jaxagent.fleet.status import note_damaged
from jaxagent.fleet.wire import RefusedCallError
from jaxagent.types import Episode

logger = logging.getLogger("jaxagent.fleet.coordinator")
Judge = Callable[[list[Episode]], bool]
LOOK_S = 0.2  # between two looks for whom there is something: time alone can make another worker's step free
PAUSE_S = 0.01  # at least between two looks, however often something changes
WOKEN = 32  # engines that are woken at once, before it is looked whether something is left
JUDGE_TRIES = 3  # of a group whose files cannot be read, and then can
OVER_S = 0.5  # before the answer that there is nothing any more: who asks at once again is no load
RESERVE_BYTES = 64 * 2**20  # of the disk that episodes leave to the ledger
FULL = (errno.ENOSPC, errno.EDQUOT)


class Playing:
    """Handlers.

    Args:
      judge: whether a complete group is learnt from, a function of its episodes; called in one thread. None: always.
    """

    def __init__(self, core: Core, judge: Judge | None):
        self.core, self._judge = core, judge
        self._storing: dict[EpisodeId, asyncio.Task[Answer]] = {}

    def begin(self) -> None:
        """Judges what a coordinator before this one has not."""
        for group in self.core.book.rules.record.unjudged():
            self.core.spawn(self._close(group))

    async def take(self, call: Call) -> Row:
        """POST: episodes to play."""
        row = call.row
        name, holding = wire.text(row, "name"), wire.entries(row, "holding", wire.lease)
        places = wire.whole_number(row, "places", most=100_000)
        begun = now = self.core.clock()
        end = now + min(wire.LONGEST_POLL_S, wire.number(row, "wait_s", 0))
        member, jobs = self.core.member(name, now), list[wire.Job]()
        asking, poll = self.core.asking, Bell()
        self.core.look_again(name)  # the newest `take` of a worker is the one that counts
        asking[name] = poll
        leases = frozenset(holding)
        try:
            while not self.core.closing and asking.get(name) is poll:
                if self.core.why_over or member.drain:  # which it learns with its next beat
                    await asyncio.sleep(min(end - now, OVER_S))
                    break
                jobs = self.core.book.take(now, name, places, holding)
                holds_less = self.core.book.rules.leases_of(name) & leases != leases
                if jobs or now >= end or (holds_less and now > begun):  # it holds less than it said: it asks anew
                    break
                await poll.rings(end - now)
                now = self.core.clock()
        finally:
            if asking.get(name) is poll:
                del asking[name]
        if not holding:
            self.core.members.waited(name, self.core.clock() - begun)
        return {"jobs": list(map(wire.job_to, jobs))}

    async def looks(self) -> None:
        """Wakes engines that wait for episodes when one of them would get some, and no others; for ever."""
        while True:
            await self.core.stirred.rings(LOOK_S)
            waiting, asking = list(self.core.asking), self.core.asking
            while waiting and self.core.book.rules.opening(self.core.clock(), asking):
                for name in waiting[:WOKEN]:
                    self.core.look_again(name)
                del waiting[:WOKEN]
                await asyncio.sleep(0)  # they take what there is
            await asyncio.sleep(PAUSE_S)

    async def put(self, request: web.Request) -> web.Response:
        """PUT: a result."""
        which = _episode(request)
        lease = wire.lease(request.query.get("lease"))
        version = wire.whole_number(request.query, "version")
        digest = wire.text(request.headers, wire.DIGEST)
        body = await self.core.intake.episode(request)
        while (other := self._storing.get(which)) is not None:  # one after the other: the first one stays
            try:
                await asyncio.wait([other])
            except BaseException:
                self.core.intake.release(body)
                raise
        task = self.core.spawn(self.store(which, lease, version, Packed(digest, body)))
        self._storing[which] = task
        return reply(wire.answer_to(await asyncio.shield(task)))

    async def store(self, which: EpisodeId, lease: str, version: int, packed: Packed) -> Answer:
        """First a look at the body, since an outcome hangs on its digest; then the file, the line, and the word."""
        rules = self.core.book.rules
        try:
            task = self.core.book.task(which.group)
            refusal = await self.core.in_thread(self.core.disk, _of_another, self.core.book.plan, which, task, packed)
            was_damaged = which in rules.record.damaged()
            answer = Answer(Outcome.REFUSED, refusal) if refusal else None
            answer = answer or rules.expected(which, lease, version, packed.digest)
            if answer is None:
                await self.core.in_thread(self.core.disk, self._write, which, packed)
                answer = rules.put(which, lease, version, packed.digest)
                if self.core.book.digest(which) != packed.digest:  # forgotten or trained while the file was written
                    await self.core.in_thread(self.core.disk, self.core.book.files.forget, [(which, packed.digest)])
                if answer.complete and self._judge is None:
                    rules.close(which.group, usable=True)
                elif answer.complete:
                    self.core.spawn(self._close(which.group))
            await self.core.on_disk()
        finally:
            self.core.intake.release(packed.body)
            del self._storing[which]
        self.core.watch.counts[answer.outcome.value] += 1
        if was_damaged:
            self._played_again(which, answer)
        if answer.outcome is Outcome.CONFLICT:
            logger.error("CONFLICT: %s", answer.reason)
        elif answer.outcome is Outcome.REFUSED:
            logger.warning("refused: %s", answer.reason)
        elif answer.complete:
            self.core.stir()
        return answer

    def _played_again(self, which: EpisodeId, answer: Answer) -> None:
        """A damaged episode was handed in: its batch may be whole now, or is lost."""
        if answer.outcome is Outcome.STORED:
            logger.info("%s was damaged, and is stored again", name_of(which))
        if answer.outcome in (Outcome.STORED, Outcome.CONFLICT):
            self.core.ring()

    def _write(self, which: EpisodeId, packed: Packed) -> None:
        """In a thread."""
        free = shutil.disk_usage(self.core.folder).free
        if free < RESERVE_BYTES + len(packed.body):
            raise RefusedCallError(
                "full_disk",
                f"{self.core.folder} has {free >> 20} MiB left, and {RESERVE_BYTES >> 20} are kept for the ledger: the "
                f"episode is not stored. Make room; it is sent again.",
            )
        try:
            self.core.book.files.put(which, packed)
        except OSError as error:
            if error.errno in FULL:
                raise RefusedCallError(
                    "full_disk", f"{self.core.folder}: the disk is full, and the episode is not stored."
                ) from None
            raise

    async def _close(self, group: GroupId, tries: int = JUDGE_TRIES) -> None:
        """Judges a complete group."""
        try:
            usable = self._judge is None or await self.core.in_thread(self.core.judging, self._is_usable, group)
        except DamagedEpisodeError as error:
            if not await self._mend(group):  # it can be read by now
                if tries == 1:
                    return self.core.fail(f"group {tuple(group)} cannot be judged: {error}")
                await self._close(group, tries - 1)
            return
        except Exception as error:
            return self.core.fail(f"group {tuple(group)} cannot be judged: {failure_line(error)}")
        self.core.book.rules.close(group, usable)
        await self.core.on_disk()
        self.core.stir()

    async def _mend(self, group: GroupId) -> bool:
        """Has what is damaged of a group played again; then it is complete again, and judged. False: nothing is."""
        any_damaged = False
        for sample in range(self.core.book.plan.attempts):
            which = EpisodeId(group, sample)
            damage = await self.core.in_thread(self.core.disk, self.core.book.why_damaged, which)
            digest = self.core.book.digest(which)
            if not damage or digest is None:
                continue
            answer = self.core.book.rules.damaged(which, digest)
            note_damaged(self.core.folder, which, damage, answer)
            any_damaged = True
            if answer.outcome is Outcome.REFUSED:
                self.core.fail(f"group {tuple(group)} cannot be judged: {damage} {answer.reason}")
        await self.core.on_disk()
        self.core.ring()
        return any_damaged

    def _is_usable(self, group: GroupId) -> bool:
        assert self._judge is not None
        return bool(self._judge(self.core.book.read(group)))

    async def episode(self, request: web.Request) -> web.Response:
        """GET: a stored result."""
        which = _episode(request)
        digest = self.core.book.digest(which)
        if digest is None:
            return failure("missing", f"{request.path}: it is not stored, or is forgotten", 404)
        await self.core.on_disk()
        path = self.core.book.path(which, digest)
        try:
            body = await self.core.in_thread(self.core.disk, path.read_bytes)
        except FileNotFoundError:
            return failure("missing", f"{request.path}: it is forgotten, or its file is gone", 404)
        except OSError as error:  # no reason to ask again: the trainer tells of it as of any other damage
            return failure("missing", f"{request.path}: it cannot be read: {error.strerror or error}", 404)
        return web.Response(body=body, headers={wire.DIGEST: digest}, content_type="application/octet-stream")


def _of_another(plan: Plan, which: EpisodeId, task: str | None, packed: Packed) -> str:
    """Why a body is not the episode's that it is handed in as; "" where it may be. In a thread.

    Raises:
      RefusedCallError: it is not what its digest says.
    """
    name = name_of(which)
    try:
        codec.check(packed, name)
    except ConfigError as error:
        raise RefusedCallError("damaged", str(error)) from None
    try:
        played_task, number = codec.task_and_sample(packed, name)
    except ConfigError as error:
        return str(error)
    if task is not None and played_task != task:
        return f"{name}: it was played at task {played_task!r:.200}, and the group's is {task!r:.200}."
    return "" if plan.numbers(which, number) else f"{name}: it is attempt {number} of the run, which is another one."


def _episode(request: web.Request) -> EpisodeId:
    step, round_, index, sample = (
        wire.whole_number(request.match_info, name) for name in ("step", "round", "number", "sample")
    )
    return EpisodeId(GroupId(step, round_, index), sample)
