"""A teacher over real HTTP: the server's scores are the local teacher's; deadlines, retries and mistakes."""

import asyncio
import contextlib
import json
import threading

import numpy as np
import pytest
from aiohttp import web

from jaxagent import serve
from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine import scoring
from jaxagent.engine.scoring import scorer
from jaxagent.learner import teacher
from jaxagent.learner.teacher_http import HttpTeacher, TeacherError
from jaxagent.models import hf, params, sharding
from jaxagent.types import TokenKind, Trajectory
from tests.models import tiny

K, C, TEMPERATURE = 3, 2, 0.8


@contextlib.contextmanager
def serving(app):
    """The address of `app`, served by a thread of its own."""
    loop, started, address = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        started.set()
        return runner

    def run():
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


@pytest.fixture(scope="module")
def server(teacher_folder):
    """The real server; its engine is not started, since scoring needs nothing of it but the weights."""
    options = serve.arguments([f"--model={teacher_folder}", "--context=64", "--slots=4", "--page_tokens=16"])
    driver, tokenizer, _ = serve.open_engine(options)
    service = serve.open_gateway(driver, tokenizer, 64, 600.0, scorer(driver.model.spec, driver.mesh))
    with serving(service.app()) as address:
        yield address


def trajectories(lengths=(9, 14, 5, 11)):
    rng = np.random.default_rng(0)
    out = []
    for n in lengths:
        kinds = np.full(n, TokenKind.OBSERVATION, np.uint8)
        kinds[[2, n - 2]] = TokenKind.ACTION
        blank = np.zeros(n, np.int32)
        out.append(Trajectory(rng.integers(0, 250, n).astype(np.int32), kinds, blank.astype(np.float32), blank, blank))
    return out


def test_the_servers_scores_are_the_local_teachers(server, teacher_folder, make_mesh, make_packer):
    asked = trajectories()
    rng = np.random.default_rng(1)
    candidates = [rng.integers(0, 250, (len(t), C)).astype(np.int32) for t in asked]
    remote = HttpTeacher(server + "/", timeout_s=600.0, retries=0, request_tokens=24)
    remote.check(Tokenizer.load(teacher_folder), 64)
    with pytest.raises(ConfigError, match=r"takes 64 tokens, env.context_tokens is 65: start it with --context=65"):
        remote.check(Tokenizer.load(teacher_folder), 65)
    assert list(remote._parts(asked)) == [[0, 1], [2, 3]]  # 23 tokens, then 5 + 11
    got = remote.score(asked, candidates, K, TEMPERATURE)
    spec, mesh = hf.read_spec(teacher_folder, tiny.model_config(vocab_multiple=64)), make_mesh()
    weights = hf.load(teacher_folder, spec, params.shardings(spec, mesh, sharding.TRAIN))
    local = teacher.top_scorer(spec, make_packer(longest_targets=20), mesh, K, C)
    for *mine, theirs in zip(*local(weights, asked, TEMPERATURE, candidates), got, strict=True):
        for name, a, b in zip(theirs._fields, mine, theirs, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, atol=2e-6, err_msg=name)
        assert np.flatnonzero(theirs.logprobs).tolist() == [2, len(theirs.logprobs) - 2]


def test_a_server_with_other_tokens_is_refused(server, teacher_folder):
    other = Tokenizer.train(["zebra zebra zebra"] * 3, 300, ["<stop>"])
    with pytest.raises(ConfigError, match="has another tokenizer"):
        HttpTeacher(server, 60.0, 0, 100).check(other, 64)
    with pytest.raises(ConfigError, match="is not reached"):
        HttpTeacher("http://127.0.0.1:9", 5.0, 0, 100).check(other, 64)


def test_a_mistake_is_not_tried_again(server):
    with pytest.raises(TeacherError, match=r"answered 400: .*1 to 64"):
        HttpTeacher(server, 60.0, 3, 100).score(trajectories((80,)), None, K, TEMPERATURE)


def scripted(*answers):
    """An app that gives these (status, seconds to wait) answers in turn, then good ones; and the list of requests."""
    seen = []

    async def score(request):
        body = await request.json()
        seen.append(body)
        status, pause_s = answers[len(seen) - 1] if len(seen) <= len(answers) else (200, 0)
        await asyncio.sleep(pause_s)
        n = len(body["positions"][0])
        one = dict(logprobs=[-1.0] * n, top_ids=[[7]] * n, top_logprobs=[[-0.5]] * n, candidate_logprobs=[[]] * n)
        return web.json_response({"scores": [one] * len(body["sequences"])}, status=status)

    app = web.Application()
    app.add_routes([web.post("/v1/score", score)])
    return app, seen


def test_what_may_pass_is_tried_again_and_a_deadline_holds():
    app, seen = scripted((503, 0))
    with serving(app) as address:
        (scores,) = HttpTeacher(address, 30.0, 1, 100).score(trajectories((9,)), None, 1, 1.0)
    assert len(seen) == 2 and scores.logprobs[2] == -1.0 and scores.top_ids[7, 0] == 7
    app, _ = scripted((200, 1))
    with serving(app) as address, pytest.raises(TeacherError, match=r"did not answer in 0.2 s"):
        HttpTeacher(address, 0.2, 0, 100).score(trajectories((9,)), None, 1, 1.0)


def test_a_malformed_answer_is_told():
    app, _ = scripted()
    with serving(app) as address, pytest.raises(TeacherError, match="malformed"):
        HttpTeacher(address, 5.0, 0, 100).score(trajectories((9,)), None, 4, 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequences": None}, "'sequences' must be a list"),
        ({"sequences": [[]]}, "0 tokens"),
        ({"sequences": [[1, 99]]}, "from 0 to 49"),
        ({"sequences": [[1] * 20]}, "1 to 16"),
        ({"positions": [[0]]}, "positions must grow, from 1"),
        ({"positions": [[3]]}, "positions must grow, from 1"),
        ({"positions": [[2, 1]]}, "positions must grow"),
        ({"positions": []}, "of the same length"),
        ({"top_k": 0}, "'top_k'"),
        ({"temperature": 0}, "'temperature' must be from 1e-06 to 1000"),
        ({"candidates": [[[1]]]}, "for every position"),
        ({"candidates": [[[1], [1, 2]]]}, "lists of numbers"),
        ({"candidate": 1}, "unknown field 'candidate'"),
    ],
)
def test_a_clients_mistake_is_told(changes, message):
    body = {"sequences": [[1, 2, 3]], "positions": [[1, 2]], "candidates": [[[1], [2]]]}
    assert scoring.parse(json.dumps(body), vocab=50, context=16).candidates[0].tolist() == [[1], [2]]
    with pytest.raises(ValueError, match=message):
        scoring.parse(json.dumps(body | changes), vocab=50, context=16)
