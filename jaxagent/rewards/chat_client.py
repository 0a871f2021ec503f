"""A chat model behind HTTP: OpenAI-style `POST {url}/chat/completions`, with retries. For judges and data pipelines.

    async with ChatClient(Endpoint(url="http://127.0.0.1:8000/v1", model="judge", api_key="", ...)) as chat:
        text = await chat.complete([{"role": "user", "content": "Hello"}], temperature=1.0, max_tokens=64, seed=0)

A refused connection, a timeout, 429 and 5xx are tried again; any other status is a failed call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from jaxagent.config import ConfigError

FIRST_PAUSE_S = 0.2  # before the first retry; doubled for each further one
MAX_REPLY_BYTES = 1 << 20
CONNECTIONS = 256  # at once, to the one server


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


class _Transient(CallError):
    """A call has failed in a way that another attempt may not meet."""


class ChatClient:
    """Must be used and closed on one asyncio loop."""

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

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
        endpoint = self._endpoint
        body = {
            "model": endpoint.model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        for attempt in range(endpoint.retries + 1):
            try:
                return _content(await self._post(body))
            except _Transient:
                if attempt == endpoint.retries:
                    raise
                await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, body: dict[str, Any]) -> bytes:
        endpoint = self._endpoint
        if self._session is None:  # made here: a session belongs to the running loop
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=endpoint.timeout_s),
                connector=aiohttp.TCPConnector(limit=CONNECTIONS),
                auto_decompress=False,  # what is sent compressed against our word is not read
                headers={"Accept-Encoding": "identity"}
                | ({"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}),
            )
        url = f"{endpoint.url.rstrip('/')}/chat/completions"
        data = bytearray()
        try:
            async with self._session.post(url, json=body, allow_redirects=False) as response:
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > MAX_REPLY_BYTES:
                        raise CallError(f"{url} sent more than {MAX_REPLY_BYTES} bytes")
                status = response.status
        except TimeoutError as failure:
            raise _Transient(f"{url} did not answer in {endpoint.timeout_s:g} s") from failure
        except aiohttp.InvalidURL as failure:
            raise CallError(f"'{url}' is not a URL") from failure
        except aiohttp.ClientError as failure:
            raise _Transient(f"{url}: {type(failure).__name__}") from failure
        if status == 200:
            return bytes(data)
        error = f"{url} answered {status}"
        raise _Transient(error) if status >= 500 or status == 429 else CallError(error)


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
