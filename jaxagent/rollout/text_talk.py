"""A conversation with a role that speaks text: scripted counterparts and endpoints; see `roles.base`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxagent import contract
from jaxagent.envs.base import Message
from jaxagent.envs.cast import Said, Spliced
from jaxagent.roles.base import Reply, Speaker
from jaxagent.rollout.asking import whole
from jaxagent.types import Heard

if TYPE_CHECKING:
    from jaxagent.rollout.cast import EpisodeCast


class TextTalk:
    """A conversation with a role that speaks text. Its tokens are counted with the policy's tokenizer if need be."""

    trained = False

    def __init__(self, cast: EpisodeCast, role: str, speaker: Speaker, after: int) -> None:
        self.role, self.state = role, ""  # why it cannot be asked now; "" = it can
        self._cast, self._speaker, self._after = cast, speaker, after
        self._messages: list[Message] = []
        self._turns: list[tuple[str, str]] = []

    async def say(
        self, *messages: Message | Spliced, stop_strings: Sequence[str] = (), max_tokens: int | None = None
    ) -> Said:
        """See `envs.cast.Talk`."""
        with self._cast.question(self, messages, stop_strings, max_tokens):
            return await self._say(messages, stop_strings, max_tokens)

    @property
    def begun(self) -> bool:
        """Whether it has a reply."""
        return bool(self._turns)

    async def _say(
        self, messages: Sequence[Message | Spliced], stop_strings: Sequence[str], max_tokens: int | None
    ) -> Said:
        cast, role = self._cast, self.role
        limits, began = cast.limits(role), time.monotonic()
        self._messages += [Message(message.role, message.content) for message in messages]
        budget = limits.reply_tokens if max_tokens is None else min(max_tokens, limits.reply_tokens)
        self._turns.append(("\n".join(message.content for message in messages), ""))
        try:
            async with asyncio.timeout(limits.timeout_s):
                shown = tuple(self._messages), stop_strings, budget
                reply = await contract.awaited(self._speaker, "reply", *shown, wanted=Reply)
            text, finish, prompt, said = self._read(reply, stop_strings)
        except Exception as failure:
            raise cast.failed(role, failure) from failure
        self._turns[-1] = (self._turns[-1][0], text)
        self._messages.append(Message("assistant", text))
        seconds = time.monotonic() - began
        return Said(text, finish, None, prompt, said, seconds, cast.price(role, prompt, said, seconds))

    def _read(self, reply: Reply, stop_strings: Sequence[str]) -> tuple[str, str, int, int]:
        """The text and the finish of a reply, and its numbers of tokens: the speaker's, or else counted here."""
        if not isinstance(reply.text, str):
            raise TypeError(f"its reply is no text but {type(reply.text).__name__}")
        text, finish = _cut(whole(reply.text), reply.finish, stop_strings)
        prompt, said = reply.prompt_tokens, reply.reply_tokens
        if prompt is None:
            prompt = sum(len(self._cast.tokens(message.content).ids) for message in self._messages)
        return text, finish, prompt, len(self._cast.tokens(text).ids) if said is None else said

    def heard(self) -> Heard:
        """The conversation, for people."""
        return Heard(self.role, tuple(self._turns), None, self._after)


def _cut(text: str, finish: str, stop_strings: Sequence[str]) -> tuple[str, str]:
    """A text up to the end of the first stop string in it."""
    ends = [at + len(stop) for stop in stop_strings if (at := text.find(stop)) >= 0]
    return (text[: min(ends)], "stop") if ends else (text, finish)
