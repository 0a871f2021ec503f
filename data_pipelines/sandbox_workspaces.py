"""`ImageWorkspaces`: where tasks that are being made run, in sandboxes of the best back end that works here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from jaxagent.envs.terminal.environment import own_image
from jaxagent.envs.terminal.sandbox_workspace import SandboxWorkspace
from jaxagent.envs.terminal.task import TerminalTask
from jaxagent.envs.terminal.verify import VerifierError
from jaxagent.sandbox import choose
from jaxagent.sandbox.base import MIB, Backend, Limits, Sandbox
from jaxagent.sandbox.images import bases
from jaxagent.sandbox.images.built import BuildError
from jaxagent.sandbox.images.many import Images
from jaxagent.sandbox.images.store import Store
from jaxagent.sandbox.owner import Owner


class ImageWorkspaces:
    """Opens a workspace for a task. For one event loop; `close` when that has ended.

    Args:
      folder: where built layers are kept.
      table: entries of `sandbox.images.bases`.
      network: whether build steps have this machine's network.
    """

    def __init__(self, folder: Path, table: Sequence[str], network: bool):
        self._owner, self._store, self._table, self._network = Owner(), Store(folder), bases.parse(table), network
        self._lock = asyncio.Lock()
        self._backend: Backend | None = None
        self._images: Images | None = None

    async def open(self, task: TerminalTask) -> SandboxWorkspace:
        """A new sandbox with the task's image, as a workspace. Raises what `take` raises."""
        return SandboxWorkspace(await self.take(task))

    async def take(self, task: TerminalTask) -> Sandbox:
        """A new sandbox with the task's image.

        Raises:
          VerifierError: the image cannot be built; its step is named.
          SandboxError: it does not start.
        """
        async with self._lock:
            if self._images is None:
                self._backend = await choose.choose_backend(self._owner)
                self._images = Images(self._backend, self._store, self._table, self._network, print)
        try:
            built = await self._images.get(own_image(task))
        except BuildError as error:
            raise VerifierError(str(error)) from error
        limits = task.limits
        size = Limits(limits.memory_mb * MIB, limits.storage_mb * MIB, cpus=limits.cpus)
        return await self._backend.start(built.spec(size))

    def close(self) -> None:
        """Removes what is left of all sandboxes."""
        self._owner.close()
