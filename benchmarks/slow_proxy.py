"""A slow link: a proxy for TCP that delivers every byte later, and only so many of them per second.

    with SlowProxy("127.0.0.1:8600", delay_s=0.2, bytes_per_s=20e6) as proxy:
        ...  # who connects to proxy.url speaks to that address

All connections share the link's bytes per second, of each direction. A connection is open only when a packet has gone
there and back; its first bytes wait for that. What is on its way is bounded, so a sender that is too fast is held up.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

PIECE_BYTES = 1 << 16
HELD_UP = 16  # pieces of a connection that may wait beyond those that the delay keeps on their way


class SlowProxy:
    """The link. Use as a context manager.

    Args:
      target: HOST:PORT, or a URL of it.
      delay_s: of a byte, one way.
      bytes_per_s: of all connections together, each way.

    Attributes:
      url: by which the target is reached over the link.
      passed: bytes that came from the target.
      connections: that were opened.
    """

    def __init__(self, target: str, delay_s: float, bytes_per_s: float):
        self._host, _, port = target.rpartition("//")[2].rpartition(":")
        self._port, self._delay_s, self._bytes_per_s = int(port), delay_s, bytes_per_s
        self._most = HELD_UP + int(delay_s * bytes_per_s / PIECE_BYTES)
        self._up, self._down = _Lane(bytes_per_s), _Lane(bytes_per_s)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url, self.passed, self.connections = "", 0, 0

    def __enter__(self) -> SlowProxy:
        threading.Thread(target=self._loop.run_forever, name="slow link", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(self, *failure: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = self._loop.create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = self._loop.time() + 2 * self._delay_s
        try:
            from_target, to_target = await asyncio.open_connection(self._host, self._port)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._carry(reader, to_target, self._up, opened))
                    both.create_task(self._carry(from_target, writer, self._down, opened))
            finally:
                to_target.close()
        except* OSError:  # one of the two is gone
            pass
        finally:
            writer.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lane: _Lane, opened: float
    ) -> None:
        """One direction of a connection, until its sender has ended."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(self._most)
        delivering = asyncio.create_task(self._deliver(on_the_way, writer))
        try:
            data = b"first"
            while data:
                data = await reader.read(PIECE_BYTES)
                await asyncio.sleep(opened - self._loop.time())
                await lane.take(len(data))
                self.passed += len(data) if lane is self._down else 0
                await on_the_way.put((self._loop.time() + self._delay_s, data))
            await delivering
        finally:
            delivering.cancel()

    async def _deliver(self, on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            at, data = await on_the_way.get()
            await asyncio.sleep(at - self._loop.time())
            if not data:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


class _Lane:
    """One direction of the link: bytes go one after another."""

    def __init__(self, bytes_per_s: float):
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0

    async def take(self, count: int) -> None:
        """Waits until so many bytes have gone."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + count / self._bytes_per_s
        await asyncio.sleep(self._free_at - now)
