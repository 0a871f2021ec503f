"""Serving a web application with a bound on connections: how many, and how long one may stay without a request.

aiohttp itself waits for a request for ever. Here a client is cut off if it sends no whole head for `idle_s` (no byte,
half a head, or nothing after an answer), or for so long no byte of its body; beyond `most` connections some are closed
whatever they wait for, those that still send first. A handler whose client has gone is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import math
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

logger = logging.getLogger(__name__)
MOST_CONNECTIONS = 4096
IDLE_S = 75.0
FINISH_S = 60.0  # for requests in hand when the server ends
SWEEP_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass
class _Connection:
    """A connection: the request that is being answered, and since when nothing has come that it must still send."""

    opened: float  # when a sweep first saw it
    since: float
    request: web.Request | None = None
    arrived: int = 0  # bytes of the request's body

    @property
    def sends(self) -> bool:
        """Whether it is the client's turn: no request, or not all of its body."""
        return self.request is None or not self.request.content.is_eof()


Watched = dict[asyncio.BaseProtocol, _Connection]


def _watching(watched: Watched) -> Middleware:
    """The middleware that notes when a request begins and ends."""

    @web.middleware
    async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
        now = time.monotonic()
        connection = watched.setdefault(request.protocol, _Connection(now, now))
        connection.since, connection.request, connection.arrived = now, request, 0
        try:
            return await handler(request)
        except ConnectionResetError as failure:
            if request.transport is not None and not request.transport.is_closing():
                raise
            logger.debug("%s %s: the client has left: %s", request.method, request.path, failure)
            return web.Response()  # which goes nowhere
        finally:
            connection.since, connection.request, connection.arrived = time.monotonic(), None, 0

    return watch


def _sweep(
    watched: Watched,
    server: web.Server,
    most: int,
    idle_s: float,
    trusted: Container[asyncio.BaseTransport | None],
    stranger_s: float,
) -> None:
    """Closes connections that send nothing for too long, those that stay strangers too long, and those above the limit.

    Of these first the ones that have still to send, strangers before others and the longest idle before others;
    then the newest requests.
    """
    now, connections = time.monotonic(), server.connections
    for old in watched.keys() - set(connections):
        del watched[old]
    for connection in connections:
        seen = watched.setdefault(connection, _Connection(now, now))
        arrived = seen.request.content.total_bytes if seen.request is not None else 0
        if arrived != seen.arrived or getattr(connection, "_reading_paused", False):  # it waits for the handler
            seen.arrived, seen.since = arrived, now
    senders = [c for c in connections if watched[c].sends]
    senders.sort(key=lambda c: (c.transport in trusted, watched[c].since))
    others = sorted((c for c in connections if not watched[c].sends), key=lambda c: -watched[c].since)
    late = [c for c in senders if now - watched[c].since > idle_s]
    late += [c for c in connections if c.transport not in trusted and now - watched[c].opened > stranger_s]
    for connection in {*late, *[*senders, *others][: max(0, len(connections) - most)]}:
        transport = connection.transport
        connection.force_close()
        if transport is not None:  # closing alone would wait until all that was written is read
            transport.abort()


def has_token(headers: Mapping[str, str], token: bytes) -> bool:
    """Whether a request says "Authorization: Bearer TOKEN", found in the same time however much of it is right."""
    given_token = headers.get("Authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given_token.encode("utf-8", "surrogateescape"), token)


async def read_body(request: web.Request, most: int, timeout_s: float) -> bytes:
    """The whole body, of so many bytes at most. What its headers say of a character set is not asked: JSON is UTF-8.

    Raises:
      web.HTTPException: it is too long, compressed, wrongly framed or too slow; its reason says so in one line.
    """
    if (encoding := request.headers.get("Content-Encoding", "identity").lower()) != "identity":
        reason = f"Content-Encoding {encoding[:40]!r} is not supported: send the body as it is"
        raise web.HTTPUnsupportedMediaType(reason=reason)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > most:
                    raise web.HTTPRequestEntityTooLarge(most, len(body), reason=f"the body may have {most} bytes")
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"the body did not arrive within {timeout_s:g} s") from None
    except (web.RequestPayloadError, HttpProcessingError) as failure:  # cut off, or wrongly framed
        raise web.HTTPBadRequest(reason=" ".join(f"the body cannot be read: {failure}".split())) from None
    return bytes(body)


def raise_descriptors() -> int:
    """Raises the soft limit of open files as far as it goes; returns how many connections leave others theirs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system whose hard limit is more than it gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(16, min(MOST_CONNECTIONS, soft // 2))


def _in_one_line(record: logging.LogRecord) -> bool:
    """What a stranger sends that is no request is a line of the log, not a traceback."""
    failure = record.exc_info[1] if record.exc_info else None
    if isinstance(failure, HttpProcessingError):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {failure.message[:200]!r}", (), None
    return True


logger.addFilter(_in_one_line)


@contextlib.asynccontextmanager
async def serving(
    app: web.Application,
    sock: socket.socket,
    most: int | None = None,
    idle_s: float = IDLE_S,
    handle_signals: bool = False,
    finish_s: float = FINISH_S,
    trusted: Container[asyncio.BaseTransport | None] = (),
    stranger_s: float = math.inf,
) -> AsyncIterator[None]:
    """Serves the application on a bound socket, until the block is left; then requests in hand have `finish_s` to end.

    Args:
      most: connections at once; None for half of the open files that this process may have, at most 4,096.
      handle_signals: see `aiohttp.web.AppRunner`.
      trusted: transports of the connections that have shown who they are.
      stranger_s: a connection that is not among the trusted ones after so many seconds is closed, whatever it sends.
    """
    watched: Watched = {}
    bound = raise_descriptors() if most is None else most
    app.middlewares.insert(0, _watching(watched))
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        handle_signals=handle_signals,
        logger=logger,
        keepalive_timeout=idle_s,
        shutdown_timeout=finish_s,
        auto_decompress=False,  # a small body could become a large one before anyone has looked at it
    )

    async def sweeps() -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, idle_s / 2, stranger_s / 2))
            if runner.server is not None:
                _sweep(watched, runner.server, bound, idle_s, trusted, stranger_s)

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
