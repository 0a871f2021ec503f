"""The service in front of a toy engine: OpenAI's form, every mistake a 4xx, clients that leave, connections that idle.

The engine is real and its model one of 26 letters, so that hundreds of requests take seconds.
"""

import asyncio
import contextlib
import json
import socket
import threading

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from jaxagent.engine import scheduler, scoring
from jaxagent.gateway import service as completions_service
from jaxagent.gateway.forms import completions
from jaxagent.gateway.server import Gateway
from jaxagent.gateway.service import Completions
from jaxagent.io import connections
from tests.engine import toys

WAIT_S = 30.0


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def strict(data):
    return json.loads(data, parse_constant=refuse)


@pytest.fixture(scope="module")
def engine():
    with toys.running(truncation=True) as driver:
        yield driver


def scores(params, request, given_up):
    return [{"logprobs": [-1.0] * len(at)} for at in request.positions]


@contextlib.asynccontextmanager
async def serving(driver, **limits):
    """The address of the service, as `serve` runs it."""
    service = Completions(driver, toys.Letters(), toys.CONTEXT, 4 * WAIT_S, scores, name="toy")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        async with connections.serving(Gateway("toy", strict_name=True, also=service).app(), sock, **limits):
            yield f"http://127.0.0.1:{port}"


def talk(driver, scene, **limits):
    """Runs scene(client) against the service on a port of its own."""

    async def run():
        async with serving(driver, **limits) as url, aiohttp.ClientSession(url) as client:
            return await asyncio.wait_for(scene(client), 120)

    return asyncio.run(run())


async def ask(client, path="/v1/completions", data=None, headers=None, **body):
    payload = json.dumps(body) if data is None else data
    headers = {"Content-Type": "application/json"} | (headers or {})
    async with client.post(path, data=payload, headers=headers) as response:
        return response.status, strict(await response.read())


def test_an_answer_has_openais_form(engine):
    async def scene(client):
        status, one = await ask(client, prompt="abc", max_tokens=5, n=2, seed=1, model="toy")
        assert status == 200 and one["id"].startswith("cmpl-") and one["object"] == "text_completion"
        assert (one["model"], type(one["created"])) == ("toy", int)
        used = one["usage"]
        assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (3, 10, 13)
        assert used["prompt_tokens_details"]["cached_tokens"] >= 0
        _, many = await ask(client, prompt=["abc", "xyzxyz"], max_tokens=5, n=2, seed=1)
        assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3] and many["usage"]["prompt_tokens"] == 9
        assert [c["token_ids"] for c in many["choices"][:2]] == [c["token_ids"] for c in one["choices"]]
        _, ids = await ask(client, prompt=[[0, 1, 2]], max_tokens=5, seed=1)
        assert ids["choices"][0]["text"] == one["choices"][0]["text"] and ids["prompt_token_ids"] == [0, 1, 2]
        _, blank = await ask(client, prompt="abc", max_tokens=5, seed=1, **dict.fromkeys(completions.OFF), stop=None)
        off = dict(presence_penalty=0, frequency_penalty=0.0, echo=False, best_of=1, logit_bias={}, suffix="")
        _, asked = await ask(client, prompt="abc", max_tokens=5, seed=1, logprobs=1, temperature=None, **off)
        for other in (blank, asked):
            assert other["choices"][0]["token_ids"] == one["choices"][0]["token_ids"]
        async with client.get("/v1/models") as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["toy"]
        async with client.get("/v1/models/toy") as good, client.get("/v1/models/gpt-4") as bad:
            assert (good.status, bad.status) == (200, 404)

    talk(engine, scene)


