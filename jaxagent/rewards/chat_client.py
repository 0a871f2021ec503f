"""A chat model behind HTTP: OpenAI-style `POST {url}/chat/completions`, with retries. Of judges, roles, pipelines.

    async with ChatClient(Endpoint(url="http://127.0.0.1:8000/v1", model="judge", api_key="", ...)) as chat:
        text = await chat.complete([{"role": "user", "content": "Hello"}], temperature=1.0, max_tokens=64, seed=0)

io/http.py says what is tried again; whatever else goes wrong is a failed call.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.io.http import CONNECTIONS, HttpClient, HttpError, HttpStatus
from jaxagent.rewards.judge import LimitField

MAX_REPLY_BYTES = 1 << 20
REFUSALS = (400, 422)  # of a request that has a field which the endpoint does not take
REFUSABLE = ("send_seed", "send_temperature", "limit_field")  # settings of what an endpoint may refuse
REMEDIES = {  # what is set where an endpoint refuses a field, by the field's name
    "seed": "send_seed=False",
    "temperature": "send_temperature=False",
    "max_tokens": "limit_field=max_completion_tokens",
    "max_completion_tokens": "limit_field=max_tokens",
}


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where the model is."""

    url: str  # up to and without /chat/completions, e.g. "http://127.0.0.1:8000/v1"
    model: str
    api_key: str  # sent as a bearer token; "" = none
    timeout_s: float  # for one attempt
    retries: int  # further attempts of one call
    send_seed: bool = True  # some endpoints refuse what they do not know
    send_temperature: bool = True  # some models have one temperature, and refuse to be told another
    limit_field: LimitField = "max_tokens"  # by which name the endpoint takes the limit of a reply
    call_s: float | None = None  # busy servers are waited for within so much time of a call; None = timeout_s

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"chat model url='{self.url}' must start with http:// or https://")

    @classmethod
    def of(cls, settings: Any, api_key: str, call_s: float | None = None) -> Endpoint:
        """The endpoint of settings that name these fields as it does: a judge's, or a role's."""
        named = {field: getattr(settings, field) for field in ("url", "model", "timeout_s", "retries", *REFUSABLE)}
        return cls(api_key=api_key, call_s=call_s, **named)


class CallError(Exception):
    """A call has failed: the server, or what it sent. The message says how, in one line."""

    def __init__(self, message: str, refused: str = ""):
        super().__init__(message)
        self.refused = refused  # the field of `REMEDIES` that was sent and that the refusal names; "" = none


@dataclasses.dataclass(frozen=True)
class Completion:
    """One reply, also one that was cut off, with what the server counted; None where it counts nothing."""

    text: str
    finish: str  # "length": cut off by max_tokens; else what the server says, mostly "stop"
    prompt_tokens: int | None
    reply_tokens: int | None


class ChatClient:
    """Must be used and closed on one asyncio loop. Calls beyond `connections` at once wait, within their time."""

    def __init__(self, endpoint: Endpoint, connections: int = CONNECTIONS):
        self._endpoint, self._url = endpoint, f"{endpoint.url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else None
        busy_s = endpoint.timeout_s if endpoint.call_s is None else endpoint.call_s
        self._client = HttpClient(endpoint.timeout_s, MAX_REPLY_BYTES, endpoint.retries, headers, connections, busy_s)

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def complete(
        self, messages: Sequence[Mapping[str, str]], *, temperature: float, max_tokens: int, seed: int
    ) -> str:
        """The text of the one reply, which must be whole.

        Raises:
          CallError: no reply after all attempts, or one that is no chat completion, without text, or cut off.
        """
        reply = await self.ask(messages, temperature=temperature, max_tokens=max_tokens, seed=seed)
        if reply.finish == "length":
            raise CallError("the reply was cut off by max_tokens")
        return reply.text

    async def ask(
        self, messages: Sequence[Mapping[str, str]], *, temperature: float, max_tokens: int, seed: int
    ) -> Completion:
        """The one reply.

        Raises CallError: no reply after all attempts, or one that is no chat completion, or without text. Its cause is
        the `HttpError`, if there was one.
        """
        endpoint = self._endpoint
        body: dict[str, Any] = {"model": endpoint.model, "messages": list(messages)}
        if endpoint.send_temperature:
            body["temperature"] = temperature
        body[endpoint.limit_field] = max_tokens
        if endpoint.send_seed:
            body["seed"] = seed
        try:
            reply = await self._client.request("POST", self._url, json=body)
        except HttpError as failure:
            raise CallError(str(failure), _refused(failure, body)) from failure
        return _completion(reply)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()


def _refused(failure: HttpError, body: Mapping[str, Any]) -> str:
    """The first field of a request that can be left out or renamed and that a refusal names; "" = none.

    A name inside a longer one is none: a model may be called seed-oss.
    """
    if not isinstance(failure, HttpStatus) or failure.status not in REFUSALS:
        return ""
    answer = failure.body.decode("utf-8", "replace")
    named = (field for field in REMEDIES if field in body and re.search(rf"(?<![\w-]){field}(?![\w-])", answer))
    return next(named, "")


def _completion(body: bytes) -> Completion:
    """A chat completion's one choice."""
    try:
        full_reply = json.loads(body)
        (choice,) = full_reply["choices"]
        content, finish, usage = choice["message"]["content"], choice.get("finish_reason"), full_reply.get("usage")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
        raise CallError(f"not a chat completion ({type(failure).__name__})") from failure
    if not isinstance(content, str):
        raise CallError("the completion has no text")
    return Completion(
        content, str(finish), _token_count(usage, "prompt_tokens"), _token_count(usage, "completion_tokens")
    )


def _token_count(usage: Any, name: str) -> int | None:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None
