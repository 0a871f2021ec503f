"""The coordinator's calls of who is there: join, beat, leave, drain; and who is missed."""

from __future__ import annotations

import asyncio
import logging
import secrets

from aiohttp import web

from jaxagent.fleet import wire
from jaxagent.fleet.admission import Beat
from jaxagent.fleet.core import Core
from jaxagent.fleet.intake import reply
from jaxagent.fleet.whereabouts import WEIGHTS
from jaxagent.fleet.wire import RefusedCallError

logger = logging.getLogger("jaxagent.fleet.coordinator")
LONGEST_SWEEP_S = 1.0


class Presence:
    """Handlers."""

    def __init__(self, core: Core):
        self.core = core

    async def join(self, request: web.Request) -> web.Response:
        """POST: a process begins, or comes back."""
        row = await self.core.intake.call(request)
        role, facts = wire.text(row, "role"), wire.table(row, "facts")
        holding = wire.entries(row, "holding", wire.held)
        try:
            self.core.members.check(role, facts, wire.text(row, "run", ""), wire.whole(row, "wire"))
        except RefusedCallError as error:
            logger.warning("%s on %s may not join: %s", role, facts.get("host", "?"), error)
            raise
        now, rules, was = self.core.clock(), self.core.book.rules, wire.text(row, "was", "")
        name, told = "", Beat(rules.record.published, ())
        key = request.headers.get(wire.KEY, "") or secrets.token_hex(16)
        if role == "trainer":
            name = self.core.members.name_of_trainer(self.core.book.epoch, was, wire.whole(facts, "rank", 0), key)
            self.core.said = ""  # one that comes back goes on
        if was:
            self.core.gone(was, "joins again")
        if role == "engine":
            name, told = rules.join(now, holding)
        for other in self.core.members.add(name, role, facts, now, key):
            self.core.gone(other, f"differs from the trainer: {self._differs(other)}")
        member = self.core.members.get(name)
        assert member is not None
        labels = f", differs: {member.differs}" if member.differs else ""
        logger.info("%s %s joins from %s, holding %d%s", role, name, facts.get("host", "?"), len(holding), labels)
        self.core.stirred.set()
        await self.core.written()
        book, ended = self.core.book, self.core.ended
        joined = wire.Joined(name, book.epoch, book.run, book.plan.lease_s, told.newest, told.cancel, ended, member.key)
        return reply(wire.joined_to(joined))

    async def beat(self, request: web.Request) -> web.Response:
        """POST: a process lives."""
        row = await self.core.intake.call(request)
        name, now = wire.text(row, "name"), self.core.clock()
        member = self.core.known(name, now)
        cancel: tuple[str, ...] = ()
        member.phase, member.phase_s = wire.text(row, "phase", ""), wire.number(row, "phase_s", 0)
        if member.role == "engine":
            holding = wire.entries(row, "holding", wire.lease)
            fetching = member.phase == WEIGHTS and member.phase_s < self.core.book.plan.lease_s
            cancel = self.core.book.rules.beat(now, name, holding, fetching).cancel
        member.numbers = wire.numbers(row, "numbers")
        await self.core.written()
        rules = self.core.book.rules
        told = wire.Beat(rules.record.published, cancel, self.core.ended, member.drain, rules.soon(name))
        return reply(wire.beat_to(told))

    async def leave(self, request: web.Request) -> web.Response:
        """POST: a process ends, or was seen to end."""
        name = wire.text(await self.core.intake.call(request), "name")
        left = self.core.gone(name, "leaves")
        await self.core.written()
        return reply({"left": left})

    async def drain(self, request: web.Request) -> web.Response:
        """POST: a process is to finish what it has."""
        name = wire.text(await self.core.intake.call(request), "name")
        member = self.core.members.get(name)
        if member is not None:
            member.drain = True
            self.core.look_again(name)
            logger.info("%s %s is to finish what it has and leave", member.role, name)
        return reply({"drains": member is not None})

    def _differs(self, name: str) -> str:
        member = self.core.members.get(name)
        return "" if member is None else "; ".join(f"{k} is {v[1]!r}, not {v[0]!r}" for k, v in member.differs.items())

    async def sweeps(self) -> None:
        """Looks for who has been silent for too long, for ever."""
        lease_s = self.core.book.plan.lease_s
        while True:
            await asyncio.sleep(min(lease_s / 4, LONGEST_SWEEP_S))
            now = self.core.clock()
            if self.core.book.rules.expire(now):
                self.core.stirred.set()
            living = self.core.book.rules.holding()
            silent = [engine for engine in self.core.members.of("engine") if engine.name not in living]
            for member in [*silent, *self.core.members.silent(now, lease_s)]:
                self.core.gone(member.name, f"was silent for {now - member.heard:.1f} s")
