"""What the back ends on this host have in common: one owner, its control groups, the sandboxes that run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.sandbox import init_program, seccomp, wire
from jaxagent.sandbox.base import Backend, Limits, Sandbox, SandboxError, Spec
from jaxagent.sandbox.cgroups import CONTROLLERS
from jaxagent.sandbox.connection import LocalSandbox, spawn
from jaxagent.sandbox.owner import Owner, sandbox_uid
from jaxagent.sandbox.root import Roots

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 60.0
# The host puts the waiting shell into its control groups before it becomes the program.
ENTER = 'read -r go || exit 70; exec "$0" "$@"'
NO_TERMINAL_LIMIT = "one sandbox can take all terminals of the host"
# Of a sandbox's own namespaces, below /proc/sys. The network's are about memory that is charged to no control group: of
# connections that nobody has accepted yet, of options, and of copies of what was sent that wait with its time.
SETTINGS = {"user/max_user_namespaces": "0", "user/max_inotify_instances": "8"}
NETWORK_SETTINGS = {
    "net/core/optmem_max": "20480",
    "net/core/somaxconn": "128",
    "net/core/tstamp_allow_data": "0",
    "net/ipv4/tcp_max_tw_buckets": "4096",
    "net/ipv4/tcp_rmem": "4096 32768 32768",
    "net/ipv4/tcp_wmem": "4096 16384 65536",
}
WITHOUT = {
    "memory": "memory is limited per process only",
    "pids": "processes are limited by RLIMIT_NPROC",
    "cpu": "processor time is not shared out",
}


class LocalBackend(Backend):
    """A back end whose sandboxes are processes of this host."""

    serves_from_root = True  # the program inside starts in the sandbox's root: a dynamic one with its C library

    def __init__(self, owner: Owner):
        self.owner = owner
        self.uid = sandbox_uid()
        self.roots = Roots(owner.path, self.uid)
        self.filter = seccomp.program()
        self.filter_of_root = seccomp.program(tracing=True)
        self._running: set[LocalSandbox] = set()

    @functools.cached_property
    def program(self) -> Path:
        """What serves a sandbox from inside. Raises ConfigError where it is not here and cannot be compiled."""
        return init_program.find(self.owner.path)

    def common_gaps(self) -> list[str]:
        """Protections that this host and user cannot give, whatever the back end."""
        gaps = []
        if lacking := set(CONTROLLERS) - set(self.owner.cgroups.controllers):
            gaps.append(f"control groups cannot be made here ({', '.join(WITHOUT[c] for c in sorted(lacking))})")
        gaps.extend(self.owner.cgroups.gaps)
        if os.geteuid() != 0:
            gaps.append("no dedicated user ids (sandboxes run as this user, with what it may use, in user namespaces)")
        if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 and _cores_are_piped():
            gaps.append("a crash inside starts the host's program for core dumps (the hard limit of cores is 0, not 1)")
        if not self.filter:
            gaps.append("no system call filter for this processor")
        return gaps

    def describe_inside(self, spec: Spec, processes: bool = True) -> list[bytes]:
        """Environment, resource limits and filter: what the program inside applies to itself in every back end."""
        per_process = "memory" not in self.owner.cgroups.controllers
        limits = resource_limits(spec.limits, per_process)
        if processes:  # counted inside the user namespace
            limits[resource.RLIMIT_NPROC] = spec.limits.processes
        return [
            *(wire.texts("e", f"{name}={value}") for name, value in spec.environment().items()),
            wire.texts("w", spec.directory),
            *(wire.limit(kind, value) for kind, value in limits.items()),
            wire.frame("s", self.filter if spec.uid else self.filter_of_root),
        ]

    def describe_settings(self, network: bool) -> list[bytes]:
        """Settings of the namespaces. `network`: the sandbox has one of its own."""
        settings = SETTINGS | (NETWORK_SETTINGS if network else {})
        return [wire.texts("k", path, value) for path, value in settings.items()]

    def public_program(self) -> Path:
        """A copy of the program that serves a sandbox, which the sandboxes' user can read and run."""
        path = self.owner.path / "init"
        if not path.exists():
            part = path.with_suffix(".part")
            shutil.copyfile(self.program, part)
            part.chmod(0o755)
            part.rename(path)
        return path

    def miss(self, *gaps: str) -> None:
        """Adds protections, in words, to those that are missing, and tells of new ones."""
        if lacking := [gap for gap in gaps if gap not in self.missing]:
            self.missing = (*self.missing, *lacking)
            logger.warning("%s", self.describe())

    async def begin(
        self,
        spec: Spec,
        command: Callable[[], tuple[Sequence[str], Sequence[bytes]]],
        on_ended: Callable[[], None] = lambda: None,
        *,
        executable: str | None = None,
        user: int | None = None,
        env: Mapping[str, str] | None = None,
        grouped: bool = True,
        entering: bool = False,
        after: Callable[[int], tuple[str, ...]] = lambda pid: (),
        remove: Callable[[], None] | None = None,
        keeps_layers: bool = False,
        own_network: bool = True,
    ) -> Sandbox:
        """Starts a sandbox in a control group of its own, and tells once what its start could not protect.

        Args:
          command: what starts the program inside, and what that is told.
          on_ended: called when all of the sandbox has ended, also where it does not start.
          env: of the outermost process.
          grouped: False where something else limits it.
          entering: the host puts the command into the group before it does anything; else it enters by itself.
          after: makes what is missing once the outermost process runs; returns what cannot be made, in words.
          executable, user, remove, keeps_layers, own_network: see `connection`.

        Raises:
          SandboxError: no group can be made, or the sandbox does not become ready.
        """
        group = None
        with contextlib.ExitStack() as ending:
            ending.callback(on_ended)
            try:
                group = self.owner.cgroups.make(spec.limits) if grouped else None
            except OSError as failure:
                raise SandboxError(f"no control group can be made: {failure}") from failure
            if group is not None:
                ending.callback(self.owner.cgroups.free, group)
            argv, directives = command()
            procs = group.procs() if group is not None else []
            if entering:
                argv, executable = ["sh", "-c", ENTER, *argv], "/bin/sh"
            else:
                directives = [*directives, *(wire.texts("g", path) for path in procs)]
            process, sock, side = spawn(argv, executable, user, env or {}, keeps_layers)
            on_closed = ending.pop_all().close
        oom_kills = group.oom_kills if group is not None else lambda: None
        sandbox = LocalSandbox(spec, process, sock, side, on_closed, remove, oom_kills, own_network)
        try:
            for path in procs if entering else ():
                Path(path).write_text(str(process.pid), encoding="utf-8")
            told = b"".join((b"\n" * entering, *directives, wire.frame("z")))
            gaps = await sandbox.begin(told, START_TIMEOUT_S, keeps_layers)
        except OSError as failure:
            await sandbox.close()
            raise SandboxError(f"the sandbox did not start: {failure}") from failure
        except SandboxError as failure:
            if self.serves_from_root and init_program.is_dynamic(self.program):
                raise SandboxError(f"{failure} ({init_program.ONE_LIBRARY})") from failure
            raise
        self.miss(*gaps, *after(sandbox.pid))
        self._running = {s for s in self._running if not s.is_closed} | {sandbox}
        return sandbox

    async def close(self) -> None:
        """Ends all sandboxes that run."""
        for sandbox in list(self._running):
            await sandbox.close()
        self._running.clear()


