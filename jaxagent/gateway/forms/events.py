"""What the dialects' answers share: server-sent events, ids and arguments of calls, log-prob objects."""

from __future__ import annotations

import json
from typing import Any

from jaxagent.gateway.chat import Answer, Call, Delta, Reasoning, Text


def event(data: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, allow_nan=False)}\n\n".encode()


def call_id(call: Call, prefix: str, answer_id: str, number: int) -> str:
    """The id of an answer's call in a dialect: its own, or one made of the answer's id and the call's number."""
    return prefix + (call.id.removeprefix("call_") or f"{answer_id}{number}")


def arguments_text(call: Call) -> str:
    """Arguments as JSON text."""
    return call.arguments if isinstance(call.arguments, str) else json_text(call.arguments)


def json_text(data: Any) -> str:
    """JSON as a model writes it."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def log_probs(answer: Answer, always_bytes: bool = False) -> list[dict[str, Any]]:
    """OpenAI's object for each sampled token.

    `bytes` is null where the token's text is not whole characters; the dialect that knows no null has those of U+FFFD.
    """
    return [
        {
            "token": text,
            "logprob": float(value),
            "bytes": None if "\ufffd" in text and not always_bytes else list(text.encode()),
            "top_logprobs": [],
        }
        for text, value in zip(answer.token_texts, answer.logprobs, strict=True)
    ]


class Sent:
    """How much of an answer went out as deltas, so that the end can bring the rest."""

    def __init__(self) -> None:
        self.texts, self.reasonings, self.calls = 0, 0, 0  # characters, characters, number

    def add(self, delta: Delta) -> None:
        """Counts a delta."""
        if isinstance(delta, Text):
            self.texts += len(delta.text)
        elif isinstance(delta, Reasoning):
            self.reasonings += len(delta.text)
        else:
            self.calls += 1

    def rest(self, answer: Answer) -> list[Delta]:
        """What has not been sent; all of the answer where it had been stored before it was asked for."""
        rest: list[Delta] = [Reasoning(text)] if (text := answer.reasoning[self.reasonings :]) else []
        rest += [Text(text)] if (text := answer.text[self.texts :]) else []
        return [*rest, *answer.calls[self.calls :]]
