"""Back end (f): plain processes of this user, without any isolation. For development, behind an explicit flag."""

from __future__ import annotations

import dataclasses
import shutil

from jaxagent.sandbox.base import Sandbox, Spec
from jaxagent.sandbox.local import LocalBackend, check_root
from jaxagent.sandbox.owner import Owner


class Plain(LocalBackend):
    """Plain processes. Programs can read, write and kill whatever this user can."""

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
