"""Where commands run without a sandbox, to check tasks that are our own or trusted: plain processes with limits.

    HomePlace   a temporary directory is $HOME and the working directory; nothing hides the machine. Generated tasks.
    RootPlace   a temporary root in name spaces of its own, made of this machine's /usr and /etc and an environment/
                folder; a task may then say /app, /tests and /logs. Needs `unshare` and user name spaces. Harbor tasks.

Neither is a sandbox: a hostile program can see and use the machine. As root, both drop to the user nobody. Each command
is a process group with a deadline and limits (CPU time, memory, file size, open files); `close` kills what they left.
"""

from __future__ import annotations

import asyncio
import os
import select
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxagent.envs.terminal.task import Image, TerminalTask
from jaxagent.envs.terminal.verify import Result, VerifierError

PROGRAMS = ("sh", "python3", "git", "tar", "gzip", "awk", "sed", "grep", "find", "sort", "comm", "sha256sum")
OUTPUT_BYTES = 100_000  # kept of a command's output: its beginning
_PATH = "/usr/local/bin:/usr/bin:/bin"
# No core dump, CPU seconds, open files, blocks of 512 bytes per file, KiB of memory. One each: dash takes no more.
_LIMITS = "ulimit -c 0; ulimit -t 60; ulimit -n 256; ulimit -f 65536; ulimit -v 4000000"
_NOBODY = 65534


