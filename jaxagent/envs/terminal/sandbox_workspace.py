"""A sandbox as the place of one attempt: each command is a fresh process that no shell of the agent's has started."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from jaxagent.envs.terminal.task import TerminalTask
from jaxagent.envs.terminal.verify import VerifierError, removal
from jaxagent.sandbox.base import CommandResult, Sandbox

OUTPUT_BYTES = 100_000  # kept of a command's output
_TIMEOUT_S = 60.0  # of the small commands that move files
ROOM_BYTES, LEAST_ROOM_BYTES = 2**22, 2**18  # of the disk: less than the second before the test, the first after it
# $1 a new file, $2 its size, then directories. Everything above them is opened, what is missing is made.
_USABLE = """
file=$1 size=$2; shift 2; set -f
for path in / /tmp "$HOME" "$@"; do
  at=; IFS=/
  for part in $path; do
    [ "$part" ] || continue
    at=$at/$part
    [ -d "$at" ] || { rm -f "$at"; mkdir "$at"; }
    [ -x "$at" ] || chmod u+rwx "$at"
  done
  unset IFS
  [ -w "$path" ] || chmod u+rwx "$path"
  cd "$path" || exit 1
done 2>/dev/null
printf "%${size}s" . > "$file" && rm -f "$file"
"""
# What pytest reads in the directories above the tests, and the links by which a shell gives a program another's output.
# They are nobody's in an image whose / and /dev belong to another user than the agent's; here they may be the agent's.
_STEERS = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg")
_STEERS += ("pyproject.toml",)
_UNSTEERED = """
gone() { rm -rf "$@" || { chmod -R u+rwx "$@"; rm -rf "$@"; }; }
gone "$@"
for link in fd: stdin:/0 stdout:/1 stderr:/2; do
  path=/dev/${link%:*} target=/proc/self/fd${link#*:}
  [ "$(readlink "$path")" = "$target" ] || { gone "$path"; ln -s "$target" "$path"; }
done
"""


class SandboxWorkspace:
    """Where commands of one attempt run, with the home directory as $HOME.

    A sandbox that fails raises `SandboxError`, which is a RuntimeError.
    """

    def __init__(self, sandbox: Sandbox):
        self._sandbox = sandbox
        self._directory = ""  # where commands start that name no directory: the sandbox's own, unless that is gone
        self._spared: tuple[tuple[int, int], ...] = ()

    async def run(
        self, command: str, *, timeout_s: float, cwd: str = "", env: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Runs a shell command to its end or its deadline. `cwd` "" is the workspace's own working directory."""
        directory = cwd or self._directory
        return await self._sandbox.execute(("sh", "-c", command), timeout_s, OUTPUT_BYTES, env, directory)

    async def copy_in(self, source: Path, path: str) -> None:
        """Copies a file or folder to an absolute path inside, replacing what is there, links included.

        Links may not lead out of a folder: a task's author has no right to files of the host.
        """
        removed = await self.run(removal(path), timeout_s=_TIMEOUT_S)
        if removed.exit_code != 0:
            raise VerifierError(f"cannot remove {path}: {removed.output.strip()[:200]!r}")
        files = [(source, path)]
        if source.is_dir():
            files = [(p, f"{path}/{p.relative_to(source)}") for p in sorted(source.rglob("*")) if p.is_file()]
        for file, _ in files:
            if not file.resolve().is_relative_to(source.resolve()):
                raise VerifierError(f"{file} is a link that leads out of {source}")
        for file, target in files:
            await self._sandbox.write(target, file.read_bytes(), file.stat().st_mode & 0o777)

    async def read(self, path: str, max_bytes: int) -> bytes:
        """A regular file's content, never through a link that the agent made.

        Raises:
          FileNotFoundError: no regular file there.
          RuntimeError: it is larger than `max_bytes`.
        """
        quoted = shlex.quote(path)
        if (await self.run(f"[ -f {quoted} ] && [ ! -L {quoted} ]", timeout_s=_TIMEOUT_S)).exit_code != 0:
            raise FileNotFoundError(path)
        return await self._sandbox.read(path, max_bytes)

    async def remember_processes(self) -> None:
        """What runs now, before the agent came, is spared by `before_verification`."""
        result = await self._sandbox.execute(("sh", "-c", "cat /proc/[0-9]*/stat"), _TIMEOUT_S, OUTPUT_BYTES)
        lines = result.output.decode("utf-8", "replace").splitlines()
        # "PID (name) state ...": the name may hold anything, also blanks and brackets. The start is field 22.
        rows = [(line.partition(" ")[0], line.rpartition(")")[2].split()) for line in lines]
        self._spared = tuple((int(pid), int(rest[19])) for pid, rest in rows if pid.isdigit() and len(rest) > 19)

    async def before_verification(self, task: TerminalTask) -> bool:
        """Ends what the agent left running, makes the working directory where it is missing, and removes what a test
        would take for its author's.

        What was there before the agent is stopped, not killed: the test sees it in the process table, and no program
        that the agent may have put into it runs beside the test.

        Returns:
          Whether a test can run. Where no shell starts or nothing can be written any more, although both worked before
          the agent came, the reward is 0.
        """
        await self._sandbox.stop_processes(self._spared)
        if not await self.is_usable(task, LEAST_ROOM_BYTES):
            return False
        await self._sandbox.execute(("sh", "-c", _UNSTEERED, "sh", *_steers(task)), _TIMEOUT_S, 1000, None, "/")
        return True

    async def stop_processes(self) -> None:
        """Kills all that runs."""
        await self._sandbox.stop_processes()

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._sandbox.close()

    async def is_usable(self, task: TerminalTask, room_bytes: int) -> bool:
        """Whether a shell starts in the task's directory and so much can be written. Makes directories that are missing
        (`rm -rf ~`). A sandbox that is gone is an exception, not False."""
        file = f"/tmp/.room-{secrets.token_hex(8)}"
        argv = ("sh", "-c", _USABLE, "sh", file, str(room_bytes), *filter(None, [task.workdir]))
        result = await self._sandbox.execute(argv, _TIMEOUT_S, 1000)
        if result.exit_code in (126, 127):  # the sandbox's own directory is gone, or no shell starts anywhere
            result = await self._sandbox.execute(argv, _TIMEOUT_S, 1000, None, "/")
            again = await self._sandbox.execute(("sh", "-c", ":"), _TIMEOUT_S, 1000)
            self._directory = "" if again.exit_code == 0 else "/"
        return result.exit_code == 0 and not result.timed_out


def _steers(task: TerminalTask) -> list[str]:
    """What stands in the directories above the task's folders of tests and would steer them."""
    files = task.final_test.files if task.final_test else {}
    above = {folder for path, source in files.items() if source.is_dir() for folder in PurePosixPath(path).parents}
    return [str(folder / name) for folder in sorted(above) for name in _STEERS]
