"""The server over real HTTP: what it answers is what the engine samples, streamed or not; mistakes get one line."""

import asyncio
import dataclasses
import json
import socket

import aiohttp
import jax
import numpy as np
import pytest
from aiohttp.test_utils import TestServer

from jaxagent import serve
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.models import hf, params
from jaxagent.models.spec import round_up
from tests.engine.test_lm import SPEC

pytestmark = pytest.mark.slow  # whole runs, or what takes as long to prepare

TEXT = "the quick brown fox jumps over the lazy dog and then <stop> searches for a café in Ghana "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model and a tokenizer, as a Hugging Face folder."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), Tokenizer.train([TEXT] * 20, 320, ["<stop>"])
    tokenizer.save(folder)
    size = tokenizer.vocab_size
    spec = dataclasses.replace(SPEC, vocab_size=size, padded_vocab_size=round_up(size, 64), embed_init_std=0.1)
    hf.save(folder, params.init(spec, jax.random.key(0)), spec, "float32", folder)
    return folder


@pytest.fixture(scope="module")
def service(folder):
    options = serve.arguments([f"--model={folder}", "--context=128", "--slots=4", "--stop=e", "--page_tokens=16"])
    driver, tokenizer, gauges = serve.open_engine(options)
    assert gauges == {}
    with driver:
        driver.start(120)
        yield serve.open_gateway(driver, tokenizer, 128, 30.0), driver, tokenizer


def talk(service, scene):
    """Runs scene(post, get) against the server on a port of its own."""

    async def run():
        server = TestServer(service[0].app())
        await server.start_server()
        async with aiohttp.ClientSession(server.make_url("/")) as client:
            try:
                return await scene(client)
            finally:
                await server.close()

    return asyncio.run(run())


async def post(client, **body):
    async with client.post("/v1/completions", json=body) as response:
        return response.status, await response.json()


