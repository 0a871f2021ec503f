"""`ServerPipes`: an MCP server in a sandbox, as a transport of the official SDK (see `mcp.pipes`)."""

from __future__ import annotations

import asyncio
import secrets
from types import TracebackType
from typing import Any

from jaxagent.envs.mcp.pipes import LINE_BYTES, TAIL_BYTES, Pipes
from jaxagent.envs.terminal.task import Server, TerminalTask
from jaxagent.sandbox.base import Sandbox

START_S = 10.0
# $1 the port, $2 a file for what it writes to stderr, then the server's command. It goes on when the shell has ended.
_START = """
port=$1 log=$2; shift 2
setsid bash -c 'exec 3<>"/dev/tcp/127.0.0.1/$0" && exec "$@" <&3 >&3 3>&-' "$port" "$@" </dev/null >"$log" 2>&1 &
"""


class ServerPipes(Pipes):
    """One server process of a sandbox. `async with ServerPipes(...) as (read, write)`; entered once.

    Args:
      sandbox: where it runs.
      server: what.
      task: for its directory and variables.
    """

    def __init__(self, sandbox: Sandbox, server: Server, task: TerminalTask) -> None:
        super().__init__(server.command)
        self._sandbox, self._task = sandbox, task
        self._connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] | None = None
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Any:
        """Starts the process and waits until it has connected, which whoever opens the session bounds.

        Raises:
          RuntimeError: it cannot be started.
        """
        connected = self._connected = asyncio.get_running_loop().create_future()

        def on_connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if connected.done():
                writer.close()
            else:
                connected.set_result((reader, writer))

        self._listener = await asyncio.start_server(on_connected, "127.0.0.1", 0, limit=LINE_BYTES)
        port = await self._sandbox.open_port(0, ("127.0.0.1", self._listener.sockets[0].getsockname()[1]))
        log = f"/tmp/.mcp-{secrets.token_hex(8)}.log"
        argv = ("bash", "-c", _START, "bash", str(port), log, *self._argv)
        started = await self._sandbox.execute(argv, START_S, TAIL_BYTES, self._task.env, self._task.workdir)
        if started.exit_code != 0:
            raise RuntimeError(f"bash does not start it: {started.output.decode('utf-8', 'replace').strip()[:200]}")
        reader, writer = await connected
        self._listener.close()
        return self._begin(reader, writer)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the connection; the server sees the end of its stdin, and the sandbox ends it."""
        self.kill()

    def kill(self) -> None:
        """Stops listening, at once."""
        super().kill()
        if self._listener is not None:
            self._listener.close()
        if self._connected is not None and self._connected.done() and not self._connected.cancelled():
            self._connected.result()[1].close()
