"""One request of a dialect: its body -> an ask -> the session's answer -> the dialect's bytes, whole or as a stream.

Everything has a bound: how long a body may take to arrive and to be read, and an answer to be taken.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from aiohttp import web

from jaxagent.engine.requests import EngineError
from jaxagent.gateway.chat import Answer, Ask, BadRequest, Ident
from jaxagent.gateway.forms import messages, responses
from jaxagent.gateway.forms.events import EventWriter
from jaxagent.gateway.forms.history import AnswerHistory, Item
from jaxagent.gateway.reading import Begun, Event
from jaxagent.gateway.session import Session
from jaxagent.gateway.threads import RequestDigests, request_digests
from jaxagent.io import connections

logger = logging.getLogger(__name__)

PING_S = 10.0  # of silence, after which the client of a stream hears that it is not forgotten: its head, then events
REFERRING = (responses, messages)  # dialects whose requests may name what was answered before
MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_S = 60.0  # for a body to arrive
WRITE_TIMEOUT_S = 60.0  # for an event of a stream to be taken
READERS = 2  # threads that read bodies and tokenise prompts
LARGE_BYTES = 100_000  # a body that is longer is read in a thread, and the others are served meanwhile
RETRY_HEADER = "x-stainless-retry-count"  # of the OpenAI and Anthropic SDKs


class Readers:
    """A few threads for what takes long with megabytes of text. `timeout_s`: the longest wait for a result."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads: concurrent.futures.Executor | None = None

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result, computed in a thread.

        Raises:
          TimeoutError: it took too long.
        """
        if self._threads is None:  # also of a server that listens again
            self._threads = concurrent.futures.ThreadPoolExecutor(READERS, "reader")
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.run_in_executor(self._threads, function, *args), self._timeout_s)

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises BadRequest: it is too long, compressed, wrongly framed or too slow."""
    try:
        return await connections.read_body(request, MAX_BODY_BYTES, BODY_TIMEOUT_S)
    except web.HTTPException as refusal:
        raise BadRequest(refusal.reason, status=refusal.status) from None


def dump(data: Any) -> bytes:
    """JSON.

    Raises:
      EngineError: a number is not finite.
    """
    try:
        return json.dumps(data, allow_nan=False).encode()
    except ValueError:
        raise EngineError("The answer has numbers that are not finite: something is wrong with the weights.") from None


