"""The sandboxes that a config asks for: one back end and one warm pool, on the loop of the rollout workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError, SandboxConfig, SoftwareConfig, WorkersConfig
from jaxagent.sandbox import choose
from jaxagent.sandbox.base import MIB, Backend, Limits, Sandbox, SandboxError, Spec
from jaxagent.sandbox.images import bases
from jaxagent.sandbox.images.built import BuildError
from jaxagent.sandbox.images.many import Images, TaskImage
from jaxagent.sandbox.images.store import Store
from jaxagent.sandbox.owner import Owner
from jaxagent.sandbox.pool import Pool
from jaxagent.sandbox.remote import Remote

OPEN_TIMEOUT_S = 900.0  # every back end may be tried
CLOSE_TIMEOUT_S = 60.0


class Sandboxes:
    """A back end and a pool of its sandboxes. Opened, used and closed on one asyncio loop.

    Args:
      config: what they are.
      field: where that stands in the run's config, for errors.
    """

    def __init__(self, config: SandboxConfig, field: str):
        self._config, self._software = config, config.software or SoftwareConfig()
        self._field = field
        self._owner: Owner | None = None
        self._backend: Backend | None = None
        self._pool: Pool | None = None
        self._images: Images | None = None

    async def open(self, note: Callable[[str], None] = lambda line: None) -> str:
        """Opens everything and returns one line about it.

        Args:
          note: told of every step of an image that is built.

        Raises:
          ConfigError, or SandboxLost where a worker is away: no back end works here.
        """
        spec, software = make_spec(self._config), self._software
        table = bases.parse(software.bases)
        try:
            if self._config.backend == "remote":
                self._backend = remote(self._config, self._field)
                await self._backend.connect()
            else:
                self._owner = Owner()
                names = choose.SAFE if self._config.backend == "auto" else self._config.backend.split(",")
                self._backend = await choose.choose_backend(self._owner, tuple(names), self._config.unsafe, spec)
        except SandboxError as failure:
            raise ConfigError(f"{self._field}: {failure}") from failure
        if software.images:
            self._images = Images(self._backend, Store(software.images), table, software.build_network, note)
        self._pool = Pool(self._backend, spec, self._config.warm)
        self._pool.fill()
        return self._backend.describe()

    async def build(self, images: Sequence[TaskImage]) -> str:
        """Builds images ahead and returns one line that counts them; one that fails is told when its task is taken."""
        return await self._images.get_all(images)

    async def take(self, own: TaskImage | None = None) -> Sandbox:
        """A running sandbox that nobody used.

        Args:
          own: the task's image, where it has one of its own.

        Raises:
          SandboxError: it does not start, or there is no image for the task, or it cannot be built.
        """
        if own is None:
            return await self._pool.take()
        layer = Path(self._software.layers) / own.id
        if self._software.layers and layer.is_dir():
            return await self._backend.start(make_spec(self._config, (str(layer.absolute()),)))
        if self._images is None:
            raise SandboxError(
                f"{own.id} has an image of its own, {self._field}.software.layers has none for it, and "
                f"{self._field}.software.images does not say where to build it"
            )
        try:
            built = await self._images.get(own)
        except BuildError as failure:
            raise SandboxError(f"{own.id}: {failure}") from failure
        return await self._backend.start(built.spec(make_spec(self._config).limits))

    async def close(self) -> None:
        """Ends what was opened: all of it, also where a part of it fails to end, which is raised afterwards."""
        async with contextlib.AsyncExitStack() as stack:  # what is named last ends first
            if self._owner is not None:
                stack.callback(self._owner.close)
            for part in (self._backend, self._pool, self._images):
                if part is not None:
                    stack.push_async_callback(part.close)


@contextlib.contextmanager
def open_sandboxes(opening: Any, config: SandboxConfig) -> Iterator[Sandboxes]:
    """The sandboxes of an environment that is opened. Finds a back end that works and begins to fill the pool.

    `opening`: an `envs.base.Opening`, whose `run` waits for coroutines on the loop and whose `note` prints a line.
    """
    sandboxes = Sandboxes(config, "env.sandbox")
    try:
        opening.note(opening.run(sandboxes.open(opening.note), OPEN_TIMEOUT_S))
        yield sandboxes
    finally:
        opening.run(sandboxes.close(), CLOSE_TIMEOUT_S)


def build_ahead(opening: Any, sandboxes: Sandboxes, images: Iterable[TaskImage | None]) -> None:
    """Builds the images that tasks have of their own, each once, before attempts count."""
    distinct = list({image.id: image for image in images if image is not None}.values())
    if distinct:
        opening.note(
            opening.run(sandboxes.build(distinct), OPEN_TIMEOUT_S + sum(image.timeout_s for image in distinct))
        )


def make_spec(config: SandboxConfig, layers: tuple[str, ...] = ()) -> Spec:
    """A sandbox as the config has it."""
    limits = Limits(
        memory_bytes=config.memory_mb * MIB,
        disk_bytes=config.disk_mb * MIB,
        inodes=config.files,
        processes=config.processes,
        cpus=config.cpus,
    )
    software = config.software or SoftwareConfig()
    root = str(Path(software.root).absolute()) if software.root else ""
    return Spec(root=root, layers=layers, image=software.image, limits=limits)


def remote(config: SandboxConfig, field: str) -> Remote:
    """The workers of the config.

    Raises:
      ConfigError: no workers, or no token.
    """
    config = config.remote or WorkersConfig()
    urls = [url.strip() for url in config.workers.split(",") if url.strip()]
    if not urls:
        raise ConfigError(f"{field}.backend='remote' needs {field}.remote.workers.")
    try:
        token = Path(config.token_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{field}.remote.token_file: '{config.token_file}': {error.strerror}.") from error
    return Remote(urls, token)
