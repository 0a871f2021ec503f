"""A warm pool: sandboxes of one spec that are started before they are wanted."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from jaxagent.sandbox.base import Backend, Sandbox, SandboxError, Spec


class Pool:
    """Keeps `size` sandboxes ready. Each is used once: the taker closes it, and another is started in its place.

    Must be used and closed on one asyncio loop.
    """

    def __init__(self, backend: Backend, spec: Spec, size: int):
        self._backend = backend
        self._spec = spec
        self._size = size
        self._ready: deque[asyncio.Task[Sandbox]] = deque()
        self._closed = False

    def fill(self) -> None:
        """Begins to start what is missing; `take` does so too."""
        while len(self._ready) < self._size and not self._closed:
            self._ready.append(asyncio.get_running_loop().create_task(self._backend.start(self._spec)))

    async def take(self) -> Sandbox:
        """A running sandbox that nobody used. Those that died or did not start while they waited are passed over.

        Raises:
          SandboxError: one cannot be started now, also when the pool is closed.
        """
        warm = set(self._ready)
        while not self._closed:
            if not self._ready:
                self._ready.append(asyncio.get_running_loop().create_task(self._backend.start(self._spec)))
            ready = next((task for task in self._ready if task.done()), self._ready[0])
            self._ready.remove(ready)
            self.fill()
            try:
                sandbox = await asyncio.shield(ready)
            except asyncio.CancelledError:
                self._ready.appendleft(ready)  # whoever waited is gone; the next taker gets it, or close ends it
                raise
            except Exception:
                if ready in warm:
                    continue  # it failed earlier: what starts now may work
                raise
            if ready not in warm or await sandbox.lives():
                return sandbox
            with contextlib.suppress(SandboxError):
                await sandbox.close()
        raise SandboxError("the pool of sandboxes is closed")

    async def close(self) -> None:
        """Closes the sandboxes that nobody took."""
        self._closed = True
        while self._ready:
            ready = self._ready.popleft()
            try:
                sandbox = await ready
            except Exception:  # it did not start, whatever the reason, and nobody wanted it
                continue
            with contextlib.suppress(SandboxError):
                await sandbox.close()
