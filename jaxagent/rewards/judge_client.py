"""Asks a judge: n calls of an OpenAI-style `POST {url}/chat/completions`, under one deadline, into one judgement.

    judge = HttpJudge(JudgeSettings(url="http://127.0.0.1:8000/v1", model="judge", calls=3, quorum=2, ...))
    judgement = await judge.ask(rubric, {"question": task.prompt, "answer": answer})   # in an environment's verify
    reward(View(task, ..., judged=judgement.score))

What `chat_client` cannot get is a failed call, and so is a reply that is not exactly what was asked for (asking again
until the format fits would select among judges' opinions).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.rewards.chat_client import REMEDIES, CallError, ChatClient, Endpoint
from jaxagent.rewards.judge import Judgement, JudgeSettings, ReplyError, Rubric, combine, messages, parse_reply


class HttpJudge:
    """A judge behind HTTP. Must be used and closed on one asyncio loop.

    Raises ConfigError: the token's file cannot be read.
    """

    def __init__(self, settings: JudgeSettings):
        self._settings = settings
        try:
            token = Path(settings.token_file).read_text(encoding="utf-8").strip() if settings.token_file else ""
        except OSError as error:
            raise ConfigError(f"judge token_file='{settings.token_file}': {error.strerror}.") from error
        self._chat = ChatClient(Endpoint.of(settings, token, settings.deadline_s))

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
            elif isinstance(result, CallError) and result.refused:
                failures.append(f"{result}; it refuses the field '{result.refused}': set {REMEDIES[result.refused]}")
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
