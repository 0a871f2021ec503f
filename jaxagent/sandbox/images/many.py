"""The images of a whole dataset: each built once, as the back end at hand can; what fails is named and counted."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.sandbox.base import Backend, SandboxError
from jaxagent.sandbox.container_engine import ContainerEngine
from jaxagent.sandbox.images import bases, container_images
from jaxagent.sandbox.images.build import Steps
from jaxagent.sandbox.images.build_backend import BuildBackend
from jaxagent.sandbox.images.built import BuildError, Built
from jaxagent.sandbox.images.recipes import build_definition, build_dockerfile
from jaxagent.sandbox.images.store import Store
from jaxagent.sandbox.namespaces import Namespaces

SHOWN_FAILURES = 5


@dataclasses.dataclass(frozen=True)
class TaskImage:
    """One image, by what describes it; the first of these that is set counts."""

    id: str  # of the task
    dockerfile: Path | None = None
    definition: Path | None = None  # apptainer
    name: str = ""  # of an image: one of the bases; with an engine, in its store
    context: Path = Path()  # folder that COPY and %files take from
    timeout_s: float = 600.0
    directory: str = "/"  # where programs of a definition start
    user: str = ""  # whose programs run, by name or number; "" = as the image says


class Images:
    """Builds on one asyncio loop. Close it on that loop.

    Args:
      backend: that the sandboxes will have. Namespaces take layers that are built here; engines build themselves.
      store: where layers are kept.
      table: what FROM may name.
      network: whether build steps have the host's network.
      progress: told of every step.

    Attributes:
      failed: task id -> why its image cannot be built.
    """

    def __init__(
        self,
        backend: Backend,
        store: Store,
        table: Sequence[bases.Base],
        network: bool,
        progress: Callable[[str], None] = lambda line: None,
    ):
        self._backend, self._network, self._build_backend = backend, network, None
        self._store, self._table, self._progress = store, tuple(table), progress
        if isinstance(backend, Namespaces):
            self._build_backend = BuildBackend(backend.owner, network, backend.roots)
        self._builds: dict[str, asyncio.Task[Built]] = {}
        self._gate = asyncio.Semaphore(os.cpu_count() or 1)
        self.failed: dict[str, str] = {}

    async def get(self, image: TaskImage) -> Built:
        """A task's image; built when it is first asked for. A build goes on when who asked stops waiting.

        Raises:
          BuildError: it cannot be built; the same at every later call.
        """
        if image.id not in self._builds:
            self._builds[image.id] = asyncio.get_running_loop().create_task(self._build(image))
        return await asyncio.shield(self._builds[image.id])

    async def get_all(self, images: Sequence[TaskImage]) -> str:
        """Builds all, as many at once as there are processors; returns one line on how that went."""
        results = await asyncio.gather(*(self.get(image) for image in images), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, BuildError):
                raise result
        good = [b for b in results if isinstance(b, Built)]
        ran = sum(b.built > 0 for b in good)
        failed = [self.failed[image.id] for image in images if image.id in self.failed]
        line = f"images of {len(images)} tasks: {ran} built, {len(good) - ran} found, {len(failed)} failed"
        more = [f"and {len(failed) - SHOWN_FAILURES} more"] if len(failed) > SHOWN_FAILURES else []
        return "\n  ".join([line, *failed[:SHOWN_FAILURES], *more])

    async def _build(self, image: TaskImage) -> Built:
        async with self._gate:
            try:
                return await self._build_once(image)
            except (ConfigError, SandboxError, OSError) as error:
                failure = BuildError(image.id, 0, "", str(error))
            except BuildError as error:
                failure = error
        self.failed[image.id] = str(failure)
        raise failure

    async def _build_once(self, image: TaskImage) -> Built:
        if isinstance(self._backend, ContainerEngine):
            if image.user:
                raise BuildError(image.id, 0, "", f"runs as user {image.user}, which {self._backend.name} is not told")
            if image.dockerfile is not None:
                return await container_images.build(
                    self._backend, image.dockerfile, image.context, image.id, image.timeout_s, network=self._network
                )
            if image.definition is not None:
                problem = f"is an apptainer definition, which {self._backend.name} cannot build"
                raise BuildError(image.id, 0, "", problem)
            return await asyncio.to_thread(container_images.inspect, self._backend, image.name, image.id)
        if self._build_backend is None:
            raise BuildError(image.id, 0, "", f"cannot be built: sandboxes of {self._backend.name} take no layers")
        steps = Steps(self._build_backend, self._store, self._table, image.id, image.timeout_s, self._progress)
        if image.dockerfile is not None:
            built = await build_dockerfile(steps, image.dockerfile, image.context)
        elif image.definition is not None:
            built = await build_definition(steps, image.definition, image.context, image.directory)
        else:
            built = await steps.begin(image.name)
        return await steps.user(built, f"the task's user {image.user}", image.user) if image.user else built

    async def close(self) -> None:
        """Ends builds that still go on."""
        for task in self._builds.values():
            task.cancel()
        await asyncio.gather(*self._builds.values(), return_exceptions=True)
        if self._build_backend is not None:
            await self._build_backend.close()
