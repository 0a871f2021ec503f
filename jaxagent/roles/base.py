"""A role that speaks text: scripted counterparts and endpoints. Engines of this run are `roles.engines`.

with role.open(name, run, note) as speaker_at:       # once per run
    speaker = speaker_at(task, sample, number)       # one conversation
    reply = await speaker.reply(messages, stop_strings, max_tokens)     # the whole conversation so far, each time
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from jaxagent.config.roles import RoleConfig
from jaxagent.envs.base import Message
from jaxagent.types import Task

Run = Callable[[Coroutine[Any, Any, Any], float], Any]  # (coroutine, timeout_s): on the loop of the episodes


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a speaker says. Tokens that it does not count (None) are counted with the policy's tokenizer."""

    text: str
    finish: str = "eos"  # "stop", "eos" or "length"
    prompt_tokens: int | None = None
    reply_tokens: int | None = None


class Speaker(Protocol):
    """One conversation of a role."""

    async def reply(self, messages: Sequence[Message], stop_strings: Sequence[str], max_tokens: int) -> Reply:
        """Answers the conversation so far; `messages` with role "assistant" are its own earlier replies."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRole(RoleConfig):
    """A role that speaks text. A subclass has `speaker`, or `open` where its conversations share something."""

    def speaker(self, task: Task, sample: int, number: int) -> Speaker:
        """A fresh conversation: number `number` of attempt `sample` at a task, which key whatever is random."""
        raise NotImplementedError

    @contextlib.contextmanager
    def open(self, name: str, run: Run, note: Callable[[str], None]) -> Iterator[Callable[[Task, int, int], Speaker]]:
        """Takes what conversations share and yields the function that begins one.

        Raises:
          ConfigError: the role cannot speak; names config.roles.<name>.
        """
        yield self.speaker
