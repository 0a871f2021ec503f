"""Serving a web application with a bound on connections: how many, and how long one may stay without a request.

aiohttp itself waits for a request's head for ever. Here a client is cut off if it sends no whole head for `idle_s` (no
byte, half a head, or nothing after an answer), or does not read its answer; beyond `most` connections the longest idle
ones are closed first. A handler whose client has gone is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

MOST_CONNECTIONS = 1024
IDLE_S = 75.0
FINISH_S = 60.0  # for requests in hand when the server ends
SWEEP_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Watch:
    """Knows since when each connection has been idle."""

    def __init__(self) -> None:
        self._since: dict[asyncio.BaseProtocol, tuple[bool, float]] = {}  # (a request is being answered, since when)

    def middleware(self) -> Middleware:
        """The middleware that notes when a request begins and ends."""

        @web.middleware
        async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
            protocol = request.protocol
            self._since[protocol] = (True, time.monotonic())
            try:
                return await handler(request)
            finally:
                self._since[protocol] = (False, time.monotonic())

        return watch

    def sweep(self, server: web.Server, most: int, idle_s: float) -> None:
        """Closes connections that have been idle too long, and the longest idle ones above the limit."""
        now, connections = time.monotonic(), server.connections
        self._since = {c: self._since.get(c, (False, now)) for c in connections}
        idle = sorted((c for c in connections if not self._since[c][0]), key=lambda c: self._since[c][1])
        for rank, connection in enumerate(idle):
            if rank < len(connections) - most or now - self._since[connection][1] > idle_s:
                transport = connection.transport
                connection.force_close()
                if transport is not None:  # closing alone would wait until all that was written is read
                    transport.abort()


@contextlib.asynccontextmanager
async def serving(
    app: web.Application,
    sock: socket.socket,
    most: int = MOST_CONNECTIONS,
    idle_s: float = IDLE_S,
    handle_signals: bool = False,
    finish_s: float = FINISH_S,
) -> AsyncIterator[None]:
    """Serves the application on a bound socket, until the block is left; then requests in hand have `finish_s` to end.

    Signals: see `aiohttp.web.AppRunner`.
    """
    watch = _Watch()
    app.middlewares.insert(0, watch.middleware())
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        handle_signals=handle_signals,
        keepalive_timeout=idle_s,
        shutdown_timeout=finish_s,
        auto_decompress=False,  # a small body could become a large one before anyone has looked at it
    )

    async def sweeps() -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, idle_s / 2))
            if runner.server is not None:
                watch.sweep(runner.server, most, idle_s)

    await runner.setup()
    task = asyncio.create_task(sweeps())
    try:
        await web.SockSite(runner, sock).start()
        yield
    finally:
        task.cancel()
        await runner.cleanup()


def run(app: web.Application, sock: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM."""

    async def forever() -> None:
        async with serving(app, sock, handle_signals=True):
            await asyncio.Event().wait()

    with contextlib.suppress(web.GracefulExit, KeyboardInterrupt):
        asyncio.run(forever())
