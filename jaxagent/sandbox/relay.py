"""The one way out of a sandbox: connections to a port inside are copied, both ways, to one place outside.

The listening socket was made inside, in the network of the sandbox (`native/port.c`); everything else happens here. So
no program inside takes part, and what runs there can reach nothing but the target.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import Coroutine
from typing import Any

from jaxagent.sandbox.base import SandboxError

logger = logging.getLogger(__name__)
MOST_CONNECTIONS = 64  # of one sandbox at once; more of them wait in the kernel's queue
MOST_PORTS = 16  # of one sandbox
LEAST_PORT = 1024  # below it the kernel asks for a privilege that nothing inside has
BUFFER_BYTES = 2**16  # waiting in one direction of a connection, when its sender is stopped
CONNECT_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0  # for connections that were cut off to be gone
PAUSE_S = 1.0  # where a connection cannot be accepted, mostly since this process has no descriptor left
LOOPBACK = "127.0.0.1"


def check_port(port: int) -> int:
    """The port. Raises SandboxError where no sandbox can open it."""
    if port != 0 and not LEAST_PORT <= port < 2**16:
        raise SandboxError(f"a sandbox's port must be from {LEAST_PORT} to 65535, or 0 for any free one, not {port}")
    return port


def listener(fds: list[int], port: int) -> socket.socket:
    """The listening socket among the descriptors that came out of a sandbox; takes it off the list.

    Args:
      port: where it must listen.

    Raises:
      SandboxError: there is none, or it is something else.
    """
    if not fds:
        raise SandboxError("the sandbox sent no listening socket")
    try:
        sock = socket.socket(fileno=fds[-1])  # finds out what it is
    except OSError as failure:
        raise SandboxError("the sandbox sent something else than a socket") from failure
    fds.pop()
    try:
        stream = sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM
        listens = stream and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens or sock.getsockname() != (LOOPBACK, port):
            raise SandboxError(f"the sandbox sent a socket that does not listen on {LOOPBACK}:{port}")
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


class Relay:
    """All ports of one sandbox. Made and used on one asyncio loop.

    Args:
      most: connections at once.
    """

    def __init__(self, most: int = MOST_CONNECTIONS):
        self._free = asyncio.Semaphore(most)
        self._tasks: set[asyncio.Task] = set()
        self._pairs: set[_Pair] = set()
        self._messages: set[str] = set()
        self.ports = 0

    def serve(self, listening: socket.socket, target: tuple[str, int]) -> None:
        """Accepts connections until `close`, which also closes the socket."""
        self.ports += 1
        self._start(self._accept(listening, target))

    async def close(self) -> None:
        """Ends all connections, whatever is still on its way in them."""
        tasks, pairs = list(self._tasks), list(self._pairs)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await asyncio.gather(*[pair.end_event.wait() for pair in pairs])

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listening: socket.socket, target: tuple[str, int]) -> None:
        loop, connection = asyncio.get_running_loop(), None
        try:
            while True:
                await self._free.acquire()
                while connection is None:
                    try:
                        connection, _ = await loop.sock_accept(listening)
                    except ConnectionError:  # gone again
                        continue
                    except OSError as failure:
                        self._tell(f"a connection out of a sandbox cannot be accepted: {failure}")
                        await asyncio.sleep(PAUSE_S)
                self._pairs.add(pair := _Pair(connection))
                self._start(self._connect(pair, target)).add_done_callback(functools.partial(self._end, pair))
                connection = None
        finally:
            listening.close()

    async def _connect(self, pair: _Pair, target: tuple[str, int]) -> None:
        """One connection, from its first moment to its end."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: pair.outside, *target)
        except OSError as failure:  # TimeoutError is one
            why = f"no answer in {CONNECT_TIMEOUT_S:g} s" if isinstance(failure, TimeoutError) else failure
            return self._tell(f"{target[0]}:{target[1]}, where a sandbox's port leads, cannot be reached: {why}")
        await loop.connect_accepted_socket(lambda: pair.inside, pair.connection)
        pair.begin()
        await pair.end_event.wait()
        return None

    def _end(self, pair: _Pair, task: asyncio.Task) -> None:
        """Ends a pair of connections, also where its task never began, or failed."""
        pair.abort()
        self._pairs.discard(pair)
        self._free.release()
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._tell(f"a connection out of a sandbox ended: {failure!r}")

    def _tell(self, line: str) -> None:
        if line not in self._messages and len(self._messages) < MOST_PORTS:  # each only once, and not without end
            self._messages.add(line)
            logger.warning("%s", line)


class _Pair:
    """The two ends of one connection; `ended` when both are closed.

    Args:
      connection: what was accepted inside; not yet an end.
    """

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.end_event = asyncio.Event()
        self._aborted = False
        self.inside, self.outside = _End(self), _End(self)
        self.inside.other, self.outside.other = self.outside, self.inside

    def begin(self) -> None:
        """Both ends are there: lets the bytes flow."""
        for end in (self.inside, self.outside):
            if end.transport is not None:
                end.transport.resume_reading()
        if self.outside.is_lost:  # meanwhile
            self.inside.finish()

    def abort(self) -> None:
        """Closes both ends at once, as far as they are there."""
        self._aborted = True
        for end in (self.inside, self.outside):
            if end.transport is not None:
                end.transport.abort()
        if self.inside.transport is None:
            self.connection.close()
        self._look()

    def end_lost(self, end: _End, error: Exception | None) -> None:
        """One end is closed, by whoever was there, or by this side when all was said."""
        if end is self.inside and error is not None and end.other.transport is not None:
            end.other.transport.abort()  # nobody waits for an answer: the server sees that at once
        else:
            end.other.finish()  # what it has already been sent it still gets
        self._look()

    def _look(self) -> None:
        ends = self.inside, self.outside
        if all(end.is_lost or (self._aborted and end.transport is None) for end in ends):
            self.end_event.set()


class _End(asyncio.Protocol):
    """One end: what comes in goes out at the other one, which stops this one when it is too slow."""

    other: _End

    def __init__(self, pair: _Pair):
        self.transport: asyncio.Transport | None = None
        self.is_lost = False
        self._pair = pair
        self._at_eof = False

    def finish(self) -> None:
        """Closes it when what waits to be written is written."""
        if self.transport is not None:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        transport.pause_reading()  # until the other end is there

    def data_received(self, data: bytes) -> None:
        if self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        self._at_eof = True
        if self.other._at_eof:
            self.finish()
            self.other.finish()
        elif self.other.transport is not None:
            with contextlib.suppress(OSError):  # it is gone, and says so itself
                self.other.transport.write_eof()
        return True  # the other direction goes on

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._pair.end_lost(self, error)


def close_all(fds: list[int]) -> None:
    """Closes descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)
    fds.clear()
