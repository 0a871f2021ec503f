"""Where tasks are checked as an attempt would run: sandboxes of the best back end that works here, one per attempt."""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.config import ConfigError
from jaxagent.envs.terminal import sandbox_place
from jaxagent.envs.terminal.task import TerminalTask
from jaxagent.envs.terminal.verify import VerifierError
from jaxagent.sandbox import choose
from jaxagent.sandbox.base import MIB, Backend, Limits, Sandbox, SandboxError, Spec
from jaxagent.sandbox.owner import Owner
from jaxagent.sandbox.pool import Pool

LIMITS = Limits(memory_bytes=512 * MIB, disk_bytes=64 * MIB, inodes=20_000, processes=64)  # of generated tasks


class SandboxedPlace(sandbox_place.SandboxPlace):
    """A `terminal_check.ClosablePlace` in a sandbox of its own."""

    def __init__(self, sandbox: Sandbox):
        super().__init__(sandbox)
        self._own = sandbox

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._own.close()


class SandboxPlaces:
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

    async def __aenter__(self) -> SandboxPlaces:
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

    async def open(self, task: TerminalTask) -> SandboxedPlace:
        """A place that nobody used.

        Raises:
          VerifierError: the sandbox does not start, or the task has an image of its own.
        """
        if task.image.name or task.image.dockerfile or task.image.definition:
            raise VerifierError(f"{task.id} has an image of its own")
        try:
            return SandboxedPlace(await self._pool.take())
        except (SandboxError, ConfigError) as failure:
            raise VerifierError(f"{task.id}: {failure}") from failure
