"""Agents that write and run Python: sandboxes for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxagent.config import Config, ConfigError
from jaxagent.envs import hidden_tests, python
from jaxagent.envs.base import Message, Observation
from jaxagent.families.sandboxes import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, Sandboxes
from jaxagent.rollout.workers import Workers
from jaxagent.sandbox.base import SandboxError
from jaxagent.types import Task

_TRY_TIMEOUT_S = 60.0


class PythonFamily:
    """See `family.Family`."""

    score = python.SOLVED
    calls = "programs"

    def __init__(self, cfg: Config):
        python.check(cfg.env)
        self._config = cfg.env
        self._format, self._judge = cfg.env.python.format, cfg.env.python.judge
        self.needs_answers = self._judge == "answer"
        self.stop_strings: Sequence[str] = python.STOP_STRINGS.get((self._format, self._judge), ())
        self.tokens: Sequence[str] = python.TAGS[self._format]
        self._sandboxes = Sandboxes(cfg.env.python.sandbox, "env.python.sandbox")

    def prompt(self, text: str) -> tuple[Message, ...]:
        """See `family.Family`."""
        return python.messages(self._format, self._judge, text, self._config.python.system)

    def observation(self, action: str, text: str) -> Observation:
        """See `family.Family`."""
        return python.observed(self._format, python.find_program(self._format, action), text)

    def open(self, dataset: Path, tasks: Sequence[Task], workers: Workers, note: Callable[[str], None]) -> None:
        """Looks at the tasks, finds a back end that works, begins to fill the pool and runs one program."""
        for task in tasks:
            hidden_tests.files_of(task)
            if self._judge == "tests":
                hidden_tests.of_task(task)
        note(workers.run(self._sandboxes.open(), timeout_s=OPEN_TIMEOUT_S))
        workers.run(self._try(), timeout_s=2 * _TRY_TIMEOUT_S)

    def environment(self, task: Task) -> python.PythonEnvironment:
        """See `family.Family`."""
        return python.PythonEnvironment(task, self._config, self._sandboxes.take)

    def close(self, workers: Workers) -> None:
        """Ends all sandboxes."""
        workers.run(self._sandboxes.close(), timeout_s=CLOSE_TIMEOUT_S)

    async def _try(self) -> None:
        try:
            async with await self._sandboxes.take() as sandbox:
                said = await sandbox.execute(("python3", "-c", "print(6 * 7)"), _TRY_TIMEOUT_S, 1000)
        except SandboxError as failure:
            raise ConfigError(f"env.python.sandbox: {failure}") from failure
        if said.output.strip() != b"42":
            raise ConfigError(f"env.python.sandbox: python3 does not run there: {said.output[-200:].decode()!r}.")
