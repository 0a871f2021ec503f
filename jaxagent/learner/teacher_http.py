"""A teacher behind HTTP: `python -m jaxagent.serve` on another machine scores token ids (its POST /v1/score).

Requests hold whole trajectories up to a bound on tokens; a few are under way at once. All attempts of one request
(io/http.py says what is tried again) together stay within `timeout_s * (retries + 1)` seconds plus short pauses; a
request that fails ends the step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxagent.algorithms.distill import Scores
from jaxagent.algorithms.streams import action_mask
from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.io.http import HttpClient, HttpError
from jaxagent.types import Trajectory

REQUESTS_AT_ONCE = 4
HEAD_BYTES = 1 << 16  # of an answer, beside its numbers
NUMBER_BYTES = 32  # of a number as JSON, and what stands beside it


class TeacherError(RuntimeError):
    """The server cannot judge: it failed, is not reached, or does not speak the protocol."""


class HttpTeacher:
    """Scores trajectories. Calls block: they run in the loop's own thread, which has nothing else to do meanwhile.

    Settings as of `teachers.Server`.
    """

    def __init__(self, url: str, timeout_s: float, retries: int, request_tokens: int) -> None:
        self._url, self._timeout_s, self._retries = url.rstrip("/"), timeout_s, retries
        self._request_tokens = request_tokens

    def check(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        """Raises ConfigError when the server does not answer, has another tokenizer or too short a context."""
        try:
            answer = asyncio.run(self._ask_all([("GET", "/v1/tokenizer", HEAD_BYTES, None)]))[0]
            same = (answer["vocab_size"], answer["digest"]) == (tokenizer.vocab_size, tokenizer.digest())
            context = int(answer["context"])
        except (TeacherError, KeyError, TypeError, ValueError) as failure:
            raise ConfigError(f"distill.teacher: {failure}") from failure
        if not same:
            raise ConfigError(
                f"distill.teacher '{self._url}' has another tokenizer ({answer['vocab_size']} tokens) than the policy "
                f"({tokenizer.vocab_size} tokens). Set tokenizer.path to the folder that the teacher is served from."
            )

        if context < context_tokens:
            raise ConfigError(
                f"distill.teacher '{self._url}' takes {context} tokens, env.context_tokens is {context_tokens}: "
                f"start it with --context={context_tokens}."
            )

    def score(
        self,
        trajectories: Sequence[Trajectory],
        candidates: Sequence[np.ndarray] | None,
        top_k: int,
        temperature: float,
    ) -> list[Scores]:
        """Scores of the action tokens of each trajectory, with K = `top_k`, as a `teacher.Teacher` gives them.

        Raises TeacherError where there is no good answer after all attempts.
        """
        at = [np.flatnonzero(action_mask(t)) for t in trajectories]
        width = 0 if candidates is None or not candidates else candidates[0].shape[1]
        requests = []
        for part in self._parts(trajectories):
            body: dict[str, Any] = {
                "sequences": [trajectories[i].tokens.tolist() for i in part],
                "positions": [at[i].tolist() for i in part],
                "top_k": top_k,
                "temperature": temperature,
            }
            if candidates is not None:
                body["candidates"] = [candidates[i][at[i]].tolist() for i in part]
            numbers = sum(len(at[i]) for i in part) * (1 + 2 * top_k + width)
            requests.append(("POST", "/v1/score", HEAD_BYTES * len(part) + NUMBER_BYTES * numbers, body))
        try:
            answers = [row for answer in asyncio.run(self._ask_all(requests)) for row in answer["scores"]]
            return [
                _scatter(answer, len(t), positions, top_k, width)
                for answer, t, positions in zip(answers, trajectories, at, strict=True)
            ]
        except (KeyError, TypeError, ValueError) as failure:
            raise TeacherError(
                f"{self._url} sent a malformed answer ({type(failure).__name__}: {failure})"
            ) from failure

    def _parts(self, trajectories: Sequence[Trajectory]) -> Iterator[list[int]]:
        """Consecutive trajectories whose tokens fit one request."""
        part: list[int] = []
        tokens = 0
        for i, trajectory in enumerate(trajectories):
            if part and tokens + len(trajectory) > self._request_tokens:
                yield part
                part, tokens = [], 0
            part.append(i)
            tokens += len(trajectory)
        if part:
            yield part

    async def _ask_all(self, requests: Sequence[tuple[str, str, int, Any]]) -> list[Any]:
        """Answers in the order of the requests (method, path, bytes of the answer at most, body)."""
        turn = asyncio.Semaphore(REQUESTS_AT_ONCE)
        async with HttpClient(self._timeout_s, HEAD_BYTES, self._retries) as client:
            tasks = [asyncio.ensure_future(self._ask(client, turn, *request)) for request in requests]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # where one has failed, nobody waits for the others
                    task.cancel()

    async def _ask(
        self, client: HttpClient, turn: asyncio.Semaphore, method: str, path: str, max_bytes: int, body: Any
    ) -> Any:
        url = self._url + path
        try:
            async with turn:  # a request that waits for its turn has not begun
                return json.loads(await client.request(method, url, json=body, max_bytes=max_bytes))
        except HttpError as failure:
            raise TeacherError(str(failure)) from failure
        except ValueError as failure:
            raise TeacherError(f"{url} sent no JSON: {failure}") from failure


def _scatter(answer: dict[str, Any], length: int, at: np.ndarray, k: int, candidates: int) -> Scores:
    """One sequence's answer, n positions, as arrays over all T tokens."""
    shapes = {"logprobs": (), "top_ids": (k,), "top_logprobs": (k,), "candidate_logprobs": (candidates,)}
    out = {}
    for name, shape in shapes.items():
        dtype = np.int32 if name == "top_ids" else np.float32
        values = np.asarray(answer[name], dtype).reshape(len(at), *shape)
        out[name] = np.zeros((length, *shape), dtype)
        out[name][at] = values
    return Scores(**out)
