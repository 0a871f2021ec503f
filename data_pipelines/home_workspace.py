"""Where commands of our own generated tasks run without a sandbox: plain processes with limits, in a temporary home.

This is no sandbox: a hostile program can see and use the machine. Each command is a process group with a deadline and
limits (CPU time, memory, file size, open files); `close` kills what they left. Under root, commands run as the user
nobody.
"""

from __future__ import annotations

import asyncio
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxagent.envs.terminal.task import TerminalTask
from jaxagent.envs.terminal.verify import VerifierError
from jaxagent.sandbox.base import CommandResult

PROGRAMS = ("sh", "python3", "git", "tar", "gzip", "awk", "sed", "grep", "find", "sort", "comm", "sha256sum")
OUTPUT_BYTES = 100_000  # kept of a command's output: its beginning
_PATH = "/usr/local/bin:/usr/bin:/bin"
# No core dump, CPU seconds, open files, blocks of 512 bytes per file, KiB of memory. One each: dash takes no more.
_LIMITS = "ulimit -c 0; ulimit -t 60; ulimit -n 256; ulimit -f 65536; ulimit -v 4000000"
_NOBODY = 65534


def missing_programs() -> list[str]:
    """Programs that generated tasks need and this machine has not."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


class HomeWorkspace:
    """A `SandboxWorkspace` without a sandbox. A temporary directory is $HOME and the working directory; absolute paths
    are refused."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="jaxagent-home-"))
        self._started: list[subprocess.Popen[bytes]] = []
        self._ids: dict[str, Any] = {}
        if os.geteuid() == 0:
            self._ids = {"user": _NOBODY, "group": _NOBODY, "extra_groups": ()}
            os.chown(self.folder, _NOBODY, _NOBODY)

    async def run(
        self, command: str, *, timeout_s: float, cwd: str = "", env: Mapping[str, str] | None = None
    ) -> CommandResult:
        """As `SandboxWorkspace` has it."""
        environment = {"HOME": str(self.folder), "PATH": _PATH, "LANG": "C.UTF-8", **(env or {})}
        script = f"{_LIMITS}; umask 022; {f'cd {shlex.quote(cwd)} && ' if cwd else ''}exec sh -c {shlex.quote(command)}"
        return await asyncio.to_thread(self._run, script, environment, timeout_s)

    def _run(self, script: str, environment: Mapping[str, str], timeout_s: float) -> CommandResult:
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                ("sh", "-c", script),
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **self._ids,
            )
            # It stays a zombie until `close`: so its process group's number is not given to anybody else, and killing
            # the group cannot hit a stranger.
            self._started.append(process)
            waiting = select.poll()
            descriptor = os.pidfd_open(process.pid)
            try:
                waiting.register(descriptor, select.POLLIN)
                timed_out = not waiting.poll(timeout_s * 1000)
                if timed_out:
                    os.killpg(process.pid, signal.SIGKILL)
                ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
            finally:
                os.close(descriptor)
            status = ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
            output.seek(0)
            return CommandResult(output.read(OUTPUT_BYTES), status, timed_out)

    async def copy_in(self, source: Path, path: str) -> None:
        """Refused."""
        raise VerifierError(f"{path}: a task with absolute paths needs a sandbox, not only a home directory.")

    async def read(self, path: str, max_bytes: int) -> bytes:
        """Refused."""
        raise VerifierError(f"{path}: a task with absolute paths needs a sandbox, not only a home directory.")

    async def remember_processes(self) -> None:
        """Nothing: `before_verification` ends none."""

    async def before_verification(self, task: TerminalTask) -> bool:
        """Whether a test can run: always. What runs is ended by `close`."""
        return True

    async def stop_processes(self) -> None:
        """Kills the process groups of all commands so far. A program that means harm can leave its group."""
        for process in self._started:
            os.killpg(process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kills every process that a command left, and removes the directory."""
        await self.stop_processes()
        for process in self._started:
            process.wait()
        self._started.clear()
        await asyncio.to_thread(_remove, self.folder)


def _remove(folder: Path) -> None:
    """Deletes a tree, also one whose folders an agent has made unreadable."""
    for top, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(path := os.path.join(top, name)):
                os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
