"""The coordinator's routes. `server.py` serves them; docs/asynchronous_internals.md has the table of calls.

Every request carries the token; every body, every answer and every handler's time is bounded. A mistake is answered
with {"kind": a word for the client, "error": one line}. Every answer carries its SHA-256, and that of what was asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import shutil
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web

from jaxagent.config import ConfigError
from jaxagent.config.errors import failure_line
from jaxagent.fleet import wire
from jaxagent.fleet.admission import UnknownWorkerError
from jaxagent.fleet.core import CoordinatorError, Core
from jaxagent.fleet.intake import Call, Row, failure, reply
from jaxagent.fleet.playing import Judge, Playing
from jaxagent.fleet.record import LostEpisodeError
from jaxagent.fleet.status import metrics, status
from jaxagent.fleet.wire import BadMessageError, RefusedCallError
from jaxagent.io import connections

logger = logging.getLogger("jaxagent.fleet.coordinator")
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
METRICS = "text/plain; version=0.0.4; charset=utf-8"
FINISH_S = 5.0  # for what is under way when it ends
LEAST_TOKEN = 16  # characters

KINDS: dict[type[Exception], str] = {
    BadMessageError: "malformed",
    UnknownWorkerError: "unknown_worker",
    LostEpisodeError: "lost",
    CoordinatorError: "ending",
}


class Api:
    """The web application.

    Raises:
      ConfigError: the token is too short, or no header can have it.
    """

    def __init__(self, core: Core, token: str, judge: Judge | None = None):
        if len(token) < LEAST_TOKEN or not (token.isascii() and token.isprintable()) or token != token.strip():
            raise ConfigError(f"The coordinator's token must have at least {LEAST_TOKEN} characters, printable ASCII.")
        self.core, self._token = core, token.encode()
        self._playing = Playing(core, judge)

    def app(self) -> web.Application:
        """The routes."""
        app, call = web.Application(middlewares=[self._guard]), self._call
        of_trainer = functools.partial(call, of_trainer=True)
        episode_route = r"/v1/episodes/{step:\d+}/{round:\d+}/{number:\d+}/{sample:\d+}"
        app.add_routes(
            [
                web.post("/v1/join", call(self.core.join)),
                web.post("/v1/beat", call(self.core.beat)),
                web.post("/v1/leave", call(self.core.leave)),
                web.post("/v1/drain", call(self.core.drain)),
                web.post("/v1/take", call(self._playing.take)),
                web.put(episode_route, self._playing.put),
                web.get(episode_route, self._playing.episode),
                web.post("/v1/batch", of_trainer(self.core.batch)),
                web.post("/v1/publish", of_trainer(self.core.publish)),
                web.post("/v1/damaged", of_trainer(self.core.damaged)),
                web.post("/v1/keep", of_trainer(self.core.keep)),
                web.post("/v1/end", of_trainer(self.core.end)),
                web.get(r"/v1/weights/{version:\d+}", self.weights),
                web.get("/v1/status", self.status),
                web.get("/metrics", self.metrics),
            ]
        )
        app.cleanup_ctx.append(self._lifetime)
        app.on_shutdown.append(self._shut)
        return app

    def _call(self, answer_of: Callable[[Call], Awaitable[Row]], of_trainer: bool = False) -> Handler:
        """A handler that reads a call, and sends its answer when everything that happened by then is on disk."""

        @functools.wraps(answer_of)
        async def handler(request: web.Request) -> web.Response:
            call = await self.core.intake.call(request)
            if of_trainer:
                self.core.check_trainer(request.path, request.headers)
            row = await answer_of(call)
            await self.core.on_disk()
            return reply(row)

        return handler

    async def _lifetime(self, app: web.Application):
        forever = self.core.sweeps(), self._playing.looks(), self.core.watch.measure(), self.core.watch_fence()
        tasks = list(map(asyncio.create_task, forever))
        for task in tasks:  # of those that have no end: without them nobody would miss a dead engine
            task.add_done_callback(
                lambda future: future.cancelled() or self.core.fail(f"no sweeps: {future.exception()!r}")
            )
        self._playing.begin()
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.core.close(FINISH_S)

    async def _shut(self, app: web.Application) -> None:
        """Long polls end now."""
        self.core.closing = True
        self.core.ring()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.Response:
        answer = await self._answer(request, handler)
        assert isinstance(answer, web.Response) and isinstance(answer.body, bytes)
        call_sum = wire.sum_of_call(request.method, request.raw_path, request.headers)
        digest = answer.headers.get(wire.DIGEST, "")
        answer.headers[wire.SUM] = wire.sum_of_answer(call_sum, answer.status, digest, answer.body)
        answer.headers[wire.RUN] = self.core.book.run  # also for who has not this run's token
        return answer

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        counts = self.core.watch.counts
        if not connections.has_token(request.headers, self._token):
            counts["wrong_tokens"] += 1
            refused = failure("token", "the token is wrong: send 'Authorization: Bearer TOKEN'", 401)
            refused.force_close()  # a stranger's connection is not kept
            return refused
        counts[getattr(request.match_info.handler, "__name__", "none")] += 1
        counts["repeated"] += request.headers.get(wire.ATTEMPT, "1").partition("-")[0] != "1"
        try:
            run = request.headers.get(wire.RUN, "")
            if run and run != self.core.book.run:
                raise RefusedCallError(
                    "refused", f"the call is of run {run}; this coordinator's is {self.core.book.run}"
                )
            async with asyncio.timeout(wire.CALL_S + (wire.BODY_S if request.method == "PUT" else wire.LONGEST_POLL_S)):
                return await handler(request)
        except (RefusedCallError, *KINDS) as error:
            kind = error.kind if isinstance(error, RefusedCallError) else KINDS[type(error)]
            counts[f"answered_{kind}"] += 1
            if kind == "damaged" and counts["answered_damaged"] == 1:
                who = f"{request.headers.get(wire.NAME, '')!r:.80} at {request.remote}"
                logger.warning("a call of %s came in damaged (%s): it is sent again; this is said once", who, error)
            return failure(kind, str(error), wire.STATUS[kind])
        except TimeoutError:
            return failure("busy", f"{request.method} {request.path} took too long", 503)
        except web.HTTPException as answer:
            return failure("http", f"{request.method} {request.path}: {answer.reason}", answer.status)
        except ConnectionResetError:
            raise
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            return failure("defect", failure_line(error), 500)

    # ---------------------------------------------------------------- what anybody can read

    async def weights(self, request: web.Request) -> web.Response:
        """GET: where a version's weights are."""
        version = wire.whole_number(request.match_info, "version")
        versions = self.core.book.rules.record.versions
        if version >= len(versions):
            return failure("missing", f"version {version} is not published; the newest is {len(versions) - 1}", 404)
        urls, trainers = self.core.members.sources(version, request.headers.get(wire.NAME, ""))
        sources = wire.Sources(version, versions[version], self.core.book.lineage(version), tuple(urls), trainers)
        await self.core.on_disk()
        return reply(dataclasses.asdict(sources))

    async def status(self, request: web.Request) -> web.Response:
        """GET: everything that a person asks first."""
        return reply(await self._status(), indent=2)

    async def metrics(self, request: web.Request) -> web.Response:
        """GET: its numbers, as Prometheus reads them."""
        return web.Response(body=metrics(await self._status()).encode(), headers={"Content-Type": METRICS})

    async def _status(self) -> dict[str, Any]:
        row = status(self.core.book, self.core.members, self.core.watch, self.core.clock(), self.core.why_over)
        free = (await self.core.in_thread(self.core.disk, shutil.disk_usage, self.core.folder)).free
        return row | {"disk_free_mib": free >> 20}
