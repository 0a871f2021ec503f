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
BUFFER_BYTES = 2**16  # of one direction of a connection; what the kernel's own buffers hold comes on top
CONNECT_TIMEOUT_S = 30.0
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
        self._messages: set[str] = set()
        self.ports = 0

    def serve(self, listening: socket.socket, target: tuple[str, int]) -> None:
        """Accepts connections until `close`, which also closes the socket."""
        self.ports += 1
        self._start(self._accept(listening, target))

    async def close(self) -> None:
        """Ends all connections, whatever is still on its way in them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listening: socket.socket, target: tuple[str, int]) -> None:
        loop, inside = asyncio.get_running_loop(), None
        try:
            while True:
                await self._free.acquire()
                while inside is None:
                    try:
                        inside, _ = await loop.sock_accept(listening)
                    except ConnectionError:  # gone again
                        continue
                    except OSError as failure:
                        self._tell(f"a connection out of a sandbox cannot be accepted: {failure}")
                        await asyncio.sleep(PAUSE_S)
                self._start(self._connect(inside, target)).add_done_callback(functools.partial(self._end, inside))
                inside = None
        finally:
            listening.close()

    async def _connect(self, inside: socket.socket, target: tuple[str, int]) -> None:
        """One connection, from its first moment to its end."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                outside = await _connected(target)
        except OSError as failure:  # TimeoutError is one
            why = f"no answer in {CONNECT_TIMEOUT_S:g} s" if isinstance(failure, TimeoutError) else failure
            return self._tell(f"{target[0]}:{target[1]}, where a sandbox's port leads, cannot be reached: {why}")
        with outside:
            for end in (inside, outside):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                async with asyncio.TaskGroup() as both_ways:
                    both_ways.create_task(_copy(inside, outside, must_arrive=False))
                    both_ways.create_task(_copy(outside, inside, must_arrive=True))
            except* OSError:
                pass  # one end is gone, and the other one learns it as both are closed
        return None

    def _end(self, inside: socket.socket, task: asyncio.Task) -> None:
        """Ends a connection, also where its task never began, or failed."""
        inside.close()
        self._free.release()
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._tell(f"a connection out of a sandbox ended: {failure!r}")

    def _tell(self, line: str) -> None:
        if line not in self._messages and len(self._messages) < MOST_PORTS:  # each only once, and not without end
            self._messages.add(line)
            logger.warning("%s", line)


async def _connected(target: tuple[str, int]) -> socket.socket:
    """A connection to the first address of the target that answers. Raises OSError."""
    loop, failure = asyncio.get_running_loop(), OSError("it has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(*target, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            return sock
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failure = error
    raise failure


async def _copy(source: socket.socket, target: socket.socket, must_arrive: bool) -> None:
    """One way of a connection: what comes at one end, and then that it ended there, goes out at the other.

    The next bytes are read when the last ones are written, so an end that does not read stops the other one.

    Args:
      must_arrive: False where the other way goes on though the target takes nothing any more: a server that is gone may
        have left an answer.

    Raises:
      OSError: an end is gone.
    """
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, BUFFER_BYTES):
        try:
            await loop.sock_sendall(target, data)
        except OSError:
            if must_arrive:
                raise
            return
        await asyncio.sleep(0)  # where both ends are always ready, others have their turn
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def close_all(fds: list[int]) -> None:
    """Closes descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)
    fds.clear()
