"""OpenAI's Completions in a session, `POST /v1/completions`: one prompt, one choice, with token ids beside the text.

Fields and answers are those of `completions`, which an engine's own server speaks with many prompts and choices. In a
stream the tokens and their log-probs come with the finish reason, as in Chat Completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxagent.gateway.chat import Answer, Ask, BadRequest, Delta, Ident, Text
from jaxagent.gateway.forms import completions, events

MOST_ID = 2**31 - 1  # who knows the vocabulary checks them again, and cuts top_k

FINISH = {"stop": "stop", "stop_sequence": "stop", "length": "length"}


def parse(raw: bytes) -> Ask:
    """Reads the body of a request.

    Raises:
      BadRequest: a mistake of the client's, described in one line.
    """
    asked = completions.parse(raw, MOST_ID)
    if len(asked.prompts) != 1:
        raise BadRequest("'prompt': a session takes one prompt in a request; send one request for each", "prompt")
    prompt = asked.prompts[0]
    if not isinstance(prompt, str) and not all(type(i) is int and 0 <= i <= MOST_ID for i in prompt):
        raise BadRequest("'prompt' must be text or token ids", "prompt")
    return Ask(
        messages=(),
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        model=asked.model,
        max_tokens=asked.max_tokens,
        sampling=asked.sampling,
        seed=asked.seed,
        stops=asked.stops,
        stream=asked.stream,
        stream_usage=asked.stream_usage,
        n=asked.n,
        user=asked.user,
    )


def body(ask: Ask, *answers: Answer, ident: Ident) -> dict[str, Any]:
    """The whole answer; each of several is a choice."""
    choices = [_last(answer, answer.text, i) for i, answer in enumerate(answers)]
    told = _head(ident) | {"choices": choices, "usage": completions.usage_of(answers)}
    return told | {"prompt_token_ids": list(answers[0].prompt_ids)}


def error(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return completions.error_body(message, status, param, code)


class Writer:
    """The answer as `text_completion` events."""

    def __init__(self, ask: Ask, ident: Ident) -> None:
        self._ask, self._ident, self._sent = ask, ident, events.Sent()

    def begin(self, prompt_tokens: int, cached_tokens: int | None) -> bytes:
        """Nothing: every event has text."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        """An event with the text."""
        self._sent.add(delta)
        return self._event([_text(delta.text)]) if isinstance(delta, Text) else b""

    def end(self, *answers: Answer) -> bytes:
        """The text that has not been sent, all tokens, the finish reason, usage where asked for, and [DONE]."""
        data = b""
        for i, answer in enumerate(answers):
            data += self._event([_last(answer, answer.text[0 if i else self._sent.texts :], i)])
        if self._ask.stream_usage:
            data += self._event([], completions.usage_of(answers))
        return data + b"data: [DONE]\n\n"

    def ping(self) -> bytes:
        """An event with an empty text."""
        return self._event([_text("")])

    def failed(self, message: str, status: int, code: str | None) -> bytes:
        """The error as an event."""
        return events.event(completions.error_body(message, status, None, code))

    def _event(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        told = {"usage": usage} if self._ask.stream_usage else {}
        return events.event(_head(self._ident) | {"choices": list(choices)} | told)


def writer(ask: Ask, ident: Ident) -> Writer:
    """The answer piece by piece."""
    return Writer(ask, ident)


def _head(ident: Ident) -> dict[str, Any]:
    return {"id": f"cmpl-{ident.id}", "object": "text_completion", "created": ident.created, "model": ident.model}


def _text(text: str) -> dict[str, Any]:
    return completions.piece(0, text, [], [], [], [])


def _last(answer: Answer, text: str, number: int) -> dict[str, Any]:
    """The choice, with this much of its text."""
    ids, logprobs = answer.tokens.tolist(), answer.logprobs.tolist()
    told = completions.piece(number, text, ids, answer.token_texts, logprobs, answer.text_offsets)
    told |= {"finish_reason": FINISH[answer.finish], "stop_string": answer.stop_string}
    return told | {"cached_tokens": answer.cached_tokens}
