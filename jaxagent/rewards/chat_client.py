"""A chat model behind HTTP: OpenAI-style `POST {url}/chat/completions`, with retries. For judges and data pipelines.

    async with ChatClient(Endpoint(url="http://127.0.0.1:8000/v1", model="judge", api_key="", ...)) as chat:
        text = await chat.complete([{"role": "user", "content": "Hello"}], temperature=1.0, max_tokens=64, seed=0)

io/http.py says what is tried again; whatever else goes wrong is a failed call.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from jaxagent.config import ConfigError
from jaxagent.io.http import HttpClient, HttpError

MAX_REPLY_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where the model is."""

    url: str  # up to and without /chat/completions, e.g. "http://127.0.0.1:8000/v1"
    model: str
    api_key: str  # sent as a bearer token; "" = none
    timeout_s: float  # for one attempt
    retries: int  # further attempts of one call

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"chat model url='{self.url}' must start with http:// or https://")


class CallError(Exception):
    """A call has failed: the server, or what it sent. The message says how, in one line."""


class ChatClient:
    """Must be used and closed on one asyncio loop."""

    def __init__(self, endpoint: Endpoint):
        self._model, self._url = endpoint.model, f"{endpoint.url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else None
        self._client = HttpClient(endpoint.timeout_s, MAX_REPLY_BYTES, endpoint.retries, headers)

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def complete(
        self, messages: Sequence[Mapping[str, str]], *, temperature: float, max_tokens: int, seed: int
    ) -> str:
        """The text of the one reply.

        Raises:
          CallError: no reply after all attempts, or one that is no chat completion, without text, or cut off.
        """
        body = {
            "model": self._model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        try:
            reply = await self._client.request("POST", self._url, json=body)
        except HttpError as failure:
            raise CallError(str(failure)) from failure
        return _content(reply)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()


def _content(body: bytes) -> str:
    """The text of a chat completion's one choice; a reply cut off by its token limit is not a reply."""
    try:
        (choice,) = json.loads(body)["choices"]
        content, finish = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
        raise CallError(f"not a chat completion ({type(failure).__name__})") from failure
    if not isinstance(content, str):
        raise CallError("the completion has no text")
    if finish == "length":
        raise CallError("the reply was cut off by max_tokens")
    return content
