"""The images of a whole dataset: each built once, as the back end at hand can; what fails is named and counted."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.sandbox.base import Backend, SandboxError
from jaxagent.sandbox.container_engine import ContainerEngine
from jaxagent.sandbox.images import bases
from jaxagent.sandbox.images.build import Steps
from jaxagent.sandbox.images.build_backend import BuildBackend
from jaxagent.sandbox.images.built import BuildError, Built
from jaxagent.sandbox.images.recipes import build_definition, build_dockerfile
from jaxagent.sandbox.images.store import Store, make_key
from jaxagent.sandbox.namespaces import Namespaces

_STEP = re.compile(r"(?:STEP|Step) (\d+)/\d+ ?:\s*(.*)|\[(?:[\w.-]+ +)?(\d+)/\d+\] (.*)")


async def build(
    engine: ContainerEngine,
    dockerfile: Path,
    context: Path,
    name: str,
    timeout_s: float,
    network: bool = False,
) -> Built:
    """`build` of the engine, whose own cache is used.

    Raises:
      BuildError: it failed; the step is the last one that the engine named.
    """
    tag = f"jaxagent/{make_key('engine', str(dockerfile.resolve()), str(context.resolve()))}:latest"
    words = ["build", "--tag", tag, "--file", str(dockerfile), *([] if network else ["--network", "none"])]
    try:
        await asyncio.to_thread(lambda: engine.call(*words, str(context), timeout_s=timeout_s, both=True))
    except SandboxError as error:
        steps = list(_STEP.finditer(str(error)))
        number, text = (int(steps[-1][1] or steps[-1][3]), steps[-1][2] or steps[-1][4]) if steps else (0, "")
        raise BuildError(name, number, text, f"failed in {engine.name} build", str(error)) from None
    return await asyncio.to_thread(inspect, engine, tag, name)


def inspect(engine: ContainerEngine, tag: str, name: str) -> Built:
    """What an image of the engine's store tells its programs. Raises BuildError where it has none of that name."""
    try:
        about = json.loads(engine.call("image", "inspect", tag))[0]
    except (SandboxError, ValueError, IndexError) as error:
        raise BuildError(name, 0, "", f"is not in {engine.name}'s store: {error}") from None
    config = about.get("Config") or {}
    env = dict(item.partition("=")[::2] for item in config.get("Env") or [])
    user = (config.get("User") or "").partition(":")[0]
    # Files may belong to users that the sandbox does not have; user 0 needs the engine's own user namespace.
    uid = int(user) if user.isdigit() else (0 if engine.own_users else 1000)
    home = "/root" if uid == 0 else env.get("HOME", "/home/user")
    directory = config.get("WorkingDir") or "/"
    return Built(about.get("Id", tag), image=tag, env=env, directory=directory, uid=uid, user=user or "root", home=home)


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
                return await build(
                    self._backend, image.dockerfile, image.context, image.id, image.timeout_s, network=self._network
                )
            if image.definition is not None:
                problem = f"is an apptainer definition, which {self._backend.name} cannot build"
                raise BuildError(image.id, 0, "", problem)
            return await asyncio.to_thread(inspect, self._backend, image.name, image.id)
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
