"""Back end (a): Linux namespaces and a copy-on-write root, made by our own launcher.

New user, pid, mount, net, ipc and uts namespaces; an overlay over read-only layers whose writes go to a tmpfs of fixed
size; a host user id for each sandbox, to which the layers of one user on disk are mapped; no_new_privs, no
capabilities, a seccomp filter, an empty environment; control groups where they can be made, else resource limits. The
outermost process dies with the thread that started it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from jaxagent.sandbox import wire
from jaxagent.sandbox.base import Sandbox, SandboxError, Spec
from jaxagent.sandbox.local import LocalBackend, check_root
from jaxagent.sandbox.owner import Owner
from jaxagent.sandbox.root import OPEN

NOT_MAPPED = "id-mapped layers"  # what the launcher says
ONE_USER = "sandboxes share a host user id (layers that cannot be id-mapped here), and with it what a user may use"


class Namespaces(LocalBackend):
    """Sandboxes that our own launcher makes."""

    separates = True  # where it can be done, each sandbox has a host user id of its own
    network = False  # the host's, which only steps of a build may have
    protects = True  # an agent that is not user 0 cannot change the root's programs and configuration

    serves_from_root = False

    def __init__(self, owner: Owner):
        super().__init__(owner)
        self.name = "namespaces"
        self.missing = tuple(self.common_gaps())
        self._mount_point = owner.path / "mount"
        self._mount_point.mkdir(exist_ok=True)
        self._mount_point.chmod(0o755)
        self._not_mapped: set[tuple[str, tuple[str, ...]]] = set()  # roots and layers for which it cannot be done

    async def start(self, spec: Spec) -> Sandbox:
        """Starts a sandbox as a host user of its own, or as the shared one where layers cannot be mapped to it."""
        check_root(self.name, spec)
        uids = self.owner.uids if self.separates else None
        if uids is None or (spec.root, spec.layers) in self._not_mapped:
            return await self._start(spec, self.uid, lambda: None)
        uid = uids.take()
        try:
            return await self._start(spec, uid, lambda: uids.free(uid))
        except SandboxError as failure:
            if NOT_MAPPED not in str(failure):
                raise
        # The kernel is too old for it, or the layers lie on a file system that cannot do it.
        sandbox = await self._start(spec, self.uid, lambda: None)
        self._not_mapped.add((spec.root, spec.layers))
        self.miss(ONE_USER)
        return sandbox

    async def _start(self, spec: Spec, uid: int, on_ended: Callable[[], None]) -> Sandbox:
        name = self.owner.process_name
        argv = [name, "launch", name]  # what shows inside does not name the program's place on the host
        return await self.begin(
            spec,
            lambda: (argv, self.describe_outside(spec, uid)),
            on_ended,
            executable=str(self.program),
            keeps_layers=True,
        )

    def describe_outside(self, spec: Spec, uid: int) -> list[bytes]:
        """Everything that the launcher is told, but for control groups. `uid`: on the host."""
        limits = spec.limits
        root = self.roots.named(self.roots.root(spec.root, spec.layers, spec.uid), spec.hostname)
        if self.protects and spec.uid != 0:
            root = self.roots.protected(root)
        own = {spec.directory, spec.environment()["HOME"]} if root.read_only else set()
        as_root = os.geteuid() == 0
        return [
            *self.describe_inside(spec),
            wire.number("p", os.getpid()),
            *([wire.number("u", uid), wire.number("d", self.uid)] if as_root else []),
            wire.number("i", spec.uid),
            wire.texts("m", str(self._mount_point)),
            wire.texts("t", f"size={limits.disk_bytes},nr_inodes={limits.inodes},mode=0755"),
            wire.texts("l", ":".join(reversed(root.layers))),
            *(wire.texts("b", source, target) for source, target in root.binds),
            *(wire.texts("o", source, target) for source, target in root.read_only),
            *(wire.texts("a", path) for path in sorted(own) if path.startswith(OPEN) and ".." not in path),
            wire.texts("h", spec.hostname),
            wire.number("n", int(self.network)),
            *self.describe_settings(network=not self.network),
        ]
