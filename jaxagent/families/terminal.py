"""Terminal agents: sandboxes for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxagent.config import Config
from jaxagent.envs import terminal
from jaxagent.envs.base import Message
from jaxagent.envs.terminal_tasks import dialogue, rows
from jaxagent.envs.terminal_tasks.task import TerminalTask
from jaxagent.families.sandboxes import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, Sandboxes
from jaxagent.rollout.workers import Workers
from jaxagent.sandbox.base import Sandbox
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

    def open(self, dataset: Path, tasks: Sequence[Task], workers: Workers, note: Callable[[str], None]) -> None:
        """Finds a back end that works and begins to fill the pool."""
        for task in tasks:
            rows.from_task(task)
        note(workers.run(self._sandboxes.open(), timeout_s=OPEN_TIMEOUT_S))

    def environment(self, task: Task) -> terminal.TerminalEnvironment:
        """See `family.Family`."""
        return terminal.TerminalEnvironment(task, self._config, self.take)

    async def take(self, task: TerminalTask) -> Sandbox:
        """A running sandbox with the task's image. Raises what `Sandboxes.take` raises."""
        own = task.image.name or task.image.dockerfile or task.image.definition
        return await self._sandboxes.take(task.id if own else "")

    def close(self, workers: Workers) -> None:
        """Ends all sandboxes."""
        workers.run(self._sandboxes.close(), timeout_s=CLOSE_TIMEOUT_S)
