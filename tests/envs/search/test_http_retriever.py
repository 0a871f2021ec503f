"""Our client against our server over loopback, and against servers that misbehave in every way we know."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from aiohttp import ClientSession, web

from jaxagent.config import ConfigError
from jaxagent.config.parse import build
from jaxagent.envs.search.retriever import http, server
from jaxagent.envs.search.retriever.backends import RETRIEVERS
from jaxagent.envs.search.retriever.base import Passage, RetrieverError
from jaxagent.envs.search.retriever.bm25 import Bm25

PASSAGES = [Passage("7", '"Ghana"', "The capital is Accra.\nIt is big."), Passage("8", "Togo", "The capital is Lomé.")]


@contextlib.asynccontextmanager
async def serving(app):
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/retrieve"
    finally:
        await runner.cleanup()


def scripted(*answers):
    """An app that gives these answers in turn (text, status), the last one for ever; "hang" never answers."""
    app, calls = web.Application(), []

    async def retrieve(request):
        calls.append(await request.json())
        answer = answers[min(len(calls), len(answers)) - 1]
        if answer == "hang":
            await asyncio.sleep(0.5)
        text, status = answer
        return web.Response(text=text, status=status)

    app.add_routes([web.post("/retrieve", retrieve)])
    return app, calls


async def ask(url, timeout_s=2.0, retries=0, queries=("capital of Ghana",), topk=2):
    client = http.HttpRetriever(url, timeout_s, retries)
    try:
        return await client.search(queries, topk)
    finally:
        await client.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("jaxagent.io.http.FIRST_PAUSE_S", 0.01)


GOOD = (json.dumps({"result": [[{"document": {"id": 1, "contents": "T\nx"}, "score": 0.5}]]}), 200)


def test_client_and_server_equal_the_retriever_behind_them():
    async def check():
        index = Bm25(PASSAGES)
        async with serving(server.make_app(index, 5.0)) as url:
            queries = ["capital of Ghana", "Lomé", "nothing here?", ""]
            assert await ask(url, queries=queries) == await index.search(queries, 2)

    asyncio.run(check())


def test_the_published_wire_format():
    async def check():
        async with serving(server.make_app(Bm25(PASSAGES), 5.0)) as url, ClientSession() as session:
            body = {"queries": ["Accra"], "topk": 1, "return_scores": True}
            async with session.post(url, json=body) as response:
                (((item,),),) = (await response.json()).values()
            assert item["document"] == {"id": "7", "contents": '"Ghana"\nThe capital is Accra.\nIt is big.'}
            assert item["score"] > 0
            async with session.post(url, json={"queries": ["Accra"], "topk": 1}) as response:
                assert (await response.json())["result"] == [[item["document"]]]
            async with session.get(url.replace("/retrieve", "/health")) as response:
                assert response.status == 200

    asyncio.run(check())


@pytest.mark.parametrize(
    "body", ["{", "[]", "{}", '{"queries": "x"}', '{"queries": [1]}', '{"queries": ["x"], "topk": 0}']
)
def test_the_server_refuses_malformed_requests(body):
    async def check():
        async with (
            serving(server.make_app(Bm25(PASSAGES), 5.0)) as url,
            ClientSession() as session,
            session.post(url, data=body) as response,
        ):
            assert response.status == 400 and "error" in await response.json()

    asyncio.run(check())


def test_the_server_reports_failing_and_slow_searches():
    class Failing:
        async def search(self, queries, topk):
            if queries == ["slow"]:
                await asyncio.sleep(0.5)
            raise RetrieverError("index is gone")

    async def check():
        async with serving(server.make_app(Failing(), 0.05)) as url:
            with pytest.raises(RetrieverError, match=r"500.*index is gone"):
                await ask(url)
            with pytest.raises(RetrieverError, match="503"):
                await ask(url, queries=["slow"])

    asyncio.run(check())


def test_transient_failures_are_tried_again():
    async def check():
        app, calls = scripted(("busy", 503), GOOD)
        async with serving(app) as url:
            assert await ask(url, retries=1) == [[Passage("1", "T", "x", 0.5)]]
        assert calls == [{"queries": ["capital of Ghana"], "topk": 2, "return_scores": True}] * 2

    asyncio.run(check())


@pytest.mark.parametrize(
    ("bad", "error", "attempts"),
    [
        (("oops", 500), "answered 500: oops", 3),
        (("no such page", 404), "answered 404", 1),
        (("{", 200), "malformed", 1),
        (("[]", 200), "malformed", 1),
        (('{"result": null}', 200), "malformed", 1),
        (('{"result": [["x"]]}', 200), "malformed", 1),
        (('{"result": [[{"id": 1}]]}', 200), "malformed", 1),
        (('{"result": [[{"id": 1, "contents": 2}]]}', 200), "malformed", 1),
        (('{"result": []}', 200), "0 results for 1 queries", 1),
    ],
)
def test_lasting_failures_are_errors_and_never_empty_results(bad, error, attempts):
    async def check():
        app, calls = scripted(bad)
        async with serving(app) as url:
            with pytest.raises(RetrieverError, match=error):
                await ask(url, retries=2)
        assert len(calls) == attempts

    asyncio.run(check())


def test_a_silent_server_is_a_timeout():
    async def check():
        app, calls = scripted("hang")
        async with serving(app) as url:
            with pytest.raises(TimeoutError, match="did not answer"):
                await ask(url, timeout_s=0.05, retries=1)
        assert len(calls) == 2

    asyncio.run(check())


def config(**changes):
    return build(RETRIEVERS[changes.pop("name", "bm25")], changes, "config.env.retriever")


def test_opening_the_configured_back_end(tmp_path):
    own, corpus = tmp_path / "own.jsonl", tmp_path / "corpus.jsonl"
    own.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in PASSAGES))
    corpus.write_text('{"id": 1, "contents": "a\\nb"}\n')
    assert isinstance(opened := config().open(own), Bm25) and len(opened) == len(PASSAGES)
    assert len(config(corpus=str(corpus)).open(own)) == 1
    assert isinstance(config(name="http", url="http://x/retrieve").open(None), http.HttpRetriever)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "nothing to search"),
        ({"corpus": "nowhere.jsonl"}, "no file 'nowhere.jsonl'"),
        ({"name": "http", "url": "localhost:8000"}, "env.retriever.url"),
        ({"name": "dense"}, "env.retriever.index"),
    ],
)
def test_incomplete_configs(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes).open(None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--corpus=nowhere.jsonl", "--port=0"], "no file 'nowhere.jsonl'"),
        ([], "The following arguments are required: --corpus."),
        (["--corpus=x", "--port=x"], "--port: must be a whole number, at least 0 and at most 65,535, got 'x'"),
    ],
)
def test_a_mistake_at_the_servers_command_line_is_one_line(capsys, flags, message):
    assert server.main(flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_port_in_use_is_told_before_the_corpus_is_read(monkeypatch, capsys):
    monkeypatch.setattr(server, "open_local", lambda corpus, index: pytest.fail("the slow part began"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert server.main(["--corpus=corpus.jsonl", f"--port={port}"]) == 2
    assert capsys.readouterr().err == f"error: Cannot listen on 127.0.0.1, port {port}: Address already in use.\n"


def test_the_server_answers_at_the_port_it_took(tmp_path):
    """As a process of its own, to its end by Ctrl-C."""
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "Ghana\\nAccra."}\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxagent.envs.search.retriever.server", f"--corpus={tmp_path / 'corpus.jsonl'}"]
    process = subprocess.Popen([*command, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
                    assert answer.status == 200
                break
            except OSError:
                assert process.poll() is None, process.stderr.read().decode()
                time.sleep(0.1)
        else:
            pytest.fail("the server never answered")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate(timeout=60)