def test_text_ids_and_choices(service):
    async def scene(client):
        status, one = await post(client, prompt="the quick", max_tokens=12, seed=3)
        assert status == 200
        choice = one["choices"][0]
        told = choice["logprobs"]
        assert len(choice["token_ids"]) == len(told["token_logprobs"]) and max(told["token_logprobs"]) < 0
        assert told["tokens"] == [service[2].decode([i]) for i in choice["token_ids"]]
        assert told["text_offset"][0] == 0 and told["top_logprobs"] is None
        assert choice["text"] == service[2].decode(choice["token_ids"])
        assert choice["finish_reason"] == ("length" if len(choice["token_ids"]) == 12 else "stop")
        same = await post(client, prompt=one["prompt_token_ids"], max_tokens=12, seed=3)
        assert same[1]["choices"][0]["token_ids"] == choice["token_ids"]
        assert same[1]["choices"][0]["logprobs"] == choice["logprobs"]
        _, many = await post(client, prompt="the quick", max_tokens=12, seed=3, n=6)
        assert many["choices"][0]["token_ids"] == choice["token_ids"]
        assert len({tuple(c["token_ids"]) for c in many["choices"]}) > 1
        _, cold = await post(client, prompt="the quick", max_tokens=40, temperature=0, seed=9)
        _, again = await post(client, prompt="the quick", max_tokens=40, temperature=0.0, top_k=5)
        assert cold["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
        return many

    many = talk(service, scene)
    stopped = [c for c in many["choices"] if c["finish_reason"] == "stop"]
    assert all(c["text"].count("e") == 1 or c["stop_string"] is None for c in stopped)


@pytest.mark.parametrize("ping_s", [10.0, 1e-4])
def test_streamed_pieces_are_the_answer(service, monkeypatch, ping_s):
    monkeypatch.setattr("jaxagent.gateway.talk.PING_S", ping_s)

    async def scene(client):
        _, whole = await post(client, prompt=TEXT[:20], max_tokens=30, seed=5, top_p=0.9)
        events = []
        body = dict(prompt=TEXT[:20], max_tokens=30, seed=5, top_p=0.9, stream=True)
        async with client.post("/v1/completions", json=body) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            async for line in response.content:
                if line.strip():
                    events.append(line.decode().removeprefix("data: ").strip())
        return whole["choices"][0], events

    whole, events = talk(service, scene)
    assert events[-1] == "[DONE]"
    pieces = [json.loads(e)["choices"][0] for e in events[:-1]]
    assert [x for p in pieces for x in p["token_ids"]] == whole["token_ids"]
    assert (not pieces[0]["token_ids"]) == (ping_s < 1)  # who waits for the first token hears so
    for field in ("tokens", "token_logprobs", "text_offset"):
        assert [x for p in pieces for x in p["logprobs"][field]] == whole["logprobs"][field]
    assert "".join(p["text"] for p in pieces) == whole["text"]
    assert [p["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + [whole["finish_reason"]]


def test_who_waits_is_bounded_and_told(folder):
    options = [f"--model={folder}", "--context=128", "--slots=1", "--tile_rows=1", "--max_waiting=1"]
    driver, tokenizer, _ = serve.open_engine(serve.arguments(options))

    async def scene(client):
        with driver._work:  # client and server share this thread: the engine's own takes nothing meanwhile
            status, answer = await post(client, prompt="the quick", max_tokens=20, n=3)
        told = answer["error"]
        assert (status, told["message"]) == (429, "The engine is busy: 2 turns are in hand already.")
        assert told["type"] == "rate_limit_error"
        status, two = await post(client, prompt="the quick", max_tokens=20, n=2, user="me")  # the rest was given up
        assert status == 200
        async with client.post("/v1/completions", json=dict(prompt="a", n=1, stream=True)) as response:
            events = [line.decode().removeprefix("data: ") async for line in response.content if line.strip()]
        assert response.status == 200
        with driver._work:
            blockers = [asyncio.create_task(post(client, prompt="the quick", max_tokens=9)) for _ in range(2)]
            while len(driver._queue) < 2:
                await asyncio.sleep(0.001)
            async with client.post("/v1/completions", json=dict(prompt="a", stream=True)) as response:
                assert response.status == 429 and response.headers["Retry-After"] == "1"
        assert [status for status, _ in await asyncio.gather(*blockers)] == [200, 200]
        return two["choices"], json.loads(events[-2])["choices"][0]

    with driver:
        driver.start(120)
        choices, streamed = talk((serve.open_gateway(driver, tokenizer, 128, 30.0),), scene)
    for statistics in (*choices, streamed):
        assert min(statistics["queue_s"], statistics["prefill_s"], statistics["decode_s"]) > 0
    assert choices[1]["cached_tokens"] > 0  # there is one slot: it found the first one's prompt


def test_a_dead_engine_is_not_healthy(folder):
    options = serve.arguments([f"--model={folder}", "--context=128", "--slots=4", "--tile_rows=4"])
    driver, tokenizer, _ = serve.open_engine(options)  # never started

    async def scene(client):
        async with client.get("/health") as response:
            return response.status, await response.json()

    status, answer = talk((serve.open_gateway(driver, tokenizer, 128, 30.0),), scene)
    assert status == 503 and "not started" in answer["error"]


def test_health_and_metrics(service):
    async def scene(client):
        await post(client, prompt="the", max_tokens=2)
        async with client.get("/health") as response:
            assert response.status == 200
        async with client.get("/metrics") as response:
            return await response.text()

    lines = dict(line.split() for line in talk(service, scene).splitlines())
    assert float(lines["jaxagent_engine_requests_total"]) >= 1
    assert np.isfinite([float(v) for v in lines.values()]).all()


def test_int8(folder, capsys):
    options = serve.arguments([f"--model={folder}", "--context=128", "--slots=4", "--tile_rows=4", "--int8"])
    driver, tokenizer, gauges = serve.open_engine(options)
    assert "int8: log-probs differ by 0." in capsys.readouterr().err

    async def scene(client):
        status, answer = await post(client, prompt="the quick", max_tokens=12, n=3)
        async with client.get("/metrics") as response:
            return status, answer["choices"], await response.text()

    with driver:
        driver.start(120)
        status, choices, metrics = talk((serve.open_gateway(driver, tokenizer, 128, 30.0, gauges=gauges),), scene)
    assert status == 200 and len(choices) == 3
    for choice in choices:
        assert len(choice["token_ids"]) == 12 and max(choice["logprobs"]["token_logprobs"]) < 0
        assert all(0 <= token < tokenizer.vocab_size for token in choice["token_ids"])
    lines = dict(line.split() for line in metrics.splitlines())
    mean, most = (float(lines[f"jaxagent_engine_int8_logprob_gap_{name}"]) for name in ("mean", "max"))
    assert 0 < mean < most < 0.3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model={tmp_path}/nothing", "--port=0"], "nothing' does not exist"),
        (["--model={tmp_path}", "--port=70000"], "--port: must be a whole number, at least 0 and at most 65,535"),
        (["--model={tmp_path}", "--slots=0"], "--slots: must be a whole number, at least 1, got '0'"),
        (["--model={tmp_path}", "--timeout_s=nan"], "--timeout_s: must be a number, more than 0"),
        (["--model={tmp_path}", "--stop="], "--stop: must not be empty"),
        (["--model={tmp_path}", "--stops=a"], "Unrecognized arguments: --stops=a"),
        ([], "--model"),
        (["--model={tmp_path}", "--host=192.0.2.1"], "Cannot listen on 192.0.2.1, port 8001: "),
        (["--model={tmp_path}", "--host=a..b"], "Cannot listen on a..b, port 8001: "),
    ],
)
def test_a_mistake_at_the_start_is_one_line(tmp_path, capsys, flags, message):
    assert serve.main([flag.format(tmp_path=tmp_path) for flag in flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_port_in_use_is_told_before_the_model_is_opened(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve, "open_engine", lambda options: pytest.fail("the slow part began"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main([f"--model={tmp_path}", f"--port={port}"]) == 2
    assert capsys.readouterr().err == f"error: Cannot listen on 127.0.0.1, port {port}: Address already in use.\n"
