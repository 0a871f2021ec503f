"""The HTTP service around an engine: requests -> the driver -> answers. See `serve`, which starts it, for the routes.

Every wait is bounded: for a body, for the engine, for a client that takes a stream's next event (`connections` sees to
the rest). A client that goes away cancels its handler, and with it its choices.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine import scoring
from jaxagent.engine.driver import Driver
from jaxagent.engine.requests import BusyError, EngineError, Sampled
from jaxagent.engine.scoring import ScoreRequest, Scoring
from jaxagent.gateway.chat import BadRequest
from jaxagent.gateway.cut import Cut
from jaxagent.gateway.forms import completions
from jaxagent.gateway.forms.completions import Ask

MAX_BODY_BYTES = 16 * 2**20
MAX_SCORING = 64  # requests to /v1/score in hand
BODY_TIMEOUT_S = 60.0  # for a body to arrive
WRITE_TIMEOUT_S = 60.0  # for an event of a stream to be taken
READERS = 2  # threads that read bodies and tokenise prompts
STATISTICS = ("queue_s", "prefill_s", "decode_s", "cached_tokens")  # of a Generation, in every answer


class Completions:
    """Answers HTTP requests by turns of the driver. Lives as long as the server."""

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer,
        context: int,
        timeout_s: float,
        gauges: Mapping[str, float],
        scoring: Scoring | None = None,
        name: str = "policy",
    ) -> None:
        self._driver, self._tokenizer, self._context, self._timeout_s = driver, tokenizer, context, timeout_s
        self._gauges = gauges  # what was measured once, for /metrics
        self._scoring, self._being_scored = scoring, 0
        self._name, self._created = name, int(time.time())
        self._readers: concurrent.futures.Executor | None = None  # while an application of it is served

    def app(self) -> web.Application:
        """The web application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors])
        routes = [web.post("/v1/completions", self._complete), web.get("/health", self._health)]
        routes += [web.get("/v1/models", self._models), web.get("/v1/models/{name:.+}", self._one_model)]
        routes += [web.post("/v1/score", self._score), web.get("/v1/tokenizer", self._describe_tokenizer)]
        app.add_routes([*routes, web.get("/metrics", self._metrics)])
        app.cleanup_ctx.append(self._reading)
        return app

    async def _reading(self, app: web.Application) -> AsyncIterator[None]:
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS, "reader")
        yield
        self._readers.shutdown(wait=False, cancel_futures=True)

    # ---------------------------------------------------------------- completions

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        raw = await _body(request)
        ask = await self._off_loop(completions.parse, raw, self._tokenizer.vocab_size)
        self._check_model(ask.model)
        prompts = await self._off_loop(lambda: [self._prompt(prompt) for prompt in ask.prompts])
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        head["model"] = self._name
        if ask.stream:
            return await self._stream(request, ask, prompts, head)
        pieces: list[list[dict[str, Any]]] = [[] for _ in range(len(prompts) * ask.n)]
        async with contextlib.aclosing(self._pieces(ask, prompts)) as arriving:
            async for piece in arriving:
                pieces[piece["index"]].append(piece)
        choices = [completions.merged(one) for one in pieces]
        used = _usage(ask, prompts, sum(len(c["token_ids"]) for c in choices), choices)
        flat = prompts if len(prompts) > 1 else prompts[0]
        return _json(head | {"choices": choices, "usage": used, "prompt_token_ids": flat})

    async def _stream(
        self, request: web.Request, ask: Ask, prompts: list[list[int]], head: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        blank = {"usage": None} if ask.stream_usage else {}
        ends: list[dict[str, Any]] = []
        sampled = 0

        async def send(data: bytes) -> None:
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(b"data: " + data + b"\n\n")
            except TimeoutError:  # a client that does not read gets nothing more, not even this error
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the client does not read its stream") from None

        async with contextlib.aclosing(self._pieces(ask, prompts)) as arriving:
            try:
                async for piece in arriving:
                    event = _dump(head | {"choices": [piece]} | blank)
                    if not response.prepared:  # what fails before the first token still has a status code
                        await response.prepare(request)
                    await send(event)
                    sampled += len(piece["token_ids"])
                    if piece["finish_reason"] is not None:
                        ends.append(piece)
            except (TimeoutError, EngineError) as failure:
                if not response.prepared:
                    raise
                await send(_dump(completions.error_body(self._told(failure), 500)))
                return response
        if ask.stream_usage:
            await send(_dump(head | {"choices": [], "usage": _usage(ask, prompts, sampled, ends)}))
        await send(b"[DONE]")
        return response

    async def _pieces(self, ask: Ask, prompts: list[list[int]]) -> AsyncIterator[dict[str, Any]]:
        """Yields pieces of all choices as they are sampled. Closing the generator gives up all choices."""
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
                while not isinstance(item := await queue.get(), asyncio.Task):
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
        cut, loop = Cut(ask.stops, self._tokenizer.token_bytes()), asyncio.get_running_loop()
        found = loop.create_future()

        def take(sampled: Sampled) -> None:
            if cut.stop is not None:  # sampled before the engine heard of it
                return
            ids = sampled.tokens.tolist()
            text, offsets = cut.feed(ids)
            ids, logprobs = ids[: len(offsets)], sampled.logprobs[: len(offsets)].tolist()
            texts = [self._tokenizer.decode([i]) for i in ids]
            put(completions.piece(index, text, ids, texts, logprobs, offsets))
            if cut.stop is not None:
                found.set_result(None)

        # The prompt's own digest, so that randomness depends on what is asked and not on when.
        task = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=8).hexdigest()
        session = await self._driver.open(f"{task}/{ask.seed}", number, domain=ask.user)
        on_tokens = take if ask.stream or ask.stops else None
        work = asyncio.ensure_future(
            self._driver.generate(session, prompt, ask.max_tokens, ask.sampling, 0, self._timeout_s, on_tokens)
        )
        try:
            await asyncio.wait({work, found}, return_when=asyncio.FIRST_COMPLETED)
            end = await work if cut.stop is None else None
        finally:
            work.cancel()
            self._driver.close(session)
            await asyncio.gather(work, return_exceptions=True)
        if end is not None and on_tokens is None:
            take(Sampled(end.tokens, end.logprobs, end.policy_versions))
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

    # ---------------------------------------------------------------- models and scores

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._name):
            message = f"the model '{name}' does not exist; this server has '{self._name}'"
            raise BadRequest(message, "model", status=404, code="model_not_found")

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return _json(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": self._created, "owned_by": "jaxagent"}

    async def _score(self, request: web.Request) -> web.Response:
        if self._scoring is None:
            return _json(completions.error_body("this server does not score (int8 matrices)", 501), 501)
        asked = await self._off_loop(self._score_request, await _body(request))
        if self._being_scored >= MAX_SCORING:
            raise BusyError(f"{self._being_scored} requests are being scored already")
        self._being_scored += 1
        given_up = threading.Event()
        # In a thread: the device takes its time, and generation goes on meanwhile.
        work = asyncio.create_task(asyncio.to_thread(self._scoring, self._driver.params, asked, given_up))
        work.add_done_callback(self._scored)
        try:
            answers = await asyncio.wait_for(asyncio.shield(work), self._timeout_s)
        finally:
            given_up.set()
        return await self._off_loop(_json, {"scores": answers})

    def _score_request(self, raw: bytes) -> ScoreRequest:
        try:
            return scoring.parse(raw.decode(), self._tokenizer.vocab_size, self._context)
        except ValueError as mistake:
            raise BadRequest(str(mistake)) from None

    def _scored(self, work: asyncio.Task) -> None:
        self._being_scored -= 1
        work.cancelled() or work.exception()  # read: the client may have gone

    # ---------------------------------------------------------------- the rest

    async def _off_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result. In a thread: megabytes take seconds, and the others are served meanwhile."""
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.run_in_executor(self._readers, function, *args), self._timeout_s)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """Turns every error that comes before an answer has begun into a reply in OpenAI's form."""
        param, code, headers = None, None, {}
        try:
            return await handler(request)
        except BadRequest as mistake:
            told, status, param, code = str(mistake), mistake.status, mistake.param, mistake.code
        except BusyError as failure:
            told, status, headers = str(failure), 429, {"Retry-After": "1"}
        except TimeoutError as failure:
            told, status = self._told(failure), 503
        except EngineError as failure:
            told, status = str(failure), 500
        except web.HTTPException as answer:
            told, status = f"{request.method} {request.path}: {answer.reason}", answer.status
            headers = {name: answer.headers[name] for name in ("Allow",) if name in answer.headers}
        return _json(completions.error_body(told, status, param, code), status, headers)

    def _told(self, failure: Exception) -> str:
        return f"no result in {self._timeout_s:g} s" if isinstance(failure, TimeoutError) else str(failure)

    async def _describe_tokenizer(self, request: web.Request) -> web.Response:
        told = {"vocab_size": self._tokenizer.vocab_size, "digest": self._tokenizer.digest(), "context": self._context}
        return _json(told)

    async def _health(self, request: web.Request) -> web.Response:
        try:
            self._driver.check()
        except EngineError as failure:
            return _json({"status": "failed", "error": str(failure)}, 503)
        return _json({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [f"jaxagent_engine_{name}_total {value:.6f}" for name, value in sorted(self._driver.stats().items())]
        lines += [f"jaxagent_engine_{name} {value:.6g}" for name, value in self._gauges.items()]
        return web.Response(text="\n".join(lines) + "\n")


async def _body(request: web.Request) -> bytes:
    """The whole body. What its headers say of a character set is not asked: JSON is UTF-8."""
    if (encoding := request.headers.get("Content-Encoding", "identity").lower()) != "identity":
        raise BadRequest(f"Content-Encoding '{encoding}' is not supported: send the body as it is", status=415)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise BadRequest(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408) from None
    except web.HTTPRequestEntityTooLarge:
        raise BadRequest(f"the body may have {MAX_BODY_BYTES} bytes", status=413) from None
    except (web.RequestPayloadError, HttpProcessingError) as error:  # cut off, or wrongly framed
        raise BadRequest(f"the body cannot be read: {error}") from None


def _dump(data: Any) -> bytes:
    try:
        return json.dumps(data, allow_nan=False).encode()
    except ValueError:
        raise EngineError("The answer has numbers that are not finite: something is wrong with the weights.") from None


def _json(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=_dump(data), status=status, headers=headers, content_type="application/json")


def _usage(ask: Ask, prompts: list[list[int]], sampled: int, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of tokens. How many of the prompts were cached is None if a choice was cut short, which reports none."""
    least: dict[int, int] = {}
    for choice in choices:
        if (cached := choice["cached_tokens"]) is None:
            return completions.usage(sum(map(len, prompts)), sampled, None)
        i = choice["index"] // ask.n
        least[i] = min(cached, least.get(i, cached))
    return completions.usage(sum(map(len, prompts)), sampled, sum(least.values()))
