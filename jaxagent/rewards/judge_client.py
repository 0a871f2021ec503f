"""Asks a judge: n calls of an OpenAI-style `POST {url}/chat/completions`, under one deadline, into one judgement.

    judge = HttpJudge(JudgeSettings(url="http://127.0.0.1:8000/v1", model="judge", calls=3, quorum=2, ...))
    judgement = await judge.ask(rubric, {"question": task.prompt, "answer": answer})   # in an environment's verify
    reward(View(task, ..., judged=judgement.score))

A refused connection, a timeout, 429 and 5xx are tried again; any other status is a failed call, and so is a reply that
is not exactly what was asked for (asking again until the format fits would select among judges' opinions).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp

from jaxagent.config import ConfigError
from jaxagent.rewards.judge import Judgement, ReplyError, Rubric, combine, messages, parse_reply

FIRST_PAUSE_S = 0.2  # before the first retry; doubled for each further one
MAX_REPLY_BYTES = 1 << 20
CONNECTIONS = 256  # at once, to the one server


@dataclasses.dataclass(frozen=True)
class JudgeSettings:
    """Where the judge is and how it is asked."""

    url: str  # up to and without /chat/completions, e.g. "http://127.0.0.1:8000/v1"
    model: str
    api_key: str  # sent as a bearer token; "" = none
    calls: int  # of one ensemble; each has its own nonce and seed
    quorum: int  # usable replies that are needed
    how: Literal["majority", "mean"]
    temperature: float
    max_tokens: int  # of a reply
    max_chars: int  # of each judged text
    timeout_s: float  # for one attempt
    retries: int  # further attempts of one call
    deadline_s: float  # for everything

    def __post_init__(self) -> None:
        if not 1 <= self.quorum <= self.calls:
            raise ConfigError(f"judge quorum={self.quorum} must be in 1..calls={self.calls}")
        if self.how not in ("majority", "mean"):
            raise ConfigError(f"judge how='{self.how}' must be majority or mean")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"judge url='{self.url}' must start with http:// or https://")


class HttpJudge:
    """A judge behind HTTP. Must be used and closed on one asyncio loop."""

    def __init__(self, settings: JudgeSettings):
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, rubric: Rubric, material: Mapping[str, str]) -> Judgement:
        """Asks `calls` times at once. Calls that the deadline cuts off are failures like others.

        Raises:
          JudgeError: fewer than `quorum` usable replies. In an environment's `verify` it becomes ENV_ERROR, as it must.
        """
        settings = self._settings
        if self._session is None:  # made here: a session belongs to the running loop
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
                connector=aiohttp.TCPConnector(limit=CONNECTIONS),
                auto_decompress=False,  # what is sent compressed against our word is not read
                headers={"Accept-Encoding": "identity"}
                | ({"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}),
            )
        calls = [asyncio.ensure_future(self._call(rubric, material, seed)) for seed in range(settings.calls)]
        try:
            await asyncio.wait(calls, timeout=settings.deadline_s)
        finally:
            for call in calls:
                call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
        answers, failures = [], []
        for result in results:
            if isinstance(result, dict):
                answers.append(result)
            elif isinstance(result, asyncio.CancelledError):
                failures.append(f"cut off by the deadline of {settings.deadline_s:g} s")
            elif isinstance(result, _CallError | ReplyError):
                failures.append(str(result))
            else:
                raise result
        return combine(rubric, answers, failures, settings.how, settings.quorum)

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, rubric: Rubric, material: Mapping[str, str], seed: int) -> dict[str, int]:
        settings, nonce = self._settings, secrets.token_hex(8)
        body = {
            "model": settings.model,
            "messages": messages(rubric, material, nonce, settings.max_chars),
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "seed": seed,
        }
        for attempt in range(settings.retries + 1):
            try:
                return parse_reply(_content(await self._post(body)), rubric, nonce)
            except _Transient:
                if attempt == settings.retries:
                    raise
                await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    async def _post(self, body: dict[str, Any]) -> bytes:
        url = f"{self._settings.url.rstrip('/')}/chat/completions"
        data = bytearray()
        try:
            async with self._session.post(url, json=body, allow_redirects=False) as response:
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > MAX_REPLY_BYTES:
                        raise _CallError(f"{url} sent more than {MAX_REPLY_BYTES} bytes")
                status = response.status
        except TimeoutError as failure:
            raise _Transient(f"{url} did not answer in {self._settings.timeout_s:g} s") from failure
        except aiohttp.InvalidURL as failure:
            raise _CallError(f"'{url}' is not a URL") from failure
        except aiohttp.ClientError as failure:
            raise _Transient(f"{url}: {type(failure).__name__}") from failure
        if status == 200:
            return bytes(data)
        error = f"{url} answered {status}"
        raise _Transient(error) if status >= 500 or status == 429 else _CallError(error)


class _CallError(Exception):
    """A call has failed."""


class _Transient(_CallError):
    """A call has failed in a way that another attempt may not meet."""


def _content(body: bytes) -> str:
    """The text of a chat completion's one choice; a reply cut off by its token limit is not a reply."""
    try:
        (choice,) = json.loads(body)["choices"]
        content, finish = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
        raise ReplyError(f"not a chat completion ({type(failure).__name__})") from failure
    if not isinstance(content, str):
        raise ReplyError("the completion has no text")
    if finish == "length":
        raise ReplyError("the reply was cut off by max_tokens")
    return content