def reply(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A response with JSON."""
    return web.Response(body=dump(data), status=status, headers=headers, content_type="application/json")


def event_stream() -> web.StreamResponse:
    """A response of server-sent events, not begun."""
    return web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})


async def send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Sends part of a stream.

    Raises:
      ConnectionResetError: the client does not read: it gets nothing more, not even this error.
    """
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read its stream") from None


# -------------------------------------------------------------------- conversations


def check_model(name: str | None, own: str) -> None:
    """Raises BadRequest where a request names another model than the server's own."""
    if name not in (None, own):
        message = f"the model '{name}' does not exist; this server has '{own}'"
        raise BadRequest(message, "model", status=404, code="model_not_found")


async def read_request(
    request: web.Request, form: ModuleType, readers: Readers, history: AnswerHistory | None = None
) -> tuple[Ask, RequestDigests]:
    """The body of a request in a dialect, and its digests. `history`: what its session answered; None: nothing.

    Raises:
      BadRequest: a mistake of the client's.
    """

    def parse(raw: bytes) -> tuple[Ask, RequestDigests]:
        try:
            ask = form.parse(raw, history) if form in REFERRING else form.parse(raw)
            return ask, request_digests(ask)
        except RecursionError:
            raise BadRequest("the body is nested too deep") from None

    raw = await read_body(request)
    return parse(raw) if len(raw) < LARGE_BYTES else await readers.run(parse, raw)


async def answer_request(
    request: web.Request,
    form: ModuleType,
    session: Session,
    ask: Ask,
    digests: RequestDigests,
    name: str,
    history: AnswerHistory | None = None,
) -> web.StreamResponse:
    """Answers a request of a session; the session hears when the client has taken all of it.

    What is answered in Responses is added to `history`.
    """
    ident = Ident(secrets.token_hex(12), ask.model or name, int(time.time()))
    count = request.headers.get(RETRY_HEADER, "")
    retry = count != "0" if count == "0" or re.fullmatch("[1-9][0-9]*", count) else None  # else it says nothing

    async def draw(watch: Callable[[Event], None] | None = None) -> Sequence[Answer]:
        """The samples, each one drawn for itself. Several are not watched while they are drawn."""
        if ask.n == 1:
            return [await session.answer(ask, watch, retry, digests)]
        draws = [dataclasses.replace(digests, digest=digests.digest + i.to_bytes(2)) for i in range(ask.n)]
        session.check_requests(draws, retry)  # before any of them is drawn, and trained
        return await asyncio.gather(*(session.answer(ask, None, retry, one) for one in draws))

    def noted(answers: Sequence[Answer], new_items: Sequence[Item] = ()) -> dict[str, Any]:
        """The body of the answer, which the history keeps; `new_items` are the items that a stream has sent."""
        body = form.body(ask, *answers, ident=ident)
        if history is not None and ask.items:
            output = new_items or body.get("output") or [{"role": "assistant", "content": body.get("content")}]
            history.keep(body["id"], ask.items, output)
        return body

    if ask.stream:
        response, answers = await _stream(request, form.writer(ask, ident), draw, noted)
    else:
        answers = await draw()
        response = reply(noted(answers))
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return response
    for answer in answers:
        session.delivered(answer)
    return response


async def _stream(
    request: web.Request,
    writer: EventWriter,
    draw: Callable[..., Awaitable[Sequence[Answer]]],
    noted: Callable[..., Any],
) -> tuple[web.StreamResponse, Sequence[Answer]]:
    """Sends the events of an answer while it is drawn. Returns the response, not ended; no answers where it failed."""
    response = event_stream()
    queue: asyncio.Queue[Event | asyncio.Task[Sequence[Answer]]] = asyncio.Queue()
    work = asyncio.ensure_future(draw(queue.put_nowait))
    work.add_done_callback(queue.put_nowait)
    prompt_tokens, answers = 0, None
    try:
        while answers is None:
            data = b""
            item = await next_event(queue, PING_S)
            items = [] if item is None else [item, *(queue.get_nowait() for _ in range(queue.qsize()))]
            for item in items:
                if isinstance(item, Begun):
                    prompt_tokens = item.prompt_tokens
                elif not isinstance(item, asyncio.Task):
                    data += b"" if response.prepared or data else writer.begin(prompt_tokens, None)
                    data += writer.delta(item)
                elif (failure := item.exception()) is None:
                    answers = item.result()
                    if not (response.prepared or data):
                        data = writer.begin(len(answers[0].prompt_ids), answers[0].cached_tokens)
                    data += writer.end(*answers)
                    noted(answers, getattr(writer, "output", ()))  # before the client can name it
                elif not response.prepared and not data:
                    raise failure  # what fails before the first token still has a status code
                else:
                    answers, data = [], data + _failed(writer, failure)
            if not data and response.prepared:
                data = writer.ping()
            elif not items:  # some clients give up on a head that does not come, as others on a silent stream
                data = writer.begin(prompt_tokens, None) or writer.ping()
            if data:
                await response.prepare(request)
                await send(request, response, data)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    return response, answers


async def next_event(queue: asyncio.Queue, timeout_s: float) -> Any:
    """What the queue holds next; None after so many seconds in which it holds nothing."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await queue.get()


def _failed(writer: EventWriter, failure: BaseException) -> bytes:
    if isinstance(failure, BadRequest):
        return writer.failed(str(failure), failure.status, failure.code)
    if isinstance(failure, TimeoutError):
        return writer.failed("no result in time", 503, None)
    if not isinstance(failure, EngineError):
        logger.error("a request failed", exc_info=failure)
    return writer.failed(str(failure) or type(failure).__name__, 500, None)
