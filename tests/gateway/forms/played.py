"""A small server that plays the forms: each request is answered by a given function, as deltas or whole."""

import asyncio
import contextlib

import numpy as np
from aiohttp import web

from jaxagent.gateway.chat import Answer, BadRequest, Call, Ident, Reasoning, Text
from jaxagent.gateway.forms import chat, completions, messages, responses

ROUTES = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}
IDENT = Ident("abc123", "toy", 1_700_000_000)


def answer(*deltas, finish=None, stop_string=None, cached=3):
    """The answer that the deltas make, of one token per delta."""
    calls = tuple(d for d in deltas if isinstance(d, Call))
    return Answer(
        text="".join(d.text for d in deltas if isinstance(d, Text)),
        reasoning="".join(d.text for d in deltas if isinstance(d, Reasoning)),
        calls=calls,
        finish=finish or ("tool_calls" if calls else "stop"),
        stop_string=stop_string,
        prompt_ids=(1, 2, 3, 4, 5),
        tokens=np.arange(7, 7 + len(deltas), dtype=np.int32),
        logprobs=-np.arange(1, 1 + len(deltas), dtype=np.float32),
        token_texts=tuple("t\ufffd" if i == 1 else f"t{i}" for i in range(len(deltas))),
        cached_tokens=cached,
    )


class Played:
    """`play`: Ask -> (deltas, arguments of `answer`). Keeps the requests in `asks`, and the errors in `refused`.

    stored: a stream has no deltas, as that of an answer that was there before. failing: it ends in the middle.
    """

    def __init__(self, play, stored=False, failing=False):
        self.play, self.stored, self.failing = play, stored, failing
        self.asks, self.refused, self.sent = [], [], []

    def app(self):
        app = web.Application(client_max_size=2**26)
        for path in ROUTES:
            app.router.add_post(path, self._answer)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._model)
        return app

    async def _answer(self, request):
        form = ROUTES[request.path]
        try:
            ask = form.parse(await request.read())
        except BadRequest as mistake:
            self.refused.append(str(mistake))
            told = form.error(str(mistake), mistake.status, mistake.param, mistake.code)
            return web.json_response(told, status=mistake.status)
        self.asks.append(ask)
        deltas, more = self.play(ask)
        whole = answer(*deltas, **more)
        if not ask.stream:
            return web.json_response(form.body(ask, whole, ident=IDENT))
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        events = form.writer(ask, IDENT)
        pieces = [events.begin(len(whole.prompt_ids), whole.cached_tokens), events.ping()]
        for delta in () if self.stored else deltas:
            pieces += [events.delta(delta), events.ping()]
        pieces += [events.failed("it broke", 500, None) if self.failing else events.end(whole)]
        for piece in pieces:
            await reply.write(piece)
        self.sent.append(b"".join(pieces))
        return reply

    async def _count(self, request):
        ask = messages.parse(await request.read())
        return web.json_response(messages.count(len(ask.messages)))

    async def _models(self, request):
        return web.json_response(_vendor(request).models("toy", IDENT.created))

    async def _model(self, request):
        return web.json_response(_vendor(request).model(request.match_info["name"], IDENT.created))


def _vendor(request):
    return messages if "anthropic-version" in request.headers else completions


@contextlib.asynccontextmanager
async def listening(played):
    """Its URL, for as long as the block lasts."""
    runner = web.AppRunner(played.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


def run(scene, limit_s=60):
    """Runs a coroutine, which must end within the limit."""
    return asyncio.run(asyncio.wait_for(scene, limit_s))
