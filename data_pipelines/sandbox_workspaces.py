"""Where tasks are checked as an attempt would run: sandboxes of the best back end that works here, one per attempt.

SandboxWorkspaces   from a warm pool, for generated tasks, which have no image
ImageWorkspaces     with the task's own image, which is built once and kept
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.envs.terminal.environment import own_image
from jaxagent.envs.terminal.sandbox_workspace import SandboxWorkspace
from jaxagent.envs.terminal.task import TerminalTask
from jaxagent.envs.terminal.verify import VerifierError
from jaxagent.sandbox import choose
from jaxagent.sandbox.base import MIB, Backend, Limits, Sandbox, SandboxError, Spec
from jaxagent.sandbox.images import bases
from jaxagent.sandbox.images.built import BuildError
from jaxagent.sandbox.images.many import Images
from jaxagent.sandbox.images.store import Store
from jaxagent.sandbox.owner import Owner
from jaxagent.sandbox.pool import Pool

LIMITS = Limits(memory_bytes=512 * MIB, disk_bytes=64 * MIB, inodes=20_000, processes=64)  # of generated tasks


class SandboxWorkspaces:
    """Opens a back end and a warm pool for as long as it is entered (`async with`), on one asyncio loop.

    Args:
      names: back ends to try, best first (`choose.SAFE`).
      warm: sandboxes that wait to be used.
    """

    def __init__(self, names: Sequence[str], warm: int):
        self._names = tuple(names)
        self._warm = warm
        self._owner: Owner | None = None
        self._backend: Backend | None = None
        self._pool: Pool | None = None

    async def __aenter__(self) -> SandboxWorkspaces:
        """Raises ConfigError where none of the back ends works."""
        self._owner = Owner()
        try:
            self._backend = await choose.choose_backend(self._owner, self._names)
        except BaseException:
            self._owner.close()
            raise
        print(self._backend.describe(), flush=True)
        self._pool = Pool(self._backend, Spec(limits=LIMITS), self._warm)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._pool.close()
        await self._backend.close()
        self._owner.close()

    async def open(self, task: TerminalTask) -> SandboxWorkspace:
        """A workspace that nobody used.

        Raises:
          VerifierError: the sandbox does not start, or the task has an image of its own.
        """
        if task.image.name or task.image.dockerfile or task.image.definition:
            raise VerifierError(f"{task.id} has an image of its own")
        try:
            return SandboxWorkspace(await self._pool.take())
        except (SandboxError, ConfigError) as failure:
            raise VerifierError(f"{task.id}: {failure}") from failure


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
