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


def talk(gateway, scene):
    """Runs scene(client) against the server on a port of its own."""

    async def run():
        server = TestServer(gateway.app())
        await server.start_server()
        async with aiohttp.ClientSession(server.make_url("/")) as client:
            try:
                return await scene(client)
            finally:
                await server.close()

    return asyncio.run(run())


async def get(client, path):
    async with client.get(path) as response:
        return response.status, await response.text()


async def post(client, **body):
    async with client.post("/v1/completions", json=body) as response:
        return response.status, await response.json()


def numbers(metrics):
    """By name, without what all have in common."""
    return {name.removeprefix("jaxagent_engine_"): float(value) for name, value in map(str.split, metrics.splitlines())}


def test_who_waits_is_bounded_and_told_and_a_dead_engine_is_not_healthy(folder):
    options = [f"--model={folder}", "--context=128", "--slots=1", "--tile_rows=1", "--max_waiting=1"]
    driver, tokenizer, gauges = serve.open_engine(serve.arguments(options))
    gateway = serve.open_gateway(driver, tokenizer, 128, 30.0)
    status, told = talk(gateway, lambda client: get(client, "/health"))  # it was never started
    assert (status, gauges) == (503, {}) and "not started" in told

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
        assert (await get(client, "/health"))[0] == 200
        metrics = numbers((await get(client, "/metrics"))[1])
        assert metrics["requests_total"] >= 5 and np.isfinite(list(metrics.values())).all()
        return two["choices"], json.loads(events[-2])["choices"][0]

    with driver:
        driver.start(120)
        choices, streamed = talk(gateway, scene)
    for statistics in (*choices, streamed):
        assert min(statistics["queue_s"], statistics["prefill_s"], statistics["decode_s"]) > 0
    assert choices[1]["cached_tokens"] > 0  # there is one slot: it found the first one's prompt


def test_int8(folder, capsys):
    options = serve.arguments([f"--model={folder}", "--context=128", "--slots=4", "--tile_rows=4", "--int8"])
    driver, tokenizer, gauges = serve.open_engine(options)
    assert "int8: log-probs differ by 0." in capsys.readouterr().err

    async def scene(client):
        status, answer = await post(client, prompt="the quick", max_tokens=12, n=3)
        return status, answer["choices"], numbers((await get(client, "/metrics"))[1])

    with driver:
        driver.start(120)
        status, choices, metrics = talk(serve.open_gateway(driver, tokenizer, 128, 30.0, gauges=gauges), scene)
    assert status == 200 and len(choices) == 3
    for choice in choices:
        assert len(choice["token_ids"]) == 12 and max(choice["logprobs"]["token_logprobs"]) < 0
        assert all(0 <= token < tokenizer.vocab_size for token in choice["token_ids"])
    mean, most = (metrics[f"int8_logprob_gap_{name}"] for name in ("mean", "max"))
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
