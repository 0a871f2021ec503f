"""A sandbox as a `verify.Place`. Each command is a fresh process that no shell of the agent's has started.

The sandbox is known by what it does (`execute`, `read`, `write`, `stop_processes`), since rooms of one level do not
import each other.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxagent.envs.terminal_tasks.task import TerminalTask
from jaxagent.envs.terminal_tasks.verify import Result, VerifierError, removal

OUTPUT_BYTES = 100_000  # kept of a command's output
_TIMEOUT_S = 60.0  # of the small commands that move files


class Sandbox(Protocol):
    """What is asked of a sandbox; `jaxagent.sandbox.base.Sandbox` has it."""

    async def execute(
        self,
        argv: Sequence[str],
        deadline_s: float,
        output_bytes: int,
        env: Mapping[str, str] | None = None,
        directory: str = "",
    ) -> Any:
        """Runs a program in a fresh process; the result has `output` (bytes), `exit_code` and `timed_out`."""

    async def read(self, path: str) -> bytes:
        """A regular file's bytes."""

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a file, parents included."""

    async def stop_processes(self) -> None:
        """Kills every process inside."""


class SandboxPlace:
    """See the module."""

    def __init__(self, sandbox: Sandbox):
        self._sandbox = sandbox

    async def run(
        self, command: str, *, timeout_s: float, cwd: str = "", env: Mapping[str, str] | None = None
    ) -> Result:
        """See `verify.Place`."""
        result = await self._sandbox.execute(("sh", "-c", command), timeout_s, OUTPUT_BYTES, env, cwd)
        return Result(result.exit_code, result.output.decode("utf-8", "replace"), result.timed_out)

    async def copy_in(self, source: Path, path: str) -> None:
        """See `verify.Place`. Links may not lead out of a folder: a task's author has no right to files of the host."""
        removed = await self.run(removal(path), timeout_s=_TIMEOUT_S)
        if removed.exit_status != 0:
            raise VerifierError(f"cannot remove {path}: {removed.output.strip()[:200]}")
        files = [(source, path)]
        if source.is_dir():
            files = [(p, f"{path}/{p.relative_to(source)}") for p in sorted(source.rglob("*")) if p.is_file()]
        for file, _ in files:
            if not file.resolve().is_relative_to(source.resolve()):
                raise VerifierError(f"{file} is a link that leads out of {source}")
        for file, target in files:
            await self._sandbox.write(target, file.read_bytes(), file.stat().st_mode & 0o777)

    async def read(self, path: str) -> bytes:
        """See `verify.Place`."""
        quoted = shlex.quote(path)
        if (await self.run(f"[ -f {quoted} ] && [ ! -L {quoted} ]", timeout_s=_TIMEOUT_S)).exit_status != 0:
            raise FileNotFoundError(path)
        return await self._sandbox.read(path)


async def before_verification(sandbox: Sandbox, task: TerminalTask) -> None:
    """Kills what the agent left running, unless the task is about running processes."""
    if not task.looks_at_processes:
        await sandbox.stop_processes()
