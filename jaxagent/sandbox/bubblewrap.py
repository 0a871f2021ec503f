"""Back end (b): bubblewrap alone. A read-only root and writable tmpfs directories; no copy-on-write of the root."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import threading
from pathlib import Path

from jaxagent.sandbox import wire
from jaxagent.sandbox.base import Sandbox, SandboxError, Spec
from jaxagent.sandbox.cgroups import Group
from jaxagent.sandbox.local import NETWORK_SETTINGS, NO_TERMINAL_LIMIT, WRITABLE, LocalBackend, check_root
from jaxagent.sandbox.owner import Owner

NEW_NETWORK = 0x40000000
PROGRAM = "/run/jaxagent/init"


def _set_network(pid: int) -> tuple[str, ...]:
    """Makes the settings of the sandbox's network, which belongs to no process inside. Returns gaps, in words.

    Args:
      pid: of the outermost process; its child is inside.
    """
    gaps: list[str] = []

    def enter() -> None:
        try:
            (inside,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
            with open(f"/proc/{inside}/ns/net", "rb") as network:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(network.fileno(), NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            for path, value in NETWORK_SETTINGS.items():
                Path("/proc/sys", path).write_text(value, encoding="utf-8")
        except (OSError, ValueError) as failure:
            gaps.append(f"{', '.join(NETWORK_SETTINGS)}: {getattr(failure, 'strerror', '') or failure}")

    thread = threading.Thread(target=enter)  # one of its own: it stays in that network
    thread.start()
    thread.join()
    return tuple(gaps)


class Bubblewrap(LocalBackend):
    """See `base.Backend`. Raises SandboxError where there is no bubblewrap."""

    def __init__(self, owner: Owner):
        super().__init__(owner)
        self.name = "bubblewrap"
        self._bwrap = shutil.which("bwrap") or ""
        if not self._bwrap:
            raise SandboxError("bwrap is not installed")
        self.missing = (
            *self.common_gaps(),
            "no copy-on-write root (only /home/user, /tmp, /var/tmp, /run and /dev/shm are writable), no snapshots",
            "no limit on the number of files",
            NO_TERMINAL_LIMIT,
            *(["sandboxes with a given root share one host user id"] if os.geteuid() == 0 else []),
        )

    async def start(self, spec: Spec) -> Sandbox:
        """See `base.Backend`."""
        check_root(self.name, spec, layers=False)
        # A given root belongs to the shared user, and bubblewrap cannot show it as another's.
        uids = self.owner.uids if not spec.root else None
        uid = uids.take() if uids is not None else self.uid

        def command(group: Group | None) -> tuple[list[str], wire.Directives]:
            directives = self.describe_inside(spec)
            self.describe_settings(directives, network=False)
            return [self._bwrap, *self._arguments(spec)], directives

        ended = functools.partial(uids.free, uid) if uids is not None else lambda: None
        user = uid if os.geteuid() == 0 else None
        return await self.begin(spec, command, ended, entering=True, after=_set_network, user=user)

    def _arguments(self, spec: Spec) -> list[str]:
        isolation = (
            "--unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --die-with-parent --as-pid-1"
        )
        words = [*isolation.split(), "--clearenv", "--cap-drop", "ALL"]
        for capability in ("CAP_SYS_RESOURCE", "CAP_SETPCAP"):  # for the settings; process 1 then gives both up
            words += ["--cap-add", capability]
        words += ["--uid", str(spec.uid), "--gid", str(spec.uid), "--hostname", spec.hostname]
        root = self.roots.root(spec.root, (), spec.uid)
        words += ["--ro-bind", root.layers[-1], "/"]
        for source, target in root.binds:
            words += ["--ro-bind", source, target]
        words += ["--proc", "/proc", "--dev", "/dev"]
        for path, parts in WRITABLE.items():
            words += ["--size", str(spec.limits.disk_bytes // parts), "--tmpfs", path]
        words += ["--remount-ro", "/dev"]
        words += ["--ro-bind", str(self.public_program()), PROGRAM, "--", PROGRAM, "serve", self.owner.process_name]
        return words
