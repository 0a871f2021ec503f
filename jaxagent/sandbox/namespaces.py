"""Back end (a): Linux namespaces and a copy-on-write root, made by our own launcher.

New user, pid, mount, net, ipc and uts namespaces; an overlay over read-only layers whose writes go to a tmpfs of fixed
size; a dedicated user id; no_new_privs, no capabilities, a seccomp filter, an empty environment; control groups where
they can be made, else resource limits. The outermost process dies with the thread that started it.

The launcher is the compiled helper, or `agent.py` in an isolated Python where there is no compiler.
"""

from __future__ import annotations

import os

from jaxagent.sandbox import wire
from jaxagent.sandbox.base import Sandbox, Spec
from jaxagent.sandbox.connection import start_helper
from jaxagent.sandbox.local import START_TIMEOUT_S, LocalBackend, check_root, launcher
from jaxagent.sandbox.owner import Owner
from jaxagent.sandbox.root import OPEN


class Namespaces(LocalBackend):
    """See `base.Backend`.

    Args:
      compiled: False for the launcher in Python even where a compiler is at hand.
    """

    protects = True  # an agent that is not user 0 cannot change the root's programs and configuration

    def __init__(self, owner: Owner, compiled: bool = True):
        super().__init__(owner, compiled)
        self.name = "namespaces" if self.program else "namespaces-python"
        self.missing = tuple(self.common_gaps())
        self._argv, self._executable = launcher(self.program, owner.process_name, "launch")
        self._mount_point = owner.path / "mount"
        self._mount_point.mkdir(exist_ok=True)
        self._mount_point.chmod(0o755)

    async def start(self, spec: Spec) -> Sandbox:
        """See `base.Backend`."""
        check_root(self.name, spec)
        group = self.make_group(spec.limits)
        sandbox = await start_helper(
            self._argv,
            self.describe_outside(spec, group.procs() if group else []).encode(),
            spec,
            START_TIMEOUT_S,
            on_closed=lambda: self.free_group(group),
            oom_kills=self.count_oom_kills(group),
            executable=self._executable,
            auxiliary=True,
        )
        return self.keep(sandbox)

    def describe_outside(self, spec: Spec, groups: list[str]) -> wire.Directives:
        """Everything that the launcher is told; `groups` are the control groups' lists of processes."""
        limits, directives = spec.limits, self.describe_inside(spec)
        root = self.roots.root(spec.root, spec.layers, spec.uid)
        if self.protects and spec.uid != 0:
            root = self.roots.protected(root)
        directives.number("p", os.getpid())
        if os.geteuid() == 0:
            directives.number("u", self.uid)
        directives.number("i", spec.uid)
        for procs in groups:
            directives.text("g", procs)
        directives.text("m", str(self._mount_point))
        directives.text("t", f"size={limits.disk_bytes},nr_inodes={limits.inodes},mode=0755")
        directives.text("l", ":".join(reversed(root.layers)))
        for source, target in root.binds:
            directives.text("b", source, target)
        for source, target in root.read_only:
            directives.text("o", source, target)
        own = {spec.directory, spec.environment()["HOME"]} if root.read_only else set()
        for path in sorted(path for path in own if path.startswith(OPEN) and ".." not in path):
            directives.text("a", path)
        directives.text("h", spec.hostname)
        return directives
