"""Back end (f): plain processes of this user, without any isolation. For development, behind an explicit flag."""

from __future__ import annotations

import dataclasses
import shutil

from jaxagent.sandbox.base import Sandbox, Spec
from jaxagent.sandbox.connection import start_sandbox
from jaxagent.sandbox.local import ENTER, START_TIMEOUT_S, LocalBackend, check_root, enter_group
from jaxagent.sandbox.owner import Owner


class Plain(LocalBackend):
    """See `base.Backend`. Programs can read, write and kill whatever this user can."""

    def __init__(self, owner: Owner, compiled: bool = True):
        super().__init__(owner, compiled)
        self.name = "plain (unsafe)"
        self.missing = ("all isolation: programs act on this host as this user, with the network", "disk limits")
        self._argv, self._executable = self.command_on_host("serve")
        self._started = 0

    async def start(self, spec: Spec) -> Sandbox:
        """See `base.Backend`. The shell starts in a directory of its own, whatever `spec.directory` is."""
        check_root(self.name, spec, layers=False, root=False)
        self._started += 1
        directory = self.owner.path / f"plain-{self._started}"
        directory.mkdir(mode=0o700)
        spec = dataclasses.replace(spec, directory=str(directory))
        group = self.make_group(spec.limits)

        def ended() -> None:
            self.free_group(group)
            shutil.rmtree(directory, ignore_errors=True)

        sandbox = await start_sandbox(
            ["sh", "-c", ENTER, self._executable, *self._argv[1:]],
            self.describe_inside(spec, processes=False).encode(),
            spec,
            START_TIMEOUT_S,
            on_closed=ended,
            oom_kills=self.count_oom_kills(group),
            own_network=False,
            executable="/bin/sh",
            enter=lambda pid: enter_group(group, pid),
        )
        return self.keep(sandbox)