@pytest.mark.parametrize("ping_s", [10.0, 1e-4])
def test_a_stop_string_cuts_the_choice_and_ends_it(engine, monkeypatch, ping_s):
    monkeypatch.setattr("jaxagent.gateway.talk.PING_S", ping_s)

    async def scene(client):
        _, whole = await ask(client, prompt="abc", max_tokens=30, seed=1, temperature=2)
        text = whole["choices"][0]["text"]
        stop = text[7:9]
        end = text.index(stop)
        for stream in (False, True):
            body = dict(prompt="abc", max_tokens=30, seed=1, temperature=2, stop=["QQ", stop], stream=stream)
            if stream:
                body["stream_options"] = {"include_usage": True}
                async with client.post("/v1/completions", json=body) as response:
                    lines = [line.decode().removeprefix("data: ") async for line in response.content if line.strip()]
                assert lines.pop().strip() == "[DONE]"
                events = [strict(line) for line in lines]
                used = events.pop()
                assert used["choices"] == [] and all(e["usage"] is None for e in events)
                pieces, used = [e["choices"][0] for e in events], used["usage"]
                choice = completions.merged(pieces)
                assert (not pieces[0]["token_ids"]) == (ping_s < 1)  # who waits for the first token hears so
                assert {piece["finish_reason"] for piece in pieces[:-1]} == {None}
            else:
                _, answer = await ask(client, **body)
                choice, used = answer["choices"][0], answer["usage"]
            assert (choice["text"], choice["finish_reason"], choice["stop_string"]) == (text[:end], "stop", stop)
            assert choice["token_ids"] == whole["choices"][0]["token_ids"][: end + 2]
            told, all_of_it = choice["logprobs"], whole["choices"][0]["logprobs"]
            assert used["completion_tokens"] == end + 2 == len(told["token_logprobs"])
            assert all(told[name] == all_of_it[name][: end + 2] for name in ("tokens", "token_logprobs", "text_offset"))
            assert choice["decode_s"] is None and used["prompt_tokens_details"]["cached_tokens"] is None
        return text

    assert len(talk(engine, scene)) == 30


@pytest.mark.parametrize(
    ("body", "status", "message", "param"),
    [
        ({"max_tokens": 3}, 400, "'prompt' is missing", "prompt"),
        ({"prompt": ""}, 400, "not empty", "prompt"),
        ({"prompt": [1, 99999]}, 400, "token ids below 26", "prompt"),
        ({"prompt": ["a", [1]]}, 400, "all be text", "prompt"),
        ({"prompt": "a" * 40}, 400, "40 tokens or more, the context is 40", "prompt"),
        ({"prompt": [1] * 40}, 400, "40 tokens, the context is 40", "prompt"),
        ({"prompt": ["a"] * 129}, 400, "129 prompts", "prompt"),
        ({"prompt": "a", "max_token": 3}, 400, "unknown field 'max_token'", "max_token"),
        ({"prompt": "a", "max_tokens": "3"}, 400, "'max_tokens' must be int", "max_tokens"),
        ({"prompt": "a", "top_p": 1.5}, 400, "'top_p' must be from 0 to 1", "top_p"),
        ({"prompt": "a", "top_k": 2**31}, 400, "'top_k' must be from 0 to 26", "top_k"),
        ({"prompt": "a", "min_p": -0.5}, 400, "'min_p' must be from 0 to 1", "min_p"),
        ({"prompt": "a", "temperature": -1}, 400, "from 0 to 1000", "temperature"),
        ({"prompt": "a", "temperature": 10**400}, 400, "from 0 to 1000", "temperature"),
        ({"prompt": "a", "seed": 2**64}, 400, "64 bits", "seed"),
        ({"prompt": "a", "n": 129}, 400, "'n' must be from 1 to 128", "n"),
        ({"prompt": "a", "stop": ""}, 400, "1 to 256 bytes", "stop"),
        ({"prompt": "a", "stop": ["a"] * 129}, 400, "128 at most", "stop"),
        ({"prompt": "a", "echo": True}, 400, "'echo': this is not supported", "echo"),
        ({"prompt": "a", "presence_penalty": 0.5}, 400, "'presence_penalty': this is not", "presence_penalty"),
        ({"prompt": "a", "best_of": 3}, 400, "'best_of': this is not supported", "best_of"),
        ({"prompt": "a", "logprobs": 5}, 400, "'logprobs' must be 0 or 1", "logprobs"),
        ({"prompt": "a", "stream_options": {"x": 1}}, 400, "unknown field", "stream_options.x"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "'gpt-4' does not exist; this server has 'toy'", "model"),
    ],
)
def test_a_clients_mistake_is_told_in_openais_form(engine, body, status, message, param):
    got, answer = talk(engine, lambda client: ask(client, **body))
    assert got == status and set(answer["error"]) == {"message", "type", "param", "code"}
    assert message in answer["error"]["message"] and answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"


