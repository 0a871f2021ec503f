"""Back end (b): the program bwrap, for hosts where our own launcher does not work.

Each sandbox has the namespaces that our launcher gives it, a read-only root and five writable tmpfs directories, but no
copy-on-write root, so neither layers nor snapshots.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import threading
from pathlib import Path

from jaxagent.sandbox.base import Sandbox, SandboxError, Spec
from jaxagent.sandbox.local import NETWORK_SETTINGS, NO_TERMINAL_LIMIT, WRITABLE, LocalBackend, check_root
from jaxagent.sandbox.owner import Owner

NEW_NETWORK = 0x40000000
PROGRAM = "/run/jaxagent/init"


def _set_network(pid: int) -> tuple[str, ...]:
    """Writes `NETWORK_SETTINGS` in the sandbox's network namespace, which no process inside may do.

    Args:
      pid: process id of bwrap itself; its only child is inside.

    Returns:
      the settings that could not be written, with the reason, in words; empty where all were.
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

    thread = threading.Thread(target=enter)  # a thread of its own, since it stays in that network
    thread.start()
    thread.join()
    return tuple(gaps)


class Bubblewrap(LocalBackend):
    """Sandboxes that bwrap makes. Raises SandboxError where it is not installed."""

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
        """Starts a sandbox as a host user of its own, or as the shared user where the spec has a root.

        Such a root belongs to the shared user, and bwrap cannot show it as another user's.
        """
        check_root(self.name, spec, layers=False)
        uids = self.owner.uids if not spec.root else None
        uid = uids.take() if uids is not None else self.uid

        def command() -> tuple[list[str], list[bytes]]:
            directives = [*self.describe_inside(spec), *self.describe_settings(network=False)]
            return [self._bwrap, *self._arguments(spec)], directives

        on_closed = functools.partial(uids.free, uid) if uids is not None else lambda: None
        user = uid if os.geteuid() == 0 else None
        return await self.begin(spec, command, on_closed, entering=True, after=_set_network, user=user)

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
