"""Asks a judge: n calls of an OpenAI-style `POST {url}/chat/completions`, under one deadline, into one judgement.

    judge = HttpJudge(JudgeSettings(url="http://127.0.0.1:8000/v1", model="judge", calls=3, quorum=2, ...))
    judgement = await judge.ask(rubric, {"question": task.prompt, "answer": answer})   # in an environment's verify
    reward(View(task, ..., judged=judgement.score))

What `chat_client` cannot get is a failed call, and so is a reply that is not exactly what was asked for (asking again
until the format fits would select among judges' opinions).
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from jaxagent.config import ConfigError
from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Seconds
from jaxagent.rewards.chat_client import CallError, ChatClient, Endpoint
from jaxagent.rewards.judge import Judgement, ReplyError, Rubric, combine, messages, parse_reply


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Where the judge is and how it is asked."""

    url: str  # up to and without /chat/completions, e.g. "http://127.0.0.1:8000/v1"
    model: str
    token_file: str = ""  # a file with what is sent as a bearer token; "" = none
    calls: PositiveInt = 3  # of one ensemble; each has its own nonce and seed
    quorum: PositiveInt = 2  # usable replies that are needed
    how: Literal["majority", "mean"] = "majority"
    temperature: NonNegativeFloat = 1.0
    max_tokens: PositiveInt = 512  # of a reply
    max_chars: PositiveInt = 8_000  # of each judged text
    timeout_s: Seconds = 60.0  # for one attempt
    retries: NonNegativeInt = 2  # further attempts of one call
    deadline_s: Seconds = 120.0  # for everything

    def __post_init__(self) -> None:
        if not 1 <= self.quorum <= self.calls:
            raise ConfigError(f"judge quorum={self.quorum} must be in 1..calls={self.calls}")
        Endpoint(self.url, self.model, "", self.timeout_s, self.retries)  # checks the URL

    def endpoint(self) -> Endpoint:
        """What one call goes to.

        Raises:
          ConfigError: the token's file cannot be read.
        """
        try:
            token = Path(self.token_file).read_text(encoding="utf-8").strip() if self.token_file else ""
        except OSError as error:
            raise ConfigError(f"judge token_file='{self.token_file}': {error.strerror}.") from error
        return Endpoint(self.url, self.model, token, self.timeout_s, self.retries)


class HttpJudge:
    """A judge behind HTTP. Must be used and closed on one asyncio loop."""

    def __init__(self, settings: JudgeSettings):
        self._settings = settings
        self._chat = ChatClient(settings.endpoint())

    async def ask(self, rubric: Rubric, material: Mapping[str, str]) -> Judgement:
        """Asks `calls` times at once. Calls that the deadline cuts off are failures like others.

        Raises:
          JudgeError: fewer than `quorum` usable replies. In an environment's `verify` it becomes ENV_ERROR, as it must.
        """
        settings = self._settings
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
            elif isinstance(result, CallError | ReplyError):
                failures.append(str(result))
            else:
                raise result
        return combine(rubric, answers, failures, settings.how, settings.quorum)

    async def close(self) -> None:
        """Closes the connections."""
        await self._chat.close()

    async def _call(self, rubric: Rubric, material: Mapping[str, str], seed: int) -> dict[str, int]:
        settings, nonce = self._settings, secrets.token_hex(8)
        reply = await self._chat.complete(
            messages(rubric, material, nonce, settings.max_chars),
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            seed=seed,
        )
        return parse_reply(reply, rubric, nonce)