# Where a back end has no tmpfs under the whole root: separate ones, one part in so many of the disk limit.
WRITABLE = {"/home/user": 2, "/tmp": 4, "/var/tmp": 8, "/dev/shm": 16, "/run": 16}


def _cores_are_piped() -> bool:
    """Whether the kernel hands core dumps to a program, as root and outside of every limit."""
    try:
        return Path("/proc/sys/kernel/core_pattern").read_text(encoding="utf-8").startswith("|")
    except OSError:
        return False


def resource_limits(limits: Limits, memory: bool) -> dict[int, int]:
    """Limits of each process. `memory`: address space too, where no control group limits memory."""
    values = {
        resource.RLIMIT_CORE: 1,  # with 0 the host's program that takes core dumps from a pipe is started nevertheless
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_FSIZE: limits.disk_bytes,
        resource.RLIMIT_MEMLOCK: 65536,
        resource.RLIMIT_MSGQUEUE: 2**18,  # three queues as they are by default
        resource.RLIMIT_SIGPENDING: 1024,  # and as many timers
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
    }
    if memory:
        values[resource.RLIMIT_AS] = limits.memory_bytes
    return values


def check_root(name: str, spec: Spec, layers: bool = True, root: bool = True) -> None:
    """Raises ConfigError where the spec asks for a root that the back end of this name does not have."""
    if spec.image:
        raise ConfigError(f"sandbox spec 'image' = {spec.image!r} needs docker or podman; {name} takes directories")
    if spec.layers and not layers:
        raise ConfigError(f"sandbox spec 'layers': {name} has no copy-on-write root to put layers on")
    if spec.root and not root:
        raise ConfigError(f"sandbox spec 'root': {name} runs in the host's own root")
    for directory in (*spec.layers, *filter(None, [spec.root])):
        if not os.path.isdir(directory):
            raise ConfigError(f"sandbox layer '{directory}' is not a directory")


class Plain(LocalBackend):
    """Back end (f): plain processes. Programs can read, write and kill whatever this user can. For development."""

    serves_from_root = False

    def __init__(self, owner: Owner):
        super().__init__(owner)
        self.name = "plain (unsafe)"
        self.missing = ("all isolation: programs act on this host as this user, with the network", "disk limits")
        self._last_number = 0

    async def start(self, spec: Spec) -> Sandbox:
        """The shell starts in a directory of its own, whatever `spec.directory` is."""
        check_root(self.name, spec, layers=False, root=False)
        program = str(self.program)
        self._last_number += 1
        directory = self.owner.path / f"plain-{self._last_number}"
        directory.mkdir(mode=0o700)
        spec = dataclasses.replace(spec, directory=str(directory))
        return await self.begin(
            spec,
            lambda: ((program, "serve", self.owner.process_name), self.describe_inside(spec, processes=False)),
            lambda: shutil.rmtree(directory, ignore_errors=True),
            entering=True,
            own_network=False,
        )
