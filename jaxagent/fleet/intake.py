"""What comes in at the coordinator, bounded in bytes and in time, and what goes out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from aiohttp import web

from jaxagent.fleet import wire
from jaxagent.fleet.wire import BadMessageError, RefusedCallError

MOST_IN_MEMORY = 2**30  # bytes of all bodies that are being read or stored
CALL_BODY_S = 20.0  # longest time for a body of JSON
Row: TypeAlias = dict[str, Any]  # a JSON object


class Call(NamedTuple):
    """A call that came in."""

    row: Row  # its body
    headers: Mapping[str, str]


class Intake:
    """Reads bodies, all of them together within a limit."""

    def __init__(self) -> None:
        self.bytes_in_memory = 0

    async def episode(self, request: web.Request) -> bytes:
        """The body of an episode. `release` gives its bytes back."""
        return await self._body(request, wire.MAX_EPISODE_BYTES, wire.BODY_S)

    def release(self, body: bytes) -> None:
        """The body is no longer in memory."""
        self.bytes_in_memory -= len(body)

    async def call(self, request: web.Request) -> Call:
        """A call with a JSON object.

        Raises:
          BadMessageError: no JSON object.
          RefusedCallError: it is not what was sent, or did not arrive, or too much comes at once.
        """
        body = await self._body(request, wire.MAX_CALL_BYTES, CALL_BODY_S)
        self.release(body)
        return Call(wire.json_object(body), request.headers)

    async def _body(self, request: web.Request, most: int, seconds: float) -> bytes:
        """Raises RefusedCallError: too slow, cut off, not what was sent, or too much at once."""
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise BadMessageError("Content-Encoding is not supported: send the body as it is")
        if (request.content_length or 0) > most:
            raise web.HTTPRequestEntityTooLarge(most, request.content_length or 0)
        body, complete = bytearray(), False
        came = wire.sum_of_call(request.method, request.raw_path, request.headers)
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.content.iter_any():
                    body += chunk
                    came.update(chunk)
                    self.bytes_in_memory += len(chunk)
                    if len(body) > most:
                        raise web.HTTPRequestEntityTooLarge(most, len(body))
                    if self.bytes_in_memory > MOST_IN_MEMORY:
                        raise RefusedCallError("busy", f"bodies of {MOST_IN_MEMORY} bytes are in memory already")
            if request.headers.get(wire.SUM) != came.hexdigest():
                raise RefusedCallError("damaged", f"the call is not what its {wire.SUM} says")
            complete = True
            return bytes(body)
        except TimeoutError:
            raise RefusedCallError("damaged", f"the body did not arrive within {seconds:g} s") from None
        except web.RequestPayloadError as failure:
            raise RefusedCallError("damaged", f"the body cannot be read: {failure}") from None
        finally:
            if not complete:
                self.bytes_in_memory -= len(body)


def reply(data: Mapping[str, Any], status: int = 200, indent: int | None = None) -> web.Response:
    """JSON."""
    text = json.dumps(data, indent=indent, separators=None if indent else (",", ":"))
    headers = {"Retry-After": "1"} if status == 503 else None
    return web.Response(body=text.encode(), status=status, headers=headers, content_type="application/json")


def failure(kind: str, message: str, status: int) -> web.Response:
    """One line on what is wrong, and a word for the client."""
    return reply({"kind": kind, "error": message}, status)


class Bell(asyncio.Event):
    """Wakes who waits for a change. What rings while he looks around is not lost."""

    async def rings(self, seconds: float) -> None:
        """Waits until it is set, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self.wait()
        self.clear()
