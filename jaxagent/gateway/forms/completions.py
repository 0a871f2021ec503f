"""What a completion looks like on the wire: OpenAI's request, answer and error, with token ids beside the text.

bytes of a body -> `Ask`, or `BadRequest`; pieces of choices -> the answer's JSON. No engine and no web server in here.
A field that is null counts as absent. A request for a feature of OpenAI's that this server lacks is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxagent.config import SamplingConfig
from jaxagent.gateway.chat import Answer, BadRequest
from jaxagent.gateway.forms import checks
from jaxagent.gateway.forms.checks import MAX_CHOICES, NUMBER

FIELDS: dict[str, tuple[type, ...]] = {
    "prompt": (str, list),
    "model": (str,),
    "max_tokens": (int,),
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": (int,),
    "min_p": NUMBER,
    "seed": (int,),
    "n": (int,),
    "stop": (str, list),
    "stream": (bool,),
    "stream_options": (dict,),
    "logprobs": (int,),
    "user": (str,),
}
# OpenAI's fields for what this server does not do, and the values that do not ask for it.
OFF: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
}


@dataclasses.dataclass(frozen=True)
class Ask:
    """A checked request."""

    prompts: list[str | list[int]]  # token ids are not checked yet
    model: str | None
    max_tokens: int
    sampling: SamplingConfig
    seed: int
    n: int  # choices per prompt
    stops: tuple[str, ...]
    stream: bool
    stream_usage: bool
    user: str


def parse(raw: bytes, vocab_size: int) -> Ask:
    """Reads the body of a request for completions.

    Raises:
      BadRequest: a mistake of the client's, described in one line.
    """
    body = checks.parse_json(raw)
    if not isinstance(body, dict) or body.get("prompt") is None:
        raise BadRequest("the body must be an object with a 'prompt'", "prompt")
    body = {name: checks.whole(value, *FIELDS.get(name, ())) for name, value in body.items() if value is not None}
    n = body.get("n", 1)
    for name, value in body.items():
        if name in OFF or name == "best_of":
            if value not in OFF.get(name, (n,)):
                raise BadRequest(f"'{name}' is not supported by this server; leave it out", name)
        elif name not in FIELDS:
            raise BadRequest(f"unknown field '{name}'; known: {', '.join(FIELDS)}", name)
        elif type(value) not in FIELDS[name]:
            raise BadRequest(f"'{name}' must be {' or '.join(t.__name__ for t in FIELDS[name])}", name)
    prompts, stops = _prompts(body["prompt"]), checks.stops(body.get("stop", []))
    for name in ("user", "model"):
        checks.text_bytes(body.get(name, ""), name)
    if body.get("max_tokens", 1) < 1 or not 1 <= n <= MAX_CHOICES // len(prompts):
        raise BadRequest(f"'max_tokens' must be positive and 'n' from 1 to {MAX_CHOICES}, over all prompts")
    if not -(2**63) <= body.get("seed", 0) < 2**64:
        raise BadRequest("'seed' must fit 64 bits", "seed")
    if body.get("logprobs", 0) not in (0, 1):
        raise BadRequest("'logprobs' must be 0 or 1: of the sampled tokens, which every answer has", "logprobs")
    options = body.get("stream_options", {})
    if options.keys() - {"include_usage"} or type(options.get("include_usage") or False) is not bool:
        raise BadRequest("'stream_options' may hold 'include_usage', true or false", "stream_options")
    return Ask(
        prompts=prompts,
        model=body.get("model"),
        max_tokens=body.get("max_tokens", 16),
        sampling=checks.sampling(
            body.get("temperature", 1.0),
            body.get("top_p", 1.0),
            body.get("top_k", 0),
            body.get("min_p", 0.0),
            vocab_size,
        ),
        seed=body.get("seed", 0),
        n=n,
        stops=stops,
        stream=body.get("stream", False),
        stream_usage=options.get("include_usage") or False,
        user=body.get("user", ""),
    )


def _prompts(prompt: str | list) -> list[str | list[int]]:
    """One prompt, or a list of them; a list of numbers is one."""
    many = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    if len(many) > MAX_CHOICES:
        raise BadRequest(f"there are {len(many)} prompts, a request may have {MAX_CHOICES}", "prompt")
    for one in many:
        if not isinstance(one, type(many[0])):
            raise BadRequest("the prompts must all be text, or all lists of token ids", "prompt")
        if isinstance(one, str):
            checks.text_bytes(one, "prompt")
    return many


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def piece(
    index: int, text: str, ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[float], offsets: Sequence[int]
) -> dict[str, Any]:
    """Part of a choice: tokens, their log-probs (of the distribution sampled), and the text they complete."""
    told = {"tokens": list(texts), "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": list(offsets)}
    return {"index": index, "text": text, "token_ids": list(ids), "logprobs": told, "finish_reason": None}


def merged(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole choice. The last piece has the finish reason and the statistics."""
    told = [p["logprobs"] for p in pieces]
    lists = {name: [x for one in told for x in one[name]] for name in ("tokens", "token_logprobs", "text_offset")}
    return pieces[-1] | {
        "text": "".join(p["text"] for p in pieces),
        "token_ids": [x for p in pieces for x in p["token_ids"]],
        "logprobs": lists | {"top_logprobs": None},
    }


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of answers to one prompt; what was cached is what all of them found, None if one of them cannot tell."""
    cached = [answer.cached_tokens for answer in answers]
    least = None if None in cached else min(one for one in cached if one is not None)
    return usage(len(answers[0].prompt_ids), sum(len(answer.tokens) for answer in answers), least)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """Tokens as OpenAI counts them: a prompt once, however many choices continue it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
