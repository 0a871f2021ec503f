"""One request of a dialect: its body -> an ask -> the session's answer -> the dialect's bytes, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from aiohttp import web

from jaxagent.engine.requests import EngineError
from jaxagent.gateway import wire
from jaxagent.gateway.chat import Answer, Ask, BadRequest, Form, Ident
from jaxagent.gateway.reading import Begun, Event
from jaxagent.gateway.session import Session
from jaxagent.gateway.threads import Canonical, canonical

logger = logging.getLogger(__name__)

PING_S = 10.0  # of silence in a stream, after which a client hears that it is not forgotten
RETRY_HEADER = "x-stainless-retry-count"  # of the OpenAI and Anthropic SDKs


async def parsed(request: web.Request, form: Form, readers: wire.Readers) -> tuple[Ask, Canonical]:
    """The body of a request, and its digests.

    Raises:
      BadRequest: a mistake of the client's.
    """

    def parse(raw: bytes) -> tuple[Ask, Canonical]:
        ask = form.parse(raw)
        return ask, canonical(ask)

    raw = await wire.read_body(request)
    return parse(raw) if len(raw) < wire.LARGE_BYTES else await readers.run(parse, raw)


async def answered(
    request: web.Request, form: Form, session: Session, ask: Ask, asked: Canonical, name: str
) -> web.StreamResponse:
    """Answers a request of a session; the session hears when the client has taken all of it."""
    ident = Ident(secrets.token_hex(12), ask.model or name, int(time.time()))
    retry = None if (said := request.headers.get(RETRY_HEADER)) is None else said != "0"
    if ask.stream:
        return await _streamed(request, form, session, ask, asked, ident, retry)
    answer = await session.answer(ask, retry=retry, asked=asked)
    response = wire.reply(form.body(ask, answer, ident))
    try:
        async with asyncio.timeout(wire.WRITE_TIMEOUT_S):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return response
    session.delivered(answer)
    return response


async def _streamed(
    request: web.Request, form: Form, session: Session, ask: Ask, asked: Canonical, ident: Ident, retry: bool | None
) -> web.StreamResponse:
    response, writer = wire.event_stream(), form.writer(ask, ident)
    queue: asyncio.Queue[Event | asyncio.Task[Answer]] = asyncio.Queue()
    work = asyncio.create_task(session.answer(ask, queue.put_nowait, retry, asked))
    work.add_done_callback(queue.put_nowait)
    prompt_tokens, answer = 0, None
    try:
        while answer is None:
            data = b""
            for item in await _next(queue, PING_S if response.prepared else None):
                if isinstance(item, Begun):
                    prompt_tokens = item.prompt_tokens
                elif not isinstance(item, asyncio.Task):
                    data += b"" if response.prepared or data else writer.begin(prompt_tokens, None)
                    data += writer.delta(item)
                elif (failure := item.exception()) is None:
                    answer = item.result()
                    if not (response.prepared or data):
                        data = writer.begin(len(answer.prompt_ids), answer.cached_tokens)
                    data += writer.end(answer)
                elif not response.prepared and not data:
                    raise failure  # what fails before the first token still has a status code
                else:
                    data += _failed(writer, failure)
                    await _push(request, response, data)
                    return response
            if not data and response.prepared:
                data = writer.ping()
            if data:
                await _push(request, response, data)
        async with asyncio.timeout(wire.WRITE_TIMEOUT_S):
            await response.write_eof()
        session.delivered(answer)
        return response
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _next(queue: asyncio.Queue, timeout_s: float | None) -> list:
    """All that the queue holds, once it holds something; nothing after so many seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            items = [await queue.get()]
    except TimeoutError:
        return []
    while not queue.empty():
        items.append(queue.get_nowait())
    return items


async def _push(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    if not response.prepared:
        await response.prepare(request)
    await wire.send(request, response, data)


def _failed(writer, failure: BaseException) -> bytes:
    if isinstance(failure, BadRequest):
        return writer.failed(str(failure), failure.status, failure.code)
    if isinstance(failure, TimeoutError):
        return writer.failed("no result in time", 503, None)
    if not isinstance(failure, EngineError):
        logger.error("a request failed", exc_info=failure)
    return writer.failed(str(failure) or type(failure).__name__, 500, None)
