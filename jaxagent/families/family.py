"""The interface of a family of environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from jaxagent.config import Config
from jaxagent.envs.base import Environment, Message, Observation
from jaxagent.rollout.workers import Workers
from jaxagent.types import Task


class Family(Protocol):
    """Made cheaply; `open` takes what all its environments share, `close` gives it back.

    Attributes:
      score: the component of the verdict that evaluation and the warm start's gate look at, between 0 and 1.
      calls: the environment's counter of tool calls.
      needs_answers: whether a task without gold answers is a mistake.
      stop_strings: what ends a generation.
      tokens: texts that a tokenizer trained for this run keeps whole.
    """

    score: str
    calls: str
    needs_answers: bool
    stop_strings: Sequence[str]
    tokens: Sequence[str]

    def __init__(self, cfg: Config):
        """Raises ConfigError for settings that cannot work."""

    def prompt(self, text: str) -> tuple[Message, ...]:
        """The messages of a task's prompt, for demonstrations."""
        ...

    def observation(self, action: str, text: str) -> Observation:
        """What an environment shows after an action, given only its text, for demonstrations."""
        ...

    def open(self, dataset: Path, tasks: Sequence[Task], workers: Workers, note: Callable[[str], None]) -> None:
        """Takes what the environments share.

        Args:
          dataset: the run's data.
          tasks: the held-out ones; a wrong kind of task is told here.
          workers: on whose loop the environments will run.
          note: told of what is worth printing.

        Raises:
          ConfigError: something does not work here.
        """

    def environment(self, task: Task) -> Environment:
        """A fresh attempt. Only while open."""
        ...

    def close(self, workers: Workers) -> None:
        """Gives everything back."""
