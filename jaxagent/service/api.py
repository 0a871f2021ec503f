"""The routes of the rollout service; `server.py` serves them, docs/rollout_service.md describes them.

Every request carries the token; every body is bounded and has a time to arrive; every long poll ends after at most
`LONGEST_POLL_S`. A mistake is answered with {"error": one line}.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from jaxagent.config import ConfigError
from jaxagent.fleet.intake import reply
from jaxagent.fleet.wire import STATUS, BadMessageError, RefusedCallError, whole_number
from jaxagent.io import connections
from jaxagent.io.connections import read_body
from jaxagent.service import groups, leases, reading, views
from jaxagent.service.episodes import DIGEST, episode_and_summary
from jaxagent.service.request import TaskRequest
from jaxagent.service.states import ServiceRules
from jaxagent.service.store import ServiceStore, StoreError

EPISODES_AT_ONCE = 16  # bodies in memory
STREAMS = 64  # of events, at once
STREAM_S, PING_S, SEND_TIMEOUT_S = 3600.0, 10.0, 30.0


class Bell:
    """Wakes everybody who waits for a change."""

    def __init__(self) -> None:
        self.next = asyncio.Event()

    def ring(self) -> None:
        """Sets the present event; who asks afterwards waits for the following one."""
        self.next.set()
        self.next = asyncio.Event()


class Api:
    """The web application around a store."""

    def __init__(self, store: ServiceStore, rules: ServiceRules, token: str, heartbeat_s: float):
        """Raises ConfigError: the token is too short."""
        if len(token) < 16:
            raise ConfigError("The rollout service's token must have at least 16 characters.")
        self._store, self._rules, self._token = store, rules, token.encode()
        self._heartbeat_s = heartbeat_s
        self._work, self._news = Bell(), Bell()
        self._closing = False
        self._bodies = asyncio.Semaphore(EPISODES_AT_ONCE)
        self._streams = 0
        self.counts: collections.Counter[str] = collections.Counter()  # since the start

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/rollout/task/submit", self._submit),
                web.get("/rollout/task/{task}", self._task),
                web.delete("/rollout/task/{task}", self._cancel),
                web.get("/rollout/status", self._status),
                web.get("/tasks", self._tasks),
                web.get("/tasks/{task}/sessions", self._sessions),
                web.get("/tasks/{task}/sessions/{sample}/episode", self._episode),
                web.get("/events", self._events),
                web.get("/nodes", self._nodes),
                web.post("/nodes/register", self._register),
                web.post("/nodes/{node}/heartbeat", self._beat),
                web.post("/nodes/{node}/take", self._take),
                web.post("/nodes/{node}/give_back", self._give_back),
                web.delete("/nodes/{node}", self._drain),
                web.put("/sessions/{task}/{sample}/{attempt}", self._finish),
            ]
        )
        app.on_shutdown.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        """Long polls and streams end now, so that the server need not wait for them."""
        self._closing = True
        self.ring()

    def ring(self) -> None:
        """Something may have changed: nodes look for work, clients for news."""
        self._work.ring()
        self._news.ring()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]):
        if not connections.has_token(request.headers, self._token):
            self.counts["wrong_tokens"] += 1
            refused = reply({"error": "the token is wrong: send 'Authorization: Bearer TOKEN'"}, 401)
            refused.force_close()  # a stranger's connection is not kept
            return refused
        try:
            return await handler(request)
        except (BadMessageError, RefusedCallError, StoreError) as failure:
            kind = failure.kind if isinstance(failure, RefusedCallError) else "busy"
            status = STATUS["malformed" if isinstance(failure, BadMessageError) else kind]
            self.counts[f"answered_{status}"] += 1
            return reply({"error": str(failure)}, status)
        except web.HTTPException as answer:
            return reply({"error": f"{request.method} {request.path}: {answer.reason}"}, answer.status)

    # ---------------------------------------------------------------- clients

    async def _health(self, request: web.Request) -> web.Response:
        await self._store.do(views.newest_event)  # the store answers
        return reply({"status": "ok"})

    async def _submit(self, request: web.Request) -> web.Response:
        task_request = TaskRequest.parse(await read_body(request, reading.MAX_BODY_BYTES, reading.BODY_TIMEOUT_S))
        answer = await self._store.do(groups.submit, self._rules, task_request)
        self.ring()
        return reply(answer)

    async def _task(self, request: web.Request) -> web.Response:
        task_id, until = reading.task_id(request), self._until(whole_number(request.query, "wait_s", 0))
        while True:
            changed = self._news.next
            group = await self._store.do(views.task, task_id)
            if group["status"] != "running" or not await self._wait(changed, until):
                return reply(group)

    async def _cancel(self, request: web.Request) -> web.Response:
        register = request.query.get("register_if_missing", "") in ("1", "true")
        answer = await self._store.do(groups.cancel, self._rules, reading.task_id(request), register)
        self.ring()
        return reply(answer)

    async def _status(self, request: web.Request) -> web.Response:
        return reply(await self._store.do(views.status) | {"since_start": dict(self.counts)})

    async def _tasks(self, request: web.Request) -> web.Response:
        return reply(await self._store.do(views.tasks, whole_number(request.query, "before", 2**53)))

    async def _sessions(self, request: web.Request) -> web.Response:
        return reply({"sessions": (await self._store.do(views.task, reading.task_id(request)))["results"]})

    async def _episode(self, request: web.Request) -> web.Response:
        sample = whole_number(request.match_info, "sample")
        body, digest = await self._store.do(views.episode, reading.task_id(request), sample)
        return web.Response(body=body, content_type="application/json", headers={DIGEST: digest})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: those after `?after=N` or Last-Event-ID, else those from now on."""
        if self._streams >= STREAMS:
            raise RefusedCallError("busy", f"{STREAMS} clients listen to events already")
        last = request.headers.get("Last-Event-ID", request.query.get("after", ""))
        after = whole_number({"after": last}, "after") if last else await self._store.do(views.newest_event)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        self._streams += 1
        try:
            end, quiet = time.monotonic() + STREAM_S, 0.0
            while time.monotonic() < end and not self._closing:
                changed = self._news.next
                rows = await self._store.do(views.events, after)
                text = "".join(
                    f"id: {seq}\nevent: {kind}\ndata: {json.dumps({'at': at, **json.loads(data)})}\n\n"
                    for seq, at, kind, data in rows
                )
                after = rows[-1][0] if rows else after
                if text or time.monotonic() >= quiet:
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        await response.write((text or ": ping\n\n").encode())
                    quiet = time.monotonic() + PING_S
                if not rows:
                    await self._wait(changed, quiet)
        except (StoreError, TimeoutError, ConnectionError):
            pass  # the stream ends; the client comes again with the last number it has
        finally:
            self._streams -= 1
        return response

    def _until(self, seconds: float) -> float:
        """When a long poll of so many seconds ends."""
        return time.monotonic() + min(reading.LONGEST_POLL_S, seconds)

    async def _wait(self, changed: asyncio.Event, until: float) -> bool:
        """Waits for a change. False: the time was over before, or the server ends."""
        left_s = until - time.monotonic()
        if left_s <= 0 or self._closing:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await changed.wait()
        return not self._closing

    # ---------------------------------------------------------------- nodes

    async def _nodes(self, request: web.Request) -> web.Response:
        return reply(await self._store.do(views.nodes))

    async def _register(self, request: web.Request) -> web.Response:
        row = await reading.row(request)
        node_id, process = reading.name(row.get("node_id"), "node_id"), reading.process(row)
        url = row.get("gateway_url", "")
        if not isinstance(url, str) or len(url) > 2000 or not url.isprintable():
            raise BadMessageError("'gateway_url' must be a text of one line")
        places = {phase: whole_number(row, f"max_{phase}_workers", 1) for phase in reading.PHASES}
        await self._store.do(leases.register, self._rules, node_id, process, url, places)
        self.ring()
        return reply({"heartbeat_interval": self._heartbeat_s, "lease_s": self._rules.lease_s})

    async def _beat(self, request: web.Request) -> web.Response:
        row = await reading.row(request)
        playing = [(reading.key(entry[:3]), reading.state(entry[3:])) for entry in reading.entries(row, "sessions")]
        who = reading.node_id(request), reading.process(row)
        answer = await self._store.do(leases.beat, self._rules, *who, playing, reading.free(row))
        if answer["moved"]:
            self._news.ring()
        return reply(answer)

    async def _take(self, request: web.Request) -> web.Response:
        """Long poll: at most `wait_s`, and `LONGEST_POLL_S`."""
        row = await reading.row(request)
        until = self._until(whole_number(row, "wait_s", 0))
        who, have = (reading.node_id(request), reading.process(row)), reading.keys(row, "have")
        while True:
            changed = self._work.next
            work = await self._store.do(leases.take, self._rules, *who, have, reading.free(row))
            if work:
                self._news.ring()
            if work or not await self._wait(changed, until):
                return reply({"work": work})

    async def _give_back(self, request: web.Request) -> web.Response:
        row = await reading.row(request)
        count = await self._store.do(leases.give_back, reading.process(row), reading.keys(row, "sessions"))
        self.ring()
        return reply({"given_back": count})

    async def _drain(self, request: web.Request) -> web.Response:
        """DELETE /nodes/{id}: it gets no more work. With ?process=P the node itself says that it ends."""
        node, process = reading.node_id(request), request.query.get("process", "")
        if process:
            await self._store.do(leases.leave, node, process)
        else:
            await self._store.do(leases.drain, node)
        self.ring()
        return reply({"node_id": node, "status": "left" if process else "draining"})

    async def _finish(self, request: web.Request) -> web.Response:
        """PUT /sessions/{task}/{sample}/{attempt}: answered when the episode is on disk."""
        sample, attempt = (whole_number(request.match_info, name) for name in ("sample", "attempt"))
        key = reading.task_id(request), sample, attempt
        try:
            async with asyncio.timeout(reading.BODY_TIMEOUT_S):
                await self._bodies.acquire()
        except TimeoutError:
            raise RefusedCallError("busy", f"{EPISODES_AT_ONCE} episodes are being received already") from None
        try:
            body = await read_body(request, reading.MAX_EPISODE_BYTES, reading.BODY_TIMEOUT_S)
            episode, result = await asyncio.to_thread(episode_and_summary, body, request.headers.get(DIGEST, ""))
            is_new = await self._store.do(leases.finish, self._rules, key, episode, result, body)
        finally:
            self._bodies.release()
        self.counts["stored" if is_new else "duplicates"] += 1
        self.ring()
        return reply({"stored": is_new, "duplicate": not is_new})
