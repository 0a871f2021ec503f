"""A conversation with a role that speaks text (scripted counterparts, endpoints), and what a question must not be.

Of a misuse nothing is sent and nothing becomes part of the conversation. It is remembered as the episode's failure, so
that an environment that swallows the exception cannot make an honest reward of what follows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxagent import contract
from jaxagent.envs.base import Message, check_texts
from jaxagent.envs.cast import RoleReply, Spliced
from jaxagent.roles.base import Reply, Speaker
from jaxagent.types import UntrainedConversation

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
    ) -> RoleReply:
        """Asks one question and returns the reply; `envs.cast.Talk.say` says what may be asked."""
        with self._cast.question(self, messages, stop_strings, max_tokens):
            return await self._say(messages, stop_strings, max_tokens)

    @property
    def begun(self) -> bool:
        """Whether it has a reply."""
        return bool(self._turns)

    async def _say(
        self, messages: Sequence[Message | Spliced], stop_strings: Sequence[str], max_tokens: int | None
    ) -> RoleReply:
        cast, role = self._cast, self.role
        limits, began = cast.limits(role), time.monotonic()
        self._messages += [Message(message.role, message.content) for message in messages]
        budget = limits.reply_tokens if max_tokens is None else min(max_tokens, limits.reply_tokens)
        self._turns.append(("\n".join(message.content for message in messages), ""))
        try:
            async with asyncio.timeout(limits.timeout_s):
                arguments = tuple(self._messages), stop_strings, budget
                reply = await contract.awaited(self._speaker, "reply", *arguments, expected=Reply)
            text, finish, prompt, reply_tokens = self._read(reply, stop_strings)
        except Exception as failure:
            raise cast.failed(role, failure) from failure
        self._turns[-1] = (self._turns[-1][0], text)
        self._messages.append(Message("assistant", text))
        seconds = time.monotonic() - began
        cost = cast.price(role, prompt, reply_tokens, seconds)
        return RoleReply(text, finish, None, prompt, reply_tokens, seconds, cost)

    def _read(self, reply: Reply, stop_strings: Sequence[str]) -> tuple[str, str, int, int]:
        """The text and the finish of a reply, and its numbers of tokens: the speaker's, or else counted here."""
        if not isinstance(reply.text, str):
            raise TypeError(f"its reply is no text but {type(reply.text).__name__}")
        text, finish = _cut(without_half_pairs(reply.text), reply.finish, stop_strings)
        prompt, reply_tokens = reply.prompt_tokens, reply.reply_tokens
        if prompt is None:
            prompt = sum(len(self._cast.tokens(message.content).ids) for message in self._messages)
        return text, finish, prompt, len(self._cast.tokens(text).ids) if reply_tokens is None else reply_tokens

    def as_untrained(self) -> UntrainedConversation:
        """The conversation, for people."""
        return UntrainedConversation(self.role, tuple(self._turns), None, self._after)


def _cut(text: str, finish: str, stop_strings: Sequence[str]) -> tuple[str, str]:
    """A text up to the end of the first stop string in it."""
    ends = [at + len(stop) for stop in stop_strings if (at := text.find(stop)) >= 0]
    return (text[: min(ends)], "stop") if ends else (text, finish)


def misuse(
    messages: Sequence[Message | Spliced],
    begun: bool,
    vocab_size: int,
    stop_strings: Sequence[str],
    max_tokens: int | None,
) -> str:
    """What is wrong with a question, asked as `envs.cast.Talk.say` says; "" = nothing.

    `begun`: whether the conversation has a reply. Spliced tokens are ids of the policy's tokenizer, of `vocab_size`.
    """
    if not messages or (begun and len(messages) != 1):
        return "a conversation begins with one message or more, and goes on with one"
    for message in messages:
        if wrong := _of_message(message, begun, vocab_size):
            return wrong
    try:
        check_texts("stop_strings", stop_strings)
    except ValueError as error:
        return str(error)
    if max_tokens is not None and max_tokens < 1:
        return f"max_tokens={max_tokens}, and a reply has at least one token"
    return ""


def _of_message(message: Message | Spliced, begun: bool, vocab_size: int) -> str:
    if isinstance(message, Spliced):
        if begun:
            return "only a conversation's prompt can be spliced: what follows a reply is text"
        ids = (i for piece in message.pieces if not isinstance(piece, str) for i in piece.ids)
        if any(not 0 <= (wrong := i) < vocab_size for i in ids):
            return f"spliced tokens have the id {wrong}, and the tokenizer has {vocab_size} ids"
    if not isinstance(message.content, str):
        return f"a message's content must be text, got {type(message.content).__name__}"
    return (
        ""
        if without_half_pairs(message.content) == message.content
        else "a message has half of a surrogate pair: it is no text"
    )


def without_half_pairs(text: str) -> str:
    """The text with U+FFFD for every half of a surrogate pair, which no tokenizer and no log can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
