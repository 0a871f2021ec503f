"""OpenAI's Completions, `POST /v1/completions`, with token ids beside the text: requests, answers and errors.

A session takes one prompt (`parse`, `body`, `writer`), and in a stream the tokens and their log-probs come with the
finish reason, as in Chat Completions. An engine's own server (`gateway/service.py`) takes many, and streams pieces of
all choices with their tokens. A field that is null counts as absent. What this server does not do is refused here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxagent.gateway.chat import Answer, Ask, BadRequest, Ident
from jaxagent.gateway.forms import events, fields
from jaxagent.gateway.forms.fields import MAX_CHOICES, Fields

# OpenAI's fields for what this server does not do, and the values that do not ask for it.
OFF: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
}
MAX_TOKENS = 16  # OpenAI's default
MOST_ID = 2**31 - 1  # who knows the vocabulary checks them again, and cuts top_k
FINISH = {"stop": "stop", "stop_sequence": "stop", "length": "length"}


# -------------------------------------------------------------------- the request


def parse_many(raw: bytes, vocab_size: int) -> tuple[list[str | list[int]], Ask]:
    """Reads the body of a request: its prompts, whose token ids are not checked yet, and all else.

    Raises:
      BadRequest: a mistake of the client's, described in one line.
    """
    body = Fields(fields.parse_json(raw), "", None)
    prompts = _prompts(body.need("prompt", str, list))
    common = fields.take_common(body, vocab_size) | fields.take_openai(body)
    most = fields.take_positive(body, "max_tokens") or MAX_TOKENS
    if common["n"] * len(prompts) > MAX_CHOICES:
        raise BadRequest(f"'n' must be from 1 to {MAX_CHOICES} over all prompts", "n")
    if body.take("logprobs", int, default=0) not in (0, 1):
        raise BadRequest("'logprobs' must be 0 or 1: of the sampled tokens, which every answer has", "logprobs")
    for name, harmless in (OFF | {"best_of": (common["n"],)}).items():
        body.refuse(name, "this is not supported by this server; leave it out", *harmless)
    body.refuse_rest()
    return prompts, Ask((), max_tokens=most, **common)


def _prompts(prompt: str | list) -> list[str | list[int]]:
    """One prompt, or a list of them; a list of numbers is one."""
    many = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    if len(many) > MAX_CHOICES:
        raise BadRequest(f"there are {len(many)} prompts, a request may have {MAX_CHOICES}", "prompt")
    for count in many:
        if not isinstance(count, type(many[0])):
            raise BadRequest("the prompts must all be text, or all lists of token ids", "prompt")
    return many


def parse(raw: bytes) -> Ask:
    """Reads the body of a request in a session. Raises BadRequest, also for several prompts."""
    prompts, ask = parse_many(raw, MOST_ID)
    if len(prompts) != 1:
        raise BadRequest("'prompt': a session takes one prompt in a request; send one request for each", "prompt")
    prompt = prompts[0]
    if not isinstance(prompt, str) and not all(type(i) is int and 0 <= i <= MOST_ID for i in prompt):
        raise BadRequest("'prompt' must be text or token ids", "prompt")
    return dataclasses.replace(ask, prompt=prompt if isinstance(prompt, str) else tuple(prompt))


# -------------------------------------------------------------------- the answer


def error(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def head(ident: Ident) -> dict[str, Any]:
    """The beginning of an answer, or of an event of one."""
    return {"id": f"cmpl-{ident.id}", "object": "text_completion", "created": ident.created, "model": ident.model}


def model(name: str, created: int) -> dict[str, Any]:
    """A model as OpenAI's clients read it. created: seconds since the epoch."""
    return {"id": name, "object": "model", "created": created, "owned_by": "jaxagent"}


def models(name: str, created: int) -> dict[str, Any]:
    """The list of the server's only model."""
    return {"object": "list", "data": [model(name, created)]}


def piece(
    index: int, text: str, ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[float], offsets: Sequence[int]
) -> dict[str, Any]:
    """Part of a choice: tokens, their log-probs (of the distribution sampled), and the text they complete."""
    lists = {"tokens": list(texts), "token_logprobs": list(logprobs), "top_logprobs": None}
    lists["text_offset"] = list(offsets)
    return {"index": index, "text": text, "token_ids": list(ids), "logprobs": lists, "finish_reason": None}


def merged(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole choice. The last piece has the finish reason and the statistics."""
    names = ("tokens", "token_logprobs", "text_offset")
    lists = {name: [x for p in pieces for x in p["logprobs"][name]] for name in names}
    return pieces[-1] | {
        "text": "".join(p["text"] for p in pieces),
        "token_ids": [x for p in pieces for x in p["token_ids"]],
        "logprobs": lists | {"top_logprobs": None},
    }


def body(ask: Ask, *answers: Answer, ident: Ident) -> dict[str, Any]:
    """The whole answer; each of several is a choice."""
    choices = [_last(answer, answer.text, i) for i, answer in enumerate(answers)]
    more = {"usage": usage_of(answers), "prompt_token_ids": list(answers[0].prompt_ids)}
    return head(ident) | {"choices": choices} | more


class _CompletionEvents(events.EventWriter):
    """`text_completion` events; every one has text."""

    def begin(self, prompt_tokens: int, cached_tokens: int | None) -> bytes:
        return b""

    def _text(self, text: str) -> bytes:
        return self._event([piece(0, text, [], [], [], [])])

    def end(self, *answers: Answer) -> bytes:
        """The text that has not been sent, all tokens, the finish reason, usage where asked for, and [DONE]."""
        data = b""
        for i, answer in enumerate(answers):
            data += self._event([_last(answer, answer.text[0 if i else self._texts :], i)])
        if self._ask.stream_usage:
            data += self._event([], usage_of(answers))
        return data + b"data: [DONE]\n\n"

    def ping(self) -> bytes:
        return self._text("")

    def failed(self, message: str, status: int, code: str | None) -> bytes:
        return events.event(error(message, status, None, code))

    def _event(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        more = {"usage": usage} if self._ask.stream_usage else {}
        return events.event(head(self._ident) | {"choices": list(choices)} | more)


writer = _CompletionEvents


def _last(answer: Answer, text: str, number: int) -> dict[str, Any]:
    """The choice, with this much of its text."""
    ids, logprobs = answer.tokens.tolist(), answer.logprobs.tolist()
    end = {"finish_reason": FINISH[answer.finish], "stop_string": answer.stop_string}
    choice = piece(number, text, ids, answer.token_texts, logprobs, answer.text_offsets)
    return choice | end | {"cached_tokens": answer.cached_tokens}


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of answers to one prompt; what was cached is what all of them found, None if one of them cannot tell."""
    cached = [answer.cached_tokens for answer in answers]
    least = None if None in cached else min(count for count in cached if count is not None)
    return usage(len(answers[0].prompt_ids), sum(len(answer.tokens) for answer in answers), least)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """Tokens as OpenAI counts them: a prompt once, however many choices continue it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
