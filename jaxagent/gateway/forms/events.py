"""What the dialects' answers share: server-sent events, ids and arguments of calls, log-prob objects."""

from __future__ import annotations

import json
from typing import Any

from jaxagent.gateway.chat import Answer, Ask, Call, Delta, Ident, Reasoning, Text


class EventWriter:
    """An answer as server-sent events: each method returns the bytes to send, b"" for none.

    A dialect says besides how it writes a `_text`, a `_reasoning` and a `_call`.
    """

    def __init__(self, ask: Ask, ident: Ident) -> None:
        self._ask, self._ident = ask, ident
        self._texts = self._reasonings = self._calls = 0  # sent so far: characters, characters, number

    def begin(self, prompt_tokens: int, cached_tokens: int | None) -> bytes:
        """The first events, sent with the first delta."""
        raise NotImplementedError

    def delta(self, delta: Delta) -> bytes:
        """Part of the answer; a call comes whole."""
        if isinstance(delta, Text):
            self._texts += len(delta.text)
            return self._text(delta.text)
        if isinstance(delta, Reasoning):
            self._reasonings += len(delta.text)
            return self._reasoning(delta.text)
        self._calls += 1
        return self._call(delta, self._calls - 1)

    def end(self, *answers: Answer) -> bytes:
        """The last events; of a request for several samples, all of them."""
        raise NotImplementedError

    def ping(self) -> bytes:
        """A real event that says nothing, for a client that counts the silence; only after `begin`."""
        raise NotImplementedError

    def failed(self, message: str, status: int, code: str | None) -> bytes:
        """The event that says why the stream cannot go on."""
        raise NotImplementedError

    def _rest(self, answer: Answer) -> bytes:
        """What has not been sent; all of the answer where it had been stored before it was asked for."""
        deltas: list[Delta] = [Reasoning(text)] if (text := answer.reasoning[self._reasonings :]) else []
        deltas += [Text(text)] if (text := answer.text[self._texts :]) else []
        return b"".join(map(self.delta, [*deltas, *answer.calls[self._calls :]]))


class BlockWriter(EventWriter):
    """An answer as blocks: `_begin_block`, `_more` of it, `_close` the open one, if there is one.

    Blanks between blocks wait for the text that follows them, so that no block is blank.
    """

    def __init__(self, ask: Ask, ident: Ident) -> None:
        super().__init__(ask, ident)
        self._open: type | None = None  # what the open block is: Text or Reasoning
        self._blank = ""  # waits for the next text

    def _text(self, text: str) -> bytes:
        self._blank, text = "", self._blank + text
        if self._open is not Text and not text.strip():
            self._blank = text
            return b""
        return self._part(Text, text)

    def _reasoning(self, text: str) -> bytes:
        return self._part(Reasoning, text)

    def _part(self, kind: type, text: str) -> bytes:
        if not text:
            return b""
        return (b"" if self._open is kind else self._close() + self._begin_block(kind)) + self._more(text)


def event(data: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, allow_nan=False)}\n\n".encode()


def call_id(call: Call, prefix: str, ident: Ident, number: int) -> str:
    """The id of an answer's call in a dialect: its own, or one made of the answer's id and the call's number."""
    return prefix + (call.id.removeprefix("call_") or f"{ident.id}{number}")


def arguments_text(call: Call) -> str:
    """Arguments as JSON text."""
    return call.arguments if isinstance(call.arguments, str) else json_text(call.arguments)


def json_text(data: Any) -> str:
    """JSON as a model writes it."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def token_ids(ask: Ask, answer: Answer) -> dict[str, Any]:
    """vLLM's fields with the tokens of an answer, for who wants them."""
    if not ask.return_token_ids:
        return {}
    return {"prompt_token_ids": list(answer.prompt_ids), "token_ids": answer.tokens.tolist()}


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
