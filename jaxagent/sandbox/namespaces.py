"""Back end (a): Linux namespaces and a copy-on-write root, made by our own launcher.

New user, pid, mount, net, ipc and uts namespaces; an overlay over read-only layers whose writes go to a tmpfs of fixed
size; a dedicated user id; no_new_privs, no capabilities, a seccomp filter, an empty environment; control groups where
they can be made, else resource limits. The outermost process dies with the thread that started it.

The launcher is the compiled helper, or `agent.py` in an isolated Python where there is no compiler.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.sandbox import seccomp, wire
from jaxagent.sandbox.base import Backend, Limits, Sandbox, SandboxError, Spec
from jaxagent.sandbox.cgroups import Cgroups
from jaxagent.sandbox.connection import HelperSandbox, start_helper
from jaxagent.sandbox.helper import helper
from jaxagent.sandbox.owner import Owner, sandbox_uid
from jaxagent.sandbox.root import Roots

START_TIMEOUT_S = 60.0
SCRIPT = Path(__file__).parent / "agent.py"


class Namespaces(Backend):
    """See `base.Backend`.

    Args:
      compiled: False for the launcher in Python even where a compiler is at hand.
    """

    def __init__(self, owner: Owner, compiled: bool = True):
        self._owner = owner
        program = helper() if compiled else None
        self._compiled = program is not None
        self._argv = [owner.process_name, "launch"]
        self._executable = str(program) if program else sys.executable
        if not program:
            self._argv = [owner.process_name, "-I", "-S", str(SCRIPT), "launch"]
        self.name = "namespaces" if program else "namespaces-python"
        self._uid = sandbox_uid()
        self._roots = Roots(owner.path, self._uid)
        self._mount_point = owner.path / "mount"
        self._mount_point.mkdir(exist_ok=True)
        self._mount_point.chmod(0o755)
        self._cgroups = Cgroups(owner.id)
        owner.note("cgroups", self._cgroups.directories)
        self._filter = seccomp.program()
        self._running: set[HelperSandbox] = set()
        self.missing = self._gaps()

    def _gaps(self) -> tuple[str, ...]:
        gaps = []
        if lacking := {"memory", "pids", "cpu"} - set(self._cgroups.controllers):
            instead = {
                "memory": "memory is limited per process only",
                "pids": "processes are limited by RLIMIT_NPROC",
                "cpu": "processor time is not shared out",
            }
            gaps.append(f"control groups cannot be made here ({', '.join(instead[c] for c in sorted(lacking))})")
        if os.geteuid() != 0:
            gaps.append("no dedicated user id (sandboxes run as this user, in their own user namespace)")
        if not self._filter:
            gaps.append("no system call filter for this processor")
        return tuple(gaps)

    async def start(self, spec: Spec) -> Sandbox:
        """See `base.Backend`."""
        if spec.image:
            raise ConfigError(f"sandbox spec 'image' = {spec.image!r} needs docker or podman; {self.name} takes layers")
        for layer in spec.layers:
            if not os.path.isdir(layer):
                raise ConfigError(f"sandbox layer '{layer}' is not a directory")
        try:
            group = self._cgroups.make(spec.limits)
        except OSError as failure:
            raise SandboxError(f"no control group can be made: {failure}") from failure

        def ended() -> None:
            if group is not None:
                self._cgroups.free(group)

        directives = self._describe(spec, group.procs() if group else [])
        sandbox = await start_helper(
            self._argv, directives, spec, START_TIMEOUT_S, ended, self._executable, auxiliary=True
        )
        self._running = {s for s in self._running if s._closing is None} | {sandbox}
        return sandbox

    def _describe(self, spec: Spec, groups: list[str]) -> bytes:
        limits, directives = spec.limits, wire.Directives()
        root = self._roots.root(spec.layers, spec.uid)
        directives.number("p", os.getpid())
        if os.geteuid() == 0:
            directives.number("u", self._uid)
        directives.number("i", spec.uid)
        for procs in groups:
            directives.text("g", procs)
        directives.text("m", str(self._mount_point))
        directives.text("t", f"size={limits.disk_bytes},nr_inodes={limits.inodes},mode=0755")
        directives.text("l", ":".join(reversed(root.layers)))
        for source, target in root.binds:
            directives.text("b", source, target)
        directives.text("h", spec.hostname)
        describe_inside(directives, spec, memory=None if "memory" in self._cgroups.controllers else limits.memory_bytes)
        directives.limit(resource.RLIMIT_NPROC, limits.processes)  # counted inside the user namespace
        return directives.encode()

    async def close(self) -> None:
        """See `base.Backend`."""
        for sandbox in list(self._running):
            await sandbox.close()
        self._running.clear()
        self._cgroups.close()


def describe_inside(directives: wire.Directives, spec: Spec, memory: int | None) -> None:
    """Environment, resource limits and filter: what the helper applies to itself in every back end."""
    for name, value in spec.environment().items():
        directives.text("e", f"{name}={value}")
    directives.text("w", spec.directory)
    for kind, value in resource_limits(spec.limits, memory).items():
        directives.limit(kind, value)
    directives.filter(seccomp.program())


def resource_limits(limits: Limits, memory: int | None) -> dict[int, int]:
    """Limits of each process. `memory`: bytes of address space, where no control group limits memory."""
    found = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_FSIZE: limits.disk_bytes,
        resource.RLIMIT_MEMLOCK: 65536,
        resource.RLIMIT_MSGQUEUE: 819200,
    }
    if memory is not None:
        found[resource.RLIMIT_AS] = memory
    return found