VALUES = (None, True, False, -1, 0, 1, 3, 2**31, -(2**63), 2**64, 10**400, 1.5, 1e308, 1e-46, "", "abc", "\ud800", "\0")
VALUES += ([], [[]], [None], [1], [-1], [1.5], [2**70], ["a"], ["\ud800"], [["a"]], [[1], "a"], {}, {"a": 1}, [[[1]]])
RAW = (
    b"",
    b"{",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"null",
    b"[]",
    b'"a"',
    b"NaN",
    b"\xff\xfe",
    b"\x00",
    b'{"prompt":NaN}',
)
RAW += (b'{"prompt":"a","temperature":1e999}', b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", b'{"prompt":"\\ud800"}')
HEADERS = (
    {"Content-Type": "application/json; charset=bogus"},
    {"Content-Type": "text/plain; charset=utf-16"},
    {"Content-Type": "nonsense"},
    {"Content-Encoding": "gzip"},
    {"Content-Encoding": "deflate"},
    {"Content-Encoding": "bogus"},
)


FIELDS = ("prompt", "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stream")
FIELDS += ("stream_options", "logprobs", "user")


def hostile():
    """(path, payload, headers) of some hundreds of requests."""
    good = {
        "/v1/completions": {"prompt": "abc", "max_tokens": 2},
        "/v1/score": {"sequences": [[1, 2, 3]], "positions": [[1, 2]], "candidates": [[[1], [2]]]},
    }
    fields = {
        "/v1/completions": (*FIELDS, *completions.OFF, "best_of", "x"),
        "/v1/score": (*scoring.FIELDS, "x"),
    }
    for path, body in good.items():
        for field in fields[path]:
            for value in VALUES:
                yield path, json.dumps(body | {field: value}).encode(), {}
        for raw in RAW:
            yield path, raw, {}
        for headers in HEADERS:
            yield path, json.dumps(body).encode(), headers
    for temperature in ("1e-6", "1e-7", "1e-9", "1e-38", "1e-46", "0"):
        for rest in ("", ',"top_p":0.5', ',"stream":true'):
            yield "/v1/completions", b'{"prompt":"abc","temperature":%s%s}' % (temperature.encode(), rest.encode()), {}


def test_whatever_a_client_sends_is_its_mistake_or_an_answer(engine):
    requests = list(hostile())

    async def scene(client):
        gate, statuses = asyncio.Semaphore(16), []

        async def one(path, payload, headers):
            async with gate, client.post(path, data=payload, headers=headers) as response:
                text = await response.text()
                said = (path, payload[:200], headers, response.status, text[:300])
                assert response.status in (200, 400, 404, 415), said
                if response.content_type == "text/event-stream":
                    assert text.endswith("data: [DONE]\n\n") and '"error"' not in text, said
                else:
                    answer = strict(text)
                    assert (response.status == 200) == ("error" not in answer), said
                    assert response.status == 200 or set(answer["error"]) == {"message", "type", "param", "code"}, said
                statuses.append(response.status)

        await asyncio.gather(*(one(*request) for request in requests))
        return statuses

    statuses = talk(engine, scene)
    assert len(statuses) > 700 and statuses.count(200) > 100 and statuses.count(400) > 400


def test_other_routes_methods_and_sizes_are_told_in_the_same_form(engine):
    async def scene(client):
        async with client.get("/v1/chat") as a, client.get("/v1/completions") as b:
            told = [strict(await x.read())["error"]["message"] for x in (a, b)]
            assert (a.status, b.status, b.headers["Allow"]) == (404, 405, "POST"), told
        status, answer = await ask(client, data=b" " * (17 * 2**20))
        assert status == 413 and "16777216 bytes" in answer["error"]["message"]

    talk(engine, scene)


def test_numbers_that_are_not_finite_are_an_error_and_no_answer():
    poisoned = toys.weights()
    poisoned[:] = np.nan
    with toys.running(params=poisoned) as driver:
        status, answer = talk(driver, lambda client: ask(client, prompt="abc", max_tokens=2))
    assert status == 500 and "not finite" in answer["error"]["message"]


def test_a_dead_engine_is_not_healthy_and_who_would_wait_for_scores_is_told(monkeypatch):
    async def scene(client):
        async with client.get("/health") as response:
            return response.status

    with toys.running() as driver:
        assert talk(driver, scene) == 200
        monkeypatch.setattr(completions_service, "MAX_SCORING", 0)
        body = {"sequences": [[1, 2, 3]], "positions": [[1, 2]]}
        status, answer = talk(driver, lambda client: ask(client, "/v1/score", **body))
        assert status == 429 and "are being scored already" in answer["error"]["message"]
    assert talk(driver, scene) == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_gone_gives_up_its_slot(monkeypatch, stream):
    dispatches, dispatch = threading.Semaphore(1000), scheduler.Scheduler.dispatch  # open while the engine warms up

    def gated(self, version):
        assert dispatches.acquire(timeout=60)
        return dispatch(self, version)

    monkeypatch.setattr(scheduler.Scheduler, "dispatch", gated)

    def in_hand():
        return [*driver._queue, *driver._held_requests]

    async def scene(client):
        while dispatches.acquire(blocking=False):  # from now on the engine does nothing unless it is told to
            pass
        try:
            leaving = asyncio.create_task(ask(client, prompt="abc", max_tokens=30, n=3, stream=stream))
            await until(lambda: len(in_hand()) == 3)
            dispatches.release(2)  # of ten that the choices need
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await until(lambda: all(request.session.closed for request in in_hand()))
        finally:
            dispatches.release(10_000)
        await until(lambda: not in_hand())
        assert driver.stats().get("sampled_tokens", 0.0) < 45  # none, where all had gone before the first dispatch
        assert (await ask(client, prompt="abc", max_tokens=3))[0] == 200

    with toys.running(stops=("no such",)) as driver:
        talk(driver, scene)


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_who_does_not_read_the_answer_is_cut_off():
    """Closing would not do: a socket is kept until what was written to it is read."""
    answered = []

    async def large(request):
        answered.append(request.transport.get_extra_info("socket"))
        return web.Response(body=bytes(64 << 20))

    async def run():
        app = web.Application()
        app.router.add_get("/", large)
        with socket.create_server(("127.0.0.1", 0)) as sock, socket.socket() as client:
            async with connections.serving(app, sock, idle_s=0.3):
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(client, sock.getsockname())
                await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await until(lambda: answered and answered[0].fileno() == -1)

    asyncio.run(run())


def test_its_threads_end_with_it(engine):
    def readers():
        return {thread for thread in threading.enumerate() if thread.name.startswith("reader")}

    before, during = readers(), []

    async def scene(client):
        assert (await ask(client, prompt="abc", max_tokens=1))[0] == 200
        during.extend(readers() - before)

    talk(engine, scene)
    assert during
    for thread in during:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_openais_own_client(engine):
    openai = pytest.importorskip("openai")

    def play(url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["toy"]
            asked = dict(model="toy", prompt="abc", max_tokens=12, seed=3, temperature=2)
            whole = client.completions.create(**asked, n=2, logprobs=1)
            choice, used = whole.choices[0], whole.usage
            assert used.total_tokens == 3 + 2 * 12 and used.prompt_tokens_details.cached_tokens is not None
            assert len(choice.text) == 12 == len(choice.logprobs.token_logprobs) and choice.finish_reason == "length"
            assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.text_offset == list(range(12))
            again = client.completions.create(**asked, stop=[choice.text[5:8]]).choices[0]
            end = choice.text.index(choice.text[5:8])
            assert (again.text, again.finish_reason) == (choice.text[:end], "stop")
            options = {"include_usage": True}
            events = list(client.completions.create(**asked, stream=True, stream_options=options))
            assert "".join(c.text for event in events for c in event.choices) == choice.text
            assert events[-1].usage.completion_tokens == 12
            likeliest = [{"extra_body": {"top_k": 1}}, {"temperature": 0}]
            first, other = (client.completions.create(**asked | more).choices[0].token_ids for more in likeliest)
            assert first == other
            with pytest.raises(openai.BadRequestError, match="'temperature' must be from 0 to 1000") as refused:
                client.completions.create(**asked | {"temperature": -1})
            assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
            with pytest.raises(openai.NotFoundError, match="the model 'gpt-4' does not exist"):
                client.completions.create(**asked | {"model": "gpt-4"})

    talk(engine, lambda client: asyncio.to_thread(play, str(client._base_url).rstrip("/")))
