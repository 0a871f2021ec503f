"""What everybody in the gateway speaks: a conversation with tools as dataclasses, whatever dialect it came in.

A form (`forms/`) turns a dialect's body into an `Ask` and an `Answer` into the dialect's bytes; a session answers.
Nothing in here knows HTTP, tokens' meaning or an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.config import SamplingConfig
from jaxagent.tools.calls import Call, Delta, Reasoning, Text, Tool

__all__ = ["Answer", "Ask", "BadRequest", "Call", "ChatMessage", "Delta", "Ident", "Reasoning", "Text", "Tool"]

APPENDED = "appended"  # the role of what a program added to the text of a sampled message, right behind it


class BadRequest(ValueError):
    """The client's mistake: answered with the message and the status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclasses.dataclass(frozen=True)
class ChatMessage:
    """One message, in canonical form: what a client adds for its own book-keeping is gone."""

    role: str  # "system", "user", "assistant" or "tool"; within a session also APPENDED
    text: str
    calls: tuple[Call, ...] = ()  # of the assistant
    call_id: str = ""  # of a tool's result: which call it answers
    name: str = ""  # of a tool's result, where the dialect says it: the tool's name
    reasoning: str = ""  # of the assistant; does not count when messages are compared


@dataclasses.dataclass(frozen=True)
class Ask:
    """A checked request for the assistant's next message, or for what follows a prompt without roles."""

    messages: tuple[ChatMessage, ...]  # () where there is a prompt
    tools: tuple[Tool, ...] = ()
    model: str | None = None
    max_tokens: int | None = None  # None: as many as the server gives
    sampling: SamplingConfig = dataclasses.field(default_factory=lambda: SamplingConfig(1.0, 1.0, 0, 0.0))
    seed: int = 0
    stops: tuple[str, ...] = ()  # left out of the text
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    user: str = ""
    n: int = 1  # samples
    items: tuple[Mapping[str, Any], ...] = dataclasses.field(default=(), compare=False, repr=False)  # to be named later
    ignored: tuple[str, ...] = ()  # fields that were sent and have no effect here
    prompt: str | tuple[int, ...] | None = None  # of a completion: text or token ids, and no chat template


@dataclasses.dataclass(frozen=True)
class Answer:
    """The assistant's message, and how it came about."""

    text: str
    reasoning: str
    calls: tuple[Call, ...]  # each with an id of this server's
    finish: str  # "stop", "length", "tool_calls" or "stop_sequence"
    stop_string: str | None  # of the request, when finish == "stop_sequence"
    prompt_ids: Sequence[int]  # the whole context; no list: make one to write it
    tokens: np.ndarray  # i32[T] as sampled
    logprobs: np.ndarray  # f32[T]
    token_texts: tuple[str, ...]  # of each token, for the dialects' log-prob objects
    cached_tokens: int | None
    text_offsets: tuple[int, ...] = ()  # where each token begins in the text of all of them, in characters


@dataclasses.dataclass(frozen=True)
class Ident:
    """The names that an answer carries."""

    id: str  # a random suffix; the dialect adds its prefix
    model: str
    created: int  # seconds since the epoch
