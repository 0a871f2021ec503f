"""Terminal agents: one sandbox back end and one warm pool for all, on the loop of the rollout workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxagent.config import Config, ConfigError, SandboxConfig
from jaxagent.data import files, sources
from jaxagent.envs import terminal
from jaxagent.envs.base import Message
from jaxagent.envs.terminal_tasks import dialogue, rows
from jaxagent.envs.terminal_tasks.task import TerminalTask
from jaxagent.envs.terminal_tasks.verify import VerifierError
from jaxagent.rollout.workers import Workers
from jaxagent.sandbox import choose
from jaxagent.sandbox.base import MIB, Backend, Limits, Sandbox, SandboxError, Spec
from jaxagent.sandbox.images import bases
from jaxagent.sandbox.images.built import BuildError
from jaxagent.sandbox.images.many import Images, Wanted
from jaxagent.sandbox.images.store import Store
from jaxagent.sandbox.owner import Owner
from jaxagent.sandbox.pool import Pool
from jaxagent.sandbox.remote import Remote
from jaxagent.types import Task

_OPEN_TIMEOUT_S = 900.0  # every back end may be tried
_CLOSE_TIMEOUT_S = 60.0


class TerminalFamily:
    """See `family.Family`."""

    score = terminal.SOLVED
    calls = "commands"
    needs_answers = False

    def __init__(self, cfg: Config):
        terminal.check(cfg.env)
        self._config = cfg.env
        self._style = cfg.env.terminal.tools
        self.stop_strings: Sequence[str] = dialogue.STOP_STRINGS[self._style]
        self.tokens: Sequence[str] = dialogue.TAGS[self._style]
        self._sandboxes = Sandboxes(cfg.env.terminal.sandbox)

    def prompt(self, text: str) -> tuple[Message, ...]:
        """See `family.Family`."""
        return terminal.messages(self._style, text)

    def open(self, dataset: Path, tasks: Sequence[Task], workers: Workers, note: Callable[[str], None]) -> None:
        """Finds a back end that works, builds the tasks' own images and begins to fill the pool."""
        known = [rows.from_task(task) for task in tasks]
        note(workers.run(self._sandboxes.open(note), timeout_s=_OPEN_TIMEOUT_S))
        if self._config.terminal.sandbox.images:
            if dataset is not None and sources.TRAIN in files.splits(dataset):  # training tasks too, before they count
                known += map(rows.from_task, sources.load_tasks(dataset, sources.TRAIN, need_answers=False))
            wanted = {task.id: _wanted(task) for task in known if _own_image(task)}
            timeout_s = _OPEN_TIMEOUT_S + sum(image.timeout_s for image in wanted.values())
            if wanted:
                note(workers.run(self._sandboxes.build(list(wanted.values())), timeout_s=timeout_s))

    def environment(self, task: Task) -> terminal.TerminalEnvironment:
        """See `family.Family`."""
        return terminal.TerminalEnvironment(task, self._config, self._sandboxes.take)

    def close(self, workers: Workers) -> None:
        """Ends all sandboxes."""
        workers.run(self._sandboxes.close(), timeout_s=_CLOSE_TIMEOUT_S)


class Sandboxes:
    """A back end and a pool of its sandboxes. Opened, used and closed on one asyncio loop."""

    def __init__(self, config: SandboxConfig):
        self._config = config
        self._owner: Owner | None = None
        self._backend: Backend | None = None
        self._pool: Pool | None = None
        self._images: Images | None = None

    async def open(self, note: Callable[[str], None] = lambda line: None) -> str:
        """Opens everything and returns one line about it.

        Args:
          note: told of every step of an image that is built.

        Raises:
          ConfigError: no back end works here.
        """
        spec, table = make_spec(self._config), bases.parse(self._config.bases)
        try:
            if self._config.backend == "remote":
                self._backend = remote(self._config)
                await self._backend.connect()
            else:
                self._owner = Owner()
                names = choose.SAFE if self._config.backend == "auto" else self._config.backend.split(",")
                self._backend = await choose.choose_backend(self._owner, tuple(names), self._config.unsafe, spec)
        except SandboxError as failure:
            raise ConfigError(f"env.terminal.sandbox: {failure}") from failure
        if self._config.images:
            store, network = Store(self._config.images), self._config.build_network
            self._images = Images(self._backend, store, table, network, note)
        self._pool = Pool(self._backend, spec, self._config.warm)
        self._pool.fill()
        return self._backend.describe()

    async def build(self, wanted: Sequence[Wanted]) -> str:
        """Builds images ahead and returns one line that counts them; one that fails is told when its task is taken."""
        return await self._images.get_all(wanted)

    async def take(self, task: TerminalTask) -> Sandbox:
        """A running sandbox with the task's image.

        Raises:
          SandboxError: it does not start.
          VerifierError: there is no image for the task, or it cannot be built.
        """
        if not _own_image(task):
            return await self._pool.take()
        layer = Path(self._config.layers) / task.id
        if self._config.layers and layer.is_dir():
            return await self._backend.start(make_spec(self._config, (str(layer.absolute()),)))
        if self._images is None:
            raise VerifierError(
                f"{task.id} has an image of its own, env.terminal.sandbox.layers has none for it, and "
                "env.terminal.sandbox.images does not say where to build it"
            )
        try:
            built = await self._images.get(_wanted(task))
        except BuildError as failure:
            raise VerifierError(f"{task.id}: {failure}") from failure
        return await self._backend.start(built.spec(make_spec(self._config).limits))

    async def close(self) -> None:
        """Ends what was opened."""
        if self._images is not None:
            await self._images.close()
        if self._pool is not None:
            await self._pool.close()
        if self._backend is not None:
            await self._backend.close()
        if self._owner is not None:
            self._owner.close()


def _own_image(task: TerminalTask) -> bool:
    return bool(task.image.name or task.image.dockerfile or task.image.definition)


def _wanted(task: TerminalTask) -> Wanted:
    """The task's image, as its folder describes it."""
    image = task.image
    return Wanted(
        id=task.id,
        dockerfile=image.dockerfile,
        definition=image.definition,
        name=image.name,
        context=image.context or Path(),
        timeout_s=task.limits.build_timeout_s,
        directory=task.workdir or "/",
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
    root = str(Path(config.root).absolute()) if config.root else ""
    return Spec(root=root, layers=layers, image=config.image, limits=limits)


def remote(config: SandboxConfig) -> Remote:
    """The workers of the config.

    Raises:
      ConfigError: no workers, or no token.
    """
    urls = [url.strip() for url in config.workers.split(",") if url.strip()]
    if not urls:
        raise ConfigError("env.terminal.sandbox.backend='remote' needs env.terminal.sandbox.workers.")
    try:
        token = Path(config.token_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"env.terminal.sandbox.token_file: '{config.token_file}': {error.strerror}.") from error
    return Remote(urls, token)
