"""Terminal agents: sandboxes for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxagent.config import Config
from jaxagent.data import files, sources
from jaxagent.envs import terminal
from jaxagent.envs.base import Message, Observation
from jaxagent.envs.terminal_tasks import dialogue, replies, rows
from jaxagent.envs.terminal_tasks.task import TerminalTask
from jaxagent.families.sandboxes import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, Sandboxes
from jaxagent.rollout.workers import Workers
from jaxagent.sandbox.base import Sandbox
from jaxagent.sandbox.images.many import Wanted
from jaxagent.types import Task


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
        self._sandboxes = Sandboxes(cfg.env.terminal.sandbox, "env.terminal.sandbox")

    def prompt(self, text: str) -> tuple[Message, ...]:
        """See `family.Family`."""
        return terminal.messages(self._style, text)

    def observation(self, action: str, text: str) -> Observation:
        """See `family.Family`."""
        return terminal.observed(self._style, replies.parse(self._style, action), text)

    def open(self, dataset: Path, tasks: Sequence[Task], workers: Workers, note: Callable[[str], None]) -> None:
        """Finds a back end that works, builds the tasks' own images and begins to fill the pool."""
        known = [rows.from_task(task) for task in tasks]
        note(workers.run(self._sandboxes.open(note), timeout_s=OPEN_TIMEOUT_S))
        if self._config.terminal.sandbox.images:
            if dataset is not None and sources.TRAIN in files.splits(dataset):  # training tasks too, before they count
                known += map(rows.from_task, sources.load_tasks(dataset, sources.TRAIN, need_answers=False))
            wanted = {task.id: image for task in known if (image := _own_image(task)) is not None}
            timeout_s = OPEN_TIMEOUT_S + sum(image.timeout_s for image in wanted.values())
            if wanted:
                note(workers.run(self._sandboxes.build(list(wanted.values())), timeout_s=timeout_s))

    def environment(self, task: Task) -> terminal.TerminalEnvironment:
        """See `family.Family`."""
        return terminal.TerminalEnvironment(task, self._config, self.take)

    async def take(self, task: TerminalTask) -> Sandbox:
        """A running sandbox with the task's image. Raises what `Sandboxes.take` raises."""
        return await self._sandboxes.take(_own_image(task))

    def close(self, workers: Workers) -> None:
        """Ends all sandboxes."""
        workers.run(self._sandboxes.close(), timeout_s=CLOSE_TIMEOUT_S)


def _own_image(task: TerminalTask) -> Wanted | None:
    """The image that the task's folder describes, if it does."""
    image = task.image
    if not (image.name or image.dockerfile or image.definition):
        return None
    return Wanted(
        id=task.id,
        dockerfile=image.dockerfile,
        definition=image.definition,
        name=image.name,
        context=image.context or Path(),
        timeout_s=task.limits.build_timeout_s,
        directory=task.workdir or "/",
    )
