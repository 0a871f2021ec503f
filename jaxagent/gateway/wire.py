"""Bodies in and out of a web server, each within a bound: how long it may take to arrive, to be read, to be taken."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from jaxagent.engine.requests import EngineError
from jaxagent.gateway.chat import BadRequest
from jaxagent.io import connections

MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_S = 60.0  # for a body to arrive
WRITE_TIMEOUT_S = 60.0  # for an event of a stream to be taken
READERS = 2  # threads that read bodies and tokenise prompts
LARGE_BYTES = 100_000  # a body that is longer is read in a thread, and the others are served meanwhile


class Readers:
    """A few threads for what takes long with megabytes of text.

    Args:
      timeout_s: longest wait for a result.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads: concurrent.futures.Executor | None = None

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result, computed in a thread.

        Raises:
          TimeoutError: it took too long.
        """
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(READERS, "reader")
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.run_in_executor(self._threads, function, *args), self._timeout_s)

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises BadRequest: it is too long, compressed, wrongly framed or too slow."""
    try:
        return await connections.read_body(request, MAX_BODY_BYTES, BODY_TIMEOUT_S)
    except web.HTTPException as refusal:
        raise BadRequest(refusal.reason, status=refusal.status) from None


def dump(data: Any) -> bytes:
    """JSON.

    Raises:
      EngineError: a number is not finite.
    """
    try:
        return json.dumps(data, allow_nan=False).encode()
    except ValueError:
        raise EngineError("The answer has numbers that are not finite: something is wrong with the weights.") from None


def reply(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A response with JSON."""
    return web.Response(body=dump(data), status=status, headers=headers, content_type="application/json")


def event_stream() -> web.StreamResponse:
    """A response of server-sent events, not begun."""
    return web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})


async def send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Sends part of a stream.

    Raises:
      ConnectionResetError: the client does not read: it gets nothing more, not even this error.
    """
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read its stream") from None
