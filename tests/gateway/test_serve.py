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
