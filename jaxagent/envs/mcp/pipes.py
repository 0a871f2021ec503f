"""An MCP server as a process of ours, spoken to over its stdin and stdout, as a transport of the official SDK.

The SDK has such a transport. This one bounds what the server may send (a line, lines that are no messages, what is kept
of stderr), remembers what it wrote to stderr for error messages, and in the end kills the whole process group, also
where only the server's children are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

import anyio
import mcp_types
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

LINE_BYTES = 4 * 1024 * 1024  # of one message
STRAY_LINES = 100  # on stdout that are no messages: a server that prints is forgiven, one that floods is not
TAIL_BYTES = 2_000  # kept of stderr
GRACE_S = 1.0  # to end by itself once stdin is closed, and again after SIGTERM
REAP_S = 2.0  # to be gone after SIGKILL
POLL_S = 0.01


class Pipes:
    """One server process. `async with Pipes(argv) as (read, write)`; entered once."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._tail = b""
        self._fault = ""  # why we stopped listening

    async def __aenter__(self) -> Any:
        """Starts the process. Raises OSError where the program is not found."""
        process = self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=get_default_environment(),
            limit=LINE_BYTES,
            start_new_session=True,
        )
        assert process.stdout is not None and process.stdin is not None
        streams = self._begin(process.stdout, process.stdin)
        self._tasks.append(asyncio.create_task(_quietly(self._keep_tail, process)))
        return streams

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
        """Listens and speaks from now on; gives what the session reads from and writes to."""
        inbox, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outbox = anyio.create_memory_object_stream[SessionMessage](0)
        self._tasks += [
            asyncio.create_task(_quietly(self._listen, reader, inbox)),
            asyncio.create_task(_quietly(self._speak, writer, outbox)),
        ]
        return read, write

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process and everything in its group."""
        process = self._process
        if process is None:
            return
        try:
            assert process.stdin is not None
            process.stdin.close()
            if not await _ends_within(process, GRACE_S):
                _signal_group(process, signal.SIGTERM)
                await _ends_within(process, GRACE_S)
        finally:
            self.kill()
            await _ends_within(process, REAP_S)
            process._transport.close()  # type: ignore[attr-defined]  # a child that left the group may hold the pipes

    def kill(self) -> None:
        """Kills the whole process group and stops listening, at once."""
        if self._process is not None:
            _signal_group(self._process, signal.SIGKILL)
        for task in self._tasks:
            task.cancel()

    @property
    def last_words(self) -> str:
        """What went wrong as far as the process tells: our reason to stop listening, and its last line on stderr."""
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        wrote = f"it wrote: {lines[-1][-300:]}" if lines else ""
        return "; ".join(filter(None, (self._fault, wrote)))

    async def _listen(self, reader: asyncio.StreamReader, inbox: Any) -> None:
        stray = 0
        async with inbox:
            while True:
                try:
                    line = await reader.readline()
                except ValueError:
                    self._fault = f"a message of it has more than {LINE_BYTES} bytes"
                    return
                if not line:
                    return
                try:
                    message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    stray += bool(line.strip())
                    if stray > STRAY_LINES:
                        self._fault = f"more than {STRAY_LINES} lines on its stdout are no messages: {line[:100]!r}"
                        return
                    continue
                await inbox.send(SessionMessage(message))

    async def _speak(self, writer: asyncio.StreamWriter, outbox: Any) -> None:
        async with outbox:
            async for message in outbox:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                writer.write(text.encode() + b"\n")
                await writer.drain()

    async def _keep_tail(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(64 * 1024):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]


async def _quietly(function: Callable[..., Awaitable[None]], *args: Any) -> None:
    """Runs until the pipe or the stream at the other end is closed, which the session notices by itself."""
    with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await function(*args)


async def _ends_within(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """Whether the process is over in time. `Process.wait` would also wait for children that hold its pipes."""
    for _ in range(round(timeout_s / POLL_S)):
        if process.returncode is not None:
            return True
        await asyncio.sleep(POLL_S)
    return process.returncode is not None


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)  # it began a session, so its group has its number
