"""Completions, scores and what else `python -m jaxagent.serve` answers besides conversations: requests -> the driver.

The routes of an engine that is served; `server` serves them beside the dialects of agent programs. Every wait is
bounded. A client that goes away cancels its handler, and with it its choices.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from aiohttp import web

from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine import scoring
from jaxagent.engine.driver import Driver
from jaxagent.engine.requests import EngineError, QueueFullError, SampledTokens
from jaxagent.engine.scoring import AnswerScores
from jaxagent.gateway import talk
from jaxagent.gateway.chat import Ask, BadRequest, Ident
from jaxagent.gateway.forms import completions
from jaxagent.gateway.reading import Cut
from jaxagent.gateway.sampler import unless
from jaxagent.gateway.talk import dump, read_body, reply

MAX_SCORING = 64  # requests to /v1/score in hand
STATISTICS = ("queue_s", "prefill_s", "decode_s", "cached_tokens")  # of a Generation, in every answer


class Completions:
    """Answers HTTP requests by turns of the driver. Lives as long as the server."""

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer,
        context: int,
        timeout_s: float,
        scoring: AnswerScores | None = None,
        name: str = "policy",
        gauges: Mapping[str, float] | None = None,
    ) -> None:
        self._driver, self._tokenizer, self._context, self._timeout_s = driver, tokenizer, context, timeout_s
        self._scoring, self._being_scored = scoring, 0
        self._name = name
        self._gauges = gauges or {}  # what was measured once, for /metrics
        self._readers = talk.Readers(timeout_s)

    def routes(self) -> list[web.RouteDef]:
        """What it answers."""
        routes = [web.post("/v1/completions", self._complete), web.get("/health", self._health)]
        routes += [web.post("/v1/score", self._score), web.get("/v1/tokenizer", self._describe_tokenizer)]
        return [*routes, web.get("/metrics", self._metrics)]

    def close(self) -> None:
        """Ends its threads."""
        self._readers.close()

    # ---------------------------------------------------------------- completions

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        raw = await read_body(request)
        parsed, ask = await self._readers.run(completions.parse_many, raw, self._tokenizer.vocab_size)
        talk.check_model(ask.model, self._name)
        prompts = await self._readers.run(lambda: [self._prompt(prompt) for prompt in parsed])
        head = completions.head(Ident(secrets.token_hex(12), self._name, int(time.time())))
        pieces: list[list[dict[str, Any]]] = [[] for _ in range(len(prompts) * ask.n)]
        response = talk.event_stream()
        blank = {"usage": None} if ask.stream_usage else {}

        async def send(data: bytes) -> None:
            if not response.prepared:  # what fails before the first token still has a status code
                await response.prepare(request)
            await talk.send(request, response, b"data: " + data + b"\n\n")

        async with contextlib.aclosing(self._pieces(ask, prompts)) as arriving:
            try:
                async for piece in arriving:
                    if piece is not None:
                        pieces[piece["index"]].append(piece)
                    if ask.stream:
                        choice = piece or completions.piece(0, "", [], [], [], [])
                        await send(dump(head | {"choices": [choice]} | blank))
            except (TimeoutError, EngineError) as failure:
                if not response.prepared:
                    raise
                message = f"no result in {self._timeout_s:g} s" if isinstance(failure, TimeoutError) else str(failure)
                await send(dump(completions.error(message, 500)))
                return response
        choices = [completions.merged(one) for one in pieces]
        usage = {"usage": _usage(ask, prompts, choices)}
        if not ask.stream:
            flat = prompts if len(prompts) > 1 else prompts[0]
            return reply(head | {"choices": choices} | usage | {"prompt_token_ids": flat})
        if ask.stream_usage:
            await send(dump(head | {"choices": []} | usage))
        await send(b"[DONE]")
        return response

    async def _pieces(self, ask: Ask, prompts: list[list[int]]) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Yields pieces of all choices as they are sampled, and None where nothing was for a while.

        Closing the generator gives up all choices.
        """
        queue: asyncio.Queue[dict[str, Any] | asyncio.Task] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._choice(ask, prompt, i * ask.n + number, number, queue.put_nowait))
            for i, prompt in enumerate(prompts)
            for number in range(ask.n)
        ]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        try:
            for _ in tasks:
                while not isinstance(item := await talk.next_event(queue, talk.PING_S), asyncio.Task):
                    yield item
                item.result()  # if one is refused, the others have no client to answer
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(
        self, ask: Ask, prompt: list[int], index: int, number: int, put: Callable[[dict[str, Any]], None]
    ) -> None:
        """Samples one choice, the `number`-th of its prompt, and puts its pieces; the last has the finish reason."""
        cut, stop = Cut(ask.stops, self._tokenizer.token_bytes()), asyncio.Event()

        def take(sampled: SampledTokens) -> None:
            if cut.stop is not None:  # sampled before the engine heard of it
                return
            ids = sampled.tokens.tolist()
            text, offsets = cut.feed(ids)
            ids, logprobs = ids[: len(offsets)], sampled.logprobs[: len(offsets)].tolist()
            texts = [self._tokenizer.decode([i]) for i in ids]
            put(completions.piece(index, text, ids, texts, logprobs, offsets))
            if cut.stop is not None:
                stop.set()

        # The prompt's own digest, so that randomness depends on what is asked and not on when.
        task = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=8).hexdigest()
        session = await self._driver.open(f"{task}/{ask.seed}", number, domain=ask.user)
        on_tokens = take if ask.stream or ask.stops else None
        how = (ask.max_tokens, ask.sampling, 0, self._timeout_s, on_tokens)
        try:
            end = await unless(stop, self._driver.generate(session, prompt, *how))
        finally:
            self._driver.close(session)
        if end is not None and on_tokens is None:
            take(SampledTokens(end.tokens, end.logprobs, end.policy_versions))
        last = completions.piece(index, cut.flush(), [], [], [], [])
        last["finish_reason"] = "length" if end is not None and end.finish == "length" else "stop"
        last["stop_string"] = cut.stop if end is None else end.stop_string
        # A turn that was cut short reports none of these.
        put(last | {name: None if end is None else getattr(end, name) for name in STATISTICS})

    def _prompt(self, prompt: str | list[int]) -> list[int]:
        """Token ids, checked."""
        if isinstance(prompt, str):
            if (least := self._tokenizer.least_tokens(prompt)) >= self._context:
                raise BadRequest(f"the prompt has {least} tokens or more, the context is {self._context}", "prompt")
            ids = [*self._tokenizer.prefix_ids, *self._tokenizer.encode(prompt)]
        else:
            ids = prompt
        if len(ids) >= self._context:
            raise BadRequest(f"the prompt has {len(ids)} tokens, the context is {self._context}", "prompt")
        size = self._tokenizer.vocab_size
        if not ids or not all(type(i) is int and 0 <= i < size for i in ids):
            raise BadRequest(f"'prompt' must be text or token ids below {size}, and not empty", "prompt")
        return ids

    # ---------------------------------------------------------------- scores

    async def _score(self, request: web.Request) -> web.Response:
        if self._scoring is None:
            return reply(completions.error("this server does not score (int8 matrices)", 501), 501)
        raw, sizes = await read_body(request), (self._tokenizer.vocab_size, self._context)
        try:
            parsed = await self._readers.run(lambda: scoring.parse(raw.decode(), *sizes))
        except ValueError as mistake:
            raise BadRequest(str(mistake)) from None
        if self._being_scored >= MAX_SCORING:
            raise QueueFullError(f"{self._being_scored} requests are being scored already")
        self._being_scored += 1
        given_up = threading.Event()
        # In a thread: the device takes its time, and generation goes on meanwhile.
        work = asyncio.create_task(asyncio.to_thread(self._scoring, self._driver.params, parsed, given_up))
        work.add_done_callback(self._scored)
        try:
            answers = await asyncio.wait_for(asyncio.shield(work), self._timeout_s)
        finally:
            given_up.set()
        return await self._readers.run(reply, {"scores": answers})

    def _scored(self, work: asyncio.Task) -> None:
        self._being_scored -= 1
        work.cancelled() or work.exception()  # read: the client may have gone

    # ---------------------------------------------------------------- the rest

    async def _describe_tokenizer(self, request: web.Request) -> web.Response:
        size, digest = self._tokenizer.vocab_size, self._tokenizer.digest()
        return reply({"vocab_size": size, "digest": digest, "context": self._context})

    async def _health(self, request: web.Request) -> web.Response:
        try:
            self._driver.check()
        except EngineError as failure:
            return reply({"status": "failed", "error": str(failure)}, 503)
        return reply({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [f"jaxagent_engine_{name}_total {value:.6f}" for name, value in sorted(self._driver.stats().items())]
        lines += [f"jaxagent_engine_{name} {value:.6g}" for name, value in self._gauges.items()]
        return web.Response(text="\n".join(lines) + "\n")


def _usage(ask: Ask, prompts: list[list[int]], choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of tokens. How many of the prompts were cached is None if a choice was cut short, which reports none."""
    least: dict[int, int] = {}
    sampled = sum(len(choice["token_ids"]) for choice in choices)
    for choice in choices:
        if (cached := choice["cached_tokens"]) is None:
            return completions.usage(sum(map(len, prompts)), sampled, None)
        i = choice["index"] // ask.n
        least[i] = min(cached, least.get(i, cached))
    return completions.usage(sum(map(len, prompts)), sampled, sum(least.values()))
