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
        self._writers: set[asyncio.StreamWriter] = set()
        self._told: set[str] = set()
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await asyncio.gather(*tasks, return_exceptions=True)

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
                task = self._start(self._connect(connection, target))
                task.add_done_callback(functools.partial(self._end, connection))
                connection = None
        finally:
            listening.close()

    async def _connect(self, connection: socket.socket, target: tuple[str, int]) -> None:
        """Copies both ways until both ends have said all, or one is gone."""
        async with contextlib.AsyncExitStack() as ends:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    server, to_server = await asyncio.open_connection(*target, limit=BUFFER_BYTES)
            except OSError as failure:  # TimeoutError is one
                why = f"no answer in {CONNECT_TIMEOUT_S:g} s" if isinstance(failure, TimeoutError) else failure
                return self._tell(f"{target[0]}:{target[1]}, where a sandbox's port leads, cannot be reached: {why}")
            ends.push_async_callback(self._abort, to_server)
            client, to_client = await asyncio.open_connection(sock=connection, limit=BUFFER_BYTES)
            ends.push_async_callback(self._abort, to_client)
            self._writers |= {to_server, to_client}
            try:
                async with asyncio.TaskGroup() as tasks:
                    watching = tasks.create_task(_follow(to_client, to_server))
                    ways = [_copy(client, to_server), _copy(server, to_client)]
                    await asyncio.wait([tasks.create_task(way) for way in ways])
                    watching.cancel()
            except* OSError:
                pass  # one end is gone; the other still gets what it was sent
            for writer in (to_client, to_server):
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        return None

    async def _abort(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self._writers.discard(writer)

    def _end(self, connection: socket.socket, task: asyncio.Task) -> None:
        """Also where the task never began, or failed."""
        connection.close()
        self._free.release()
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._tell(f"a connection out of a sandbox ended: {failure!r}")

    def _tell(self, line: str) -> None:
        if line not in self._told and len(self._told) < MOST_PORTS:  # each only once, and not without end
            self._told.add(line)
            logger.warning("%s", line)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One way: what comes in goes out, its end included. Reading stops while the receiver is too slow."""
    while data := await reader.read(BUFFER_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def _follow(client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
    """Where the client is gone, nobody waits for an answer: the server sees that at once. Raises ConnectionError."""
    with contextlib.suppress(OSError):
        await asyncio.shield(client.wait_closed())
    server.transport.abort()
    raise ConnectionAbortedError


def close_all(fds: list[int]) -> None:
    """Closes descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)
    fds.clear()
