"""Who comes in to a worker: connections are counted, and must show the token soon.

A connection that has not sent a request with the token holds a descriptor. So it has `HEAD_S` before it says anything
and as much again from then on, and where there are too many connections, the oldest of those makes room for the newest.
What it sends does not count: a stranger can hold a connection with a whole head, too, by a body that never ends.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from jaxagent.io.connections import MOST_CONNECTIONS

HEAD_S = 10.0
BACKLOG = 128
TOLD_EVERY_S = 60.0


class Door:
    """Makes the protocol of each connection.

    Args:
      inside: makes the protocol that serves requests.
      most: connections at once.
      head_s: for the first byte, and from there to the first request that is let in.
    """

    def __init__(self, inside: Callable[[], asyncio.Protocol], most: int = MOST_CONNECTIONS, head_s: float = HEAD_S):
        self.inside, self.most, self.head_s = inside, most, head_s
        self.open: set[_Guest] = set()
        self.waiting: dict[_Guest, None] = {}  # strangers, the oldest first

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return _Guest(self)


def let_in(transport: asyncio.Transport | None) -> None:
    """The connection has shown the token: it may stay. One that came through no door stays anyway."""
    guest = transport.get_protocol() if transport is not None else None
    if isinstance(guest, _Guest):
        guest.known()


class _Guest(asyncio.Protocol):
    """One connection: passes everything on, and ends where nobody lets it in."""

    def __init__(self, door: Door):
        self._door, self._inside = door, door.inside()
        self._transport: asyncio.Transport | None = None
        self._late: asyncio.TimerHandle | None = None
        self._silent = True

    def connection_made(self, transport: Any) -> None:
        door, self._transport = self._door, transport
        door.open.add(self)
        door.waiting[self] = None
        self._wait()
        self._inside.connection_made(transport)
        if len(door.open) > door.most:
            next(iter(door.waiting)).end()

    def end(self) -> None:
        """Closes the connection without an answer."""
        self.known()
        if self._transport is not None:
            self._transport.abort()

    def _wait(self) -> None:
        self._late = asyncio.get_running_loop().call_later(self._door.head_s, self.end)

    def known(self) -> None:
        """Nothing is waited for any more."""
        self._door.waiting.pop(self, None)
        if self._late is not None:
            self._late.cancel()

    def data_received(self, data: bytes) -> None:
        if self._silent and self in self._door.waiting:  # a loop that was held up reads this as its time is over
            self._late.cancel()
            self._wait()
        self._silent = False
        self._inside.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inside.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._door.open.discard(self)
        self.known()
        self._inside.connection_lost(error)

    def pause_writing(self) -> None:
        self._inside.pause_writing()

    def resume_writing(self) -> None:
        self._inside.resume_writing()


async def listen(inside: Callable[[], Any], address: socket.socket, most: int = MOST_CONNECTIONS) -> asyncio.Server:
    """Serves connections to a bound socket. That none can be accepted is said once a minute, not each time."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(functools.partial(_failed, [-TOLD_EVERY_S]))
    return await loop.create_server(Door(inside, most), sock=address, backlog=BACKLOG)


def _failed(told: list[float], loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not str(context.get("message")).startswith("socket.accept()"):
        return loop.default_exception_handler(context)
    if time.monotonic() - told[0] > TOLD_EVERY_S:
        told[0] = time.monotonic()
        print(f"connections cannot be accepted: {context.get('exception')}", file=sys.stderr, flush=True)
    return None
