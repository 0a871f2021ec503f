"""Back end (d): apptainer (once singularity), for clusters that offer nothing else.

`Spec.image` is a .sif file, or `Spec.root` a directory, as `apptainer build --sandbox` makes it.
"""

from __future__ import annotations

import os
import shutil

from jaxagent.config import ConfigError
from jaxagent.sandbox.base import Sandbox, SandboxError, Spec
from jaxagent.sandbox.local import NO_TERMINAL_LIMIT, LocalBackend
from jaxagent.sandbox.owner import Owner

PROGRAM = "/tmp/.jaxagent-init"


class Apptainer(LocalBackend):
    """Sandboxes that apptainer makes. Raises SandboxError where it is not installed, and for root."""

    def __init__(self, owner: Owner):
        super().__init__(owner)
        self.name = "apptainer"
        self._program = shutil.which("apptainer") or shutil.which("singularity") or ""
        if not self._program:
            raise SandboxError("apptainer is not installed")
        if os.geteuid() == 0:
            raise SandboxError("apptainer under root would make user id 0 inside the host's root: run as a user")
        self.missing = (
            *self.common_gaps(),
            "what is written is limited by apptainer's own session size (sessiondir max size), not by the spec",
            "user ids inside are the host's; no snapshots",
            "what sockets hold is limited in part only",
            NO_TERMINAL_LIMIT,
        )

    def arguments(self, spec: Spec) -> list[str]:
        """The command that starts a sandbox."""
        words = [self._program, "exec", "--containall", "--cleanenv", "--writable-tmpfs", "--no-home", "--no-privs"]
        words += ["--net", "--network", "none", "--hostname", spec.hostname, "--userns", "--no-init"]
        words += ["--bind", f"{self.public_program()}:{PROGRAM}:ro", spec.root or spec.image]
        return [*words, PROGRAM, "serve", self.owner.process_name]

    async def start(self, spec: Spec) -> Sandbox:
        """Starts a sandbox whose programs run as this user, whatever `spec.uid` says."""
        if spec.layers or bool(spec.image) == bool(spec.root):
            raise ConfigError("apptainer starts sandboxes from a spec's 'image' or 'root', without layers")
        env = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        return await self.begin(
            spec, lambda: (self.arguments(spec), self.describe_inside(spec)), entering=True, env=env
        )
