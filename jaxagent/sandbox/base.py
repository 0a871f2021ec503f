"""The interface: what a sandbox is made of (`Spec`, `Limits`), what it does (`Sandbox`), who makes them (`Backend`)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.config.errors import AttemptLost

MIB = 2**20
MAX_FILE_BYTES = 64 * MIB  # one read or write
MAX_OUTPUT_BYTES = 16 * MIB  # what is kept of one command's output, at most


class SandboxError(RuntimeError):
    """The sandbox or its back end failed; not something the agent's command said."""


class SandboxClosed(SandboxError):
    """The sandbox is gone: closed, killed at a deadline, or dead."""


class SandboxLost(AttemptLost):
    """Its host is away, full, or another by now. No SandboxError, since nobody failed: the attempt is played again."""


class FileError(SandboxError):
    """A path inside the sandbox cannot be read or written."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one sandbox may use. Which of them a back end can enforce is in its `missing`."""

    memory_bytes: int = 1024 * MIB  # of its processes; what is written to disk may come on top
    disk_bytes: int = 512 * MIB  # everything written, /tmp and /dev/shm included
    inodes: int = 100_000  # files and directories written
    processes: int = 256  # processes and threads at once
    cpus: float = 1.0  # cores' worth of time
    open_files: int = 1024  # per process
    flood_bytes: int = 64 * MIB  # a command that prints more than this is stopped

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not 0 < getattr(self, field.name) < float("inf"):  # nor NaN, which JSON can say
                raise ConfigError(f"sandbox limit '{field.name}' must be positive, not {getattr(self, field.name)}")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A sandbox before it is started.

    `root` is a directory that holds a whole root, such as debootstrap makes; without it, it is a minimal one over the
    host's /usr, read-only. `layers` are directories with what was changed on top, the lowest first (see
    `Sandbox.snapshot`). `image` is for docker and podman only.
    """

    root: str = ""
    layers: tuple[str, ...] = ()
    image: str = ""
    limits: Limits = Limits()
    uid: int = 1000  # the user id that programs see; never a privileged user of the host, not even 0
    hostname: str = "sandbox"
    directory: str = "/home/user"  # where shells and processes start
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # on top of `environment`

    def __post_init__(self):
        if isinstance(self.layers, str):
            raise ConfigError("sandbox spec 'layers' must be a sequence of directories, not one text")
        for layer in (*self.layers, *filter(None, [self.root])):
            if not Path(layer).is_absolute() or any(c in layer for c in ":,\\\n\0"):
                raise ConfigError(f"sandbox layer '{layer}' must be an absolute path without any of ':,\\'")
        if not 0 <= self.uid < 2**31:
            raise ConfigError(f"sandbox spec 'uid' must be a user id, not {self.uid}")
        bad = [k for k, v in self.env.items() if not k or "=" in k or "\0" in k + v]
        if bad:
            raise ConfigError(f"sandbox spec 'env' has the impossible name or value of {bad[0]!r}")

    def environment(self) -> dict[str, str]:
        """The whole environment of every process inside; nothing of the host's is in it."""
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": self.directory,
            "USER": "user",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PAGER": "cat",  # a pager would wait for a key that never comes
            "GIT_PAGER": "cat",
            "PS1": "",
            "PS2": "",
            **self.env,
        }


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """What a command did.

    When more than the allowed output was printed, `output` is its first half and its last half, and
    `output_total_bytes` says how much there was.
    """

    output: bytes  # standard output and error, as printed
    exit_code: int  # 0-255; 128 + n after signal n
    timed_out: bool = False  # the deadline passed: ^C, then kill
    flooded: bool = False  # stopped for printing more than `Limits.flood_bytes`
    shell_lost: bool = False  # the shell ended; the next command starts in a new one
    output_total_bytes: int = 0
    duration_s: float = 0.0

    @property
    def truncated(self) -> bool:
        """True when bytes of the output were dropped."""
        return self.output_total_bytes > len(self.output)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One thing below a listed directory."""

    path: str  # relative
    kind: str  # "file", "directory", "link" or "other"
    mode: int
    size_bytes: int


class Sandbox(abc.ABC):
    """A running sandbox. One operation at a time (others wait); all end within their deadlines.

    An operation that is cancelled, or that the inside does not answer in time, closes the sandbox.
    """

    @abc.abstractmethod
    async def run(self, command: str, deadline_s: float, output_bytes: int) -> CommandResult:
        """Runs a command in the episode's shell: directory, variables and jobs persist. Standard input is empty.

        The exit status is what the shell says, and the shell is the agent's: never derive a reward from it. Use
        `execute` after `stop_processes` for that.

        Raises:
          SandboxClosed: the sandbox is gone.
        """

    @abc.abstractmethod
    async def execute(
        self,
        argv: Sequence[str],
        deadline_s: float,
        output_bytes: int,
        env: Mapping[str, str] | None = None,
        directory: str = "",
    ) -> CommandResult:
        """Runs a program in a fresh process, which no shell of the agent's started; the kernel says its status."""

    @abc.abstractmethod
    async def read(self, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """A regular file's bytes.

        Raises:
          FileError: no such file, not a regular file, not readable inside, or larger than `max_bytes`.
        """

    @abc.abstractmethod
    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a file atomically; parents are made, and a link at `path` itself is replaced, not followed.

        Raises:
          FileError: not writable inside, or the disk is full.
        """

    @abc.abstractmethod
    async def list(self, path: str, max_entries: int = 10_000) -> list[Entry]:
        """Everything below a directory. Links are named, not followed. Raises FileError, also beyond `max_entries`."""

    @abc.abstractmethod
    async def stop_processes(self, spared: Sequence[tuple[int, int]] = ()) -> None:
        """Kills every process of the sandbox; files stay. What runs next, no process of the agent's can touch.

        Args:
          spared: process ids and starts, as fields 1 and 22 of /proc/PID/stat say them, of those that are to be seen
            afterwards. They are stopped (SIGSTOP), since the agent can have put its own program into them.
        """

    @abc.abstractmethod
    async def snapshot(self, directory: str) -> str:
        """Stops all processes and keeps what was changed as a new layer, in `directory` (made; must not exist).

        Returns:
          what to append to `Spec.layers` for sandboxes that start from here.

        Raises:
          SandboxError: it cannot be kept, or is more than `Limits.disk_bytes`; nothing is left of it.
        """

    @abc.abstractmethod
    async def open_port(self, port: int, target: tuple[str, int]) -> int:
        """Relays connections to 127.0.0.1:port inside to one place outside, until the sandbox closes.

        It is the only way out, to this place alone, and every program inside may use it, also while `execute` runs.
        At most `relay.MOST_CONNECTIONS` are open at once; further ones wait. Nothing ends a connection that is silent.

        Args:
          port: from 1024 to 65535; 0 is any free one.
          target: host and port outside, as this process (or the worker that has the sandbox) reaches it.

        Returns:
          the port that listens inside; another than `port` where the sandbox has no network of its own.

        Raises:
          SandboxError: the port is taken inside, or this back end cannot do it.
        """

    async def oom_kills(self) -> int | None:
        """How many of its processes the kernel has killed so far because this sandbox reached its own memory limit.

        Also after it was closed, or died: then the count at its end. None where nobody counts (without control
        groups, in containers, or when a worker does not answer).
        """
        return None

    async def lives(self) -> bool:
        """False where it is known to be closed or dead."""
        return True

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends everything: processes, mounts, files. May be called twice."""

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()


class Backend(abc.ABC):
    """Makes sandboxes of one kind. `name` and `missing` are for the caller to print."""

    name: str
    missing: tuple[str, ...]  # protections that this back end lacks here, in words

    @abc.abstractmethod
    async def start(self, spec: Spec) -> Sandbox:
        """Starts a sandbox.

        Raises:
          SandboxError: it cannot be started.
          ConfigError: the spec asks for what this back end does not have.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends all its sandboxes and removes what it keeps on the host."""

    def describe(self) -> str:
        """One line for the log."""
        return f"sandbox back end: {self.name}; missing: {'; '.join(self.missing) or 'nothing'}"
