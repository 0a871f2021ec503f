"""This machine as the place where an agent program runs: one tree of processes, nothing that protects the host."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping, Sequence

from jaxagent.envs import server_process
from jaxagent.sandbox.base import CommandResult, SandboxError


class Host:
    """What an agent program needs of a `sandbox.base.Sandbox`, on this machine. For programs that the user trusts.

    Attributes:
      result: of the program that ran last.
    """

    def __init__(self) -> None:
        self.result: CommandResult | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Raises SandboxError: the host's files are the user's."""
        raise SandboxError(f"{path}: an agent on this machine is given no files; run it in a sandbox")

    async def open_port(self, port: int, target: tuple[str, int]) -> int:
        """The target's own port: it can be reached from here."""
        return target[1]

    async def execute(
        self,
        argv: Sequence[str],
        deadline_s: float,
        output_bytes: int,
        env: Mapping[str, str] | None = None,
        directory: str = "",
    ) -> CommandResult:
        """Runs the program with this process's variables and `env`; keeps the end of what it prints.

        Everything that it has started, detached or not, is killed when it has ended, or at the deadline.
        """
        began = time.monotonic()
        with tempfile.TemporaryFile() as output:  # a pipe would stay open as long as a child that was left behind
            try:
                self._process = await server_process.keep(argv, output, env or {}, directory or None)
            except OSError as failure:
                self.result = CommandResult(str(failure).encode(), 127)
                return self.result
            timed_out = False
            try:
                async with asyncio.timeout(deadline_s):
                    await self._process.wait()
            except TimeoutError:
                timed_out = True
            finally:
                await self.stop_processes()
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - output_bytes))
            tail = output.read(output_bytes)
        code = self._process.returncode or 0
        status = code if code >= 0 else 128 - code
        duration_s = time.monotonic() - began
        self.result = CommandResult(tail, status, timed_out, output_total_bytes=size, duration_s=duration_s)
        return self.result

    async def stop_processes(self) -> None:
        """Kills the program and all that it has started; see keeper.py."""
        if self._process is not None:
            await server_process.end(self._process)

    async def close(self) -> None:
        """Kills what runs."""
        await self.stop_processes()