def missing_programs() -> list[str]:
    """Programs that generated tasks need and this machine has not."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


class _Place:
    """A temporary directory and the process groups started for it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="jaxagent-place-"))
        self.user = _NOBODY if os.geteuid() == 0 else None
        self._started: list[subprocess.Popen[bytes]] = []
        self.own(self.folder)

    def own(self, path: Path) -> None:
        """Gives a path to the user that commands run as."""
        if self.user is not None:
            os.chown(path, self.user, self.user, follow_symlinks=False)

    async def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, timeout_s: float) -> Result:
        """Runs a program to its end or its deadline, then kills what is left of it if it was late."""
        return await asyncio.to_thread(self._run, argv, env, cwd, timeout_s)

    def _run(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, timeout_s: float) -> Result:
        ids = {} if self.user is None else {"user": self.user, "group": self.user, "extra_groups": ()}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **ids,
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
            return Result(status, output.read(OUTPUT_BYTES).decode("utf-8", "replace"), timed_out)

    async def remember_processes(self) -> None:
        """Nothing: `before_verification` ends none."""

    async def before_verification(self, task: TerminalTask) -> None:
        """Nothing: what runs is ended by `close`."""

    async def stop_processes(self) -> None:
        """Kills the process groups of all commands so far; as all here, no protection against those that mean harm."""
        for process in self._started:
            os.killpg(process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kills every process that a command left, and removes the directory."""
        await self.stop_processes()
        for process in self._started:
            process.wait()
        self._started.clear()
        await asyncio.to_thread(_remove, self.folder)


class HomePlace(_Place):
    """Commands with a temporary home directory, in the machine's own root. Knows no absolute paths."""

    async def run(
        self, command: str, *, timeout_s: float, cwd: str = "", env: Mapping[str, str] | None = None
    ) -> Result:
        """See `verify.Place`."""
        environment = {"HOME": str(self.folder), "PATH": _PATH, "LANG": "C.UTF-8", **(env or {})}
        script = f"{_LIMITS}; umask 022; {f'cd {shlex.quote(cwd)} && ' if cwd else ''}exec sh -c {shlex.quote(command)}"
        return await self.start(("sh", "-c", script), environment, self.folder, timeout_s)

    async def copy_in(self, source: Path, path: str) -> None:
        """Not here: see `RootPlace`."""
        raise VerifierError(f"{path}: a task with absolute paths needs a root of its own, not only a home directory.")

    async def read(self, path: str, max_bytes: int) -> bytes:
        """Not here: see `RootPlace`."""
        raise VerifierError(f"{path}: a task with absolute paths needs a root of its own, not only a home directory.")


class RootPlace(_Place):
    """Commands in a temporary root made of this machine's programs and an image's files. See the module."""

    def __init__(self, image: Image) -> None:
        super().__init__()
        self._image = image
        self._workdir = "/"
        self._env: dict[str, str] = {}
        for name in ("dev", "etc", "home/user", "logs", "proc", "root", "tmp", "usr", "var/tmp"):
            self._make_folder(name)
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.islink(f"/{name}"):
                (self.folder / name).symlink_to(os.readlink(f"/{name}"))
        for name in ("null", "zero", "urandom"):
            (self.folder / "dev" / name).touch()

    def _make_folder(self, name: str) -> Path:
        path = self.folder
        for part in Path(name.lstrip("/")).parts:
            path = path / part
            if not path.is_dir():
                path.mkdir()
                self.own(path)
        return path

    async def build(self, timeout_s: float) -> None:
        """Executes the image's Dockerfile here: RUN, COPY, WORKDIR and ENV; the base image is this machine's own.

        Raises:
          VerifierError: no Dockerfile, an instruction that is not among these, or a RUN that failed (it is named).
        """
        if self._image.dockerfile is None:
            raise VerifierError("the local runner has no registry: it needs a Dockerfile, not only an image's name.")
        for instruction, rest in dockerfile_steps(self._image.dockerfile.read_text("utf-8")):
            if instruction in ("FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE"):
                continue
            elif instruction == "WORKDIR":
                self._workdir = os.path.normpath(os.path.join(self._workdir, rest))
                self._make_folder(self._workdir)
            elif instruction == "ENV":
                self._env |= dict(item.split("=", 1) for item in shlex.split(rest))
            elif instruction == "COPY":
                *sources, target = shlex.split(rest)
                for source in sources:
                    path = os.path.join(self._workdir, target)
                    whole = (self._image.context or Path()) / source
                    if path.endswith(("/", "/.")) and whole.is_file():
                        path = os.path.join(path, whole.name)
                    await self.copy_in(whole, os.path.normpath(path))
            elif instruction == "RUN":
                result = await self.run(rest, timeout_s=timeout_s)
                if result.timed_out or result.exit_status != 0:
                    raise VerifierError(f"build failed at 'RUN {rest[:100]}': {result.output.strip()[-300:]}")
            else:
                raise VerifierError(f"the local runner does not know the Dockerfile instruction {instruction}.")

    async def run(
        self, command: str, *, timeout_s: float, cwd: str = "", env: Mapping[str, str] | None = None
    ) -> Result:
        """See `verify.Place`."""
        root = shlex.quote(str(self.folder))
        mounts = [f"mount --rbind /{name} {root}/{name}" for name in ("usr", "etc")]
        mounts += [f"mount --bind /dev/{name} {root}/dev/{name}" for name in ("null", "zero", "urandom")]
        mounts += [f"mount -t proc proc {root}/proc"]
        inside = f"{_LIMITS}; umask 022; cd {shlex.quote(cwd or self._workdir)} && exec sh -c {shlex.quote(command)}"
        script = " && ".join([*mounts, f"exec chroot {root} /bin/sh -c {shlex.quote(inside)}"])
        environment = {"HOME": "/root", "PATH": f"/usr/local/sbin:/usr/sbin:/sbin:{_PATH}", "LANG": "C.UTF-8"}
        argv = (
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            script,
        )
        return await self.start(argv, {**environment, **self._env, **(env or {})}, self.folder, timeout_s)

    async def copy_in(self, source: Path, path: str) -> None:
        """See `verify.Place`."""
        if not source.exists():
            raise VerifierError(f"{source} is missing.")
        self._make_folder(os.path.dirname(path))
        target = self._inside(path)
        if target.is_symlink() or target.is_file():
            target.unlink()
        elif target.is_dir():
            _remove(target)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
            for top, folders, files in os.walk(target):
                for name in (*folders, *files):
                    self.own(Path(top) / name)
        else:
            shutil.copy(source, target)
        self.own(target)

    async def read(self, path: str, max_bytes: int) -> bytes:
        """See `verify.Place`."""
        try:
            descriptor = os.open(self._inside(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise FileNotFoundError(path) from error
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileNotFoundError(path)
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise VerifierError(f"{path} is larger than {max_bytes} bytes.")
        return content

    def _inside(self, path: str) -> Path:
        """The place in the temporary root. A folder on the way that is a link could lead outside, and is refused."""
        target = self.folder / os.path.normpath(path).lstrip("/")
        if any(parent.is_symlink() for parent in target.parents if parent.is_relative_to(self.folder)):
            raise VerifierError(f"{path}: a folder on the way is a symbolic link.")
        return target


def dockerfile_steps(text: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) of each instruction; continued lines joined, comments left out."""
    steps: list[tuple[str, str]] = []
    waiting = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or (not line.strip() and not waiting):
            continue
        waiting += line.rstrip()
        if waiting.endswith("\\"):
            waiting = waiting[:-1] + " "
            continue
        instruction, _, rest = waiting.strip().partition(" ")
        steps.append((instruction.upper(), rest.strip()))
        waiting = ""
    return steps


def has_user_namespaces() -> bool:
    """Whether `RootPlace` can work here."""
    unshare = shutil.which("unshare", path=_PATH)
    argv = [unshare or "false", "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"]
    ids = {"user": _NOBODY, "group": _NOBODY, "extra_groups": ()} if os.geteuid() == 0 else {}
    return unshare is not None and subprocess.run(argv, capture_output=True, timeout=10, **ids).returncode == 0


def _remove(folder: Path) -> None:
    """Deletes a tree, also one whose folders an agent has made unreadable."""
    for top, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(path := os.path.join(top, name)):
                os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
