"""The server over real HTTP: who may ask, whole and streamed answers in every dialect, clients that go away."""

import asyncio
import datetime
import json

import aiohttp
import pytest
from aiohttp import web

from jaxagent.data import codec
from jaxagent.engine.requests import EngineError
from jaxagent.gateway import session as sessions
from jaxagent.gateway import talk
from jaxagent.gateway.chat import BadRequest
from jaxagent.gateway.renderer import Renderer
from tests.gateway import chat_templates, world
from tests.gateway.scripted import Scripted
from tests.gateway.world import post

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ADMIN = {"Authorization": "Bearer admin-secret"}


def scripted(reply=lambda context, turn: f"turn {turn} saw {len(context)}", **more):
    return Scripted(world.tokenizer(), reply, **more)


def hello(text="hello"):
    return [{"role": "user", "content": text}]


async def events(client, token, path, headers=None, **body):
    """(status, the stream's data)."""
    headers = {"Authorization": f"Bearer {token}"} | (headers or {})
    async with client.post(path, json=body | {"stream": True}, headers=headers) as response:
        lines = [line.decode().strip() async for line in response.content]
    lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: ") and "[DONE]" not in line]
    return response.status, [json.loads(line) for line in lines]


def test_who_has_no_token_gets_401_in_the_dialects_form_and_nothing_else():
    policy = scripted()

    async def scene():
        async with world.serving(world.session(policy)) as (gateway, (token,), client):
            assert len(token) >= 40
            for wrong in ("", "x", token[:-1], token + "x", token.swapcase()):
                for path in (CHAT, RESPONSES, MESSAGES, MESSAGES + "/count_tokens"):
                    status, told = await post(client, wrong, path, messages=hello(), input="a", max_tokens=3)
                    assert status == 401 and told["error"]["message"] == "no session has this token"
                    assert (told.get("type") == "error") == (path.startswith(MESSAGES))
            for header in ("x-api-key", "X-Session-Id", "Authorization"):
                value = f"bearer {token}" if header == "Authorization" else token
                async with client.post(CHAT, json={"messages": hello(header)}, headers={header: value}) as response:
                    assert response.status == 200
            gateway.remove(token)
            gateway.remove(token)
            assert (await post(client, token, messages=hello()))[0] == 401 and gateway.sessions == 0
            async with client.get("/sessions/x", headers=ADMIN) as response:
                assert response.status == 404, "without an admin token there are no such routes"

    world.run(scene)
    assert len(policy.turns) == 3


def test_small_questions_that_programs_ask():
    policy = scripted()

    async def scene():
        async with world.serving(world.session(policy), name="mine") as (_, (token,), client):
            async with client.head("/") as head, client.get("/v1/models") as listed:
                assert (head.status, [m["id"] for m in (await listed.json())["data"]]) == (200, ["mine"])
            async with client.get("/v1/models/claude-x", headers={"anthropic-version": "1"}) as one:
                assert (await one.json())["type"] == "model"
            body = dict(messages=hello("count me"), model="m")
            _, counted = await post(client, token, MESSAGES + "/count_tokens", **body)
            _, asked = await post(client, token, MESSAGES, **body, max_tokens=100)
            assert counted == {"input_tokens": asked["usage"]["input_tokens"]}

    world.run(scene)
    assert len(policy.turns) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_generation(monkeypatch, stream):
    monkeypatch.setattr(sessions, "LINGER_S", 0.02)
    policy = scripted(lambda context, turn: world.letters("x" * 300), pause_s=0.005)

    async def scene():
        session = world.session(policy)
        async with world.serving(session) as (_, (token,), client):
            work = asyncio.create_task(post(client, token, messages=hello(), stream=stream))
            while not policy.turns or not policy.turns[0].sampled:
                await asyncio.sleep(0.005)
            work.cancel()
            while session.running or policy.turns[0].finish != "cancelled":
                await asyncio.sleep(0.005)
            assert not policy.left_open and session.counters["cancelled"] == 1
            return session.close()

    assert world.run(scene) == ()


def test_an_answer_whose_client_left_before_it_was_written_is_given_again(monkeypatch):
    policy = scripted(pause_s=0.005)

    async def scene():
        session = world.session(policy)
        async with world.serving(session) as (_, (token,), client):
            work = asyncio.create_task(post(client, token, messages=hello()))
            while not policy.turns:
                await asyncio.sleep(0.001)
            work.cancel()
            while session.running:
                await asyncio.sleep(0.005)
            status, _ = await post(client, token, messages=hello())
            assert (status, len(policy.turns), session.counters["replayed"]) == (200, 1, 1)
            await post(client, token, messages=hello(), headers={"X-Stainless-Retry-Count": "1"})
            assert (len(policy.turns), session.counters["replayed"]) == (1, 2)
            await post(client, token, messages=hello(), headers={"X-Stainless-Retry-Count": "0"})
            assert len(policy.turns) == 2, "it has taken that answer, and wants another"

    world.run(scene)


def test_a_failure_is_a_status_before_the_first_token_and_an_event_after():
    class Failing(Scripted):
        async def generate(self, session, new, *args, on_tokens=None, **more):
            if len(self.sequences) > 2:
                self.turns.clear()
                if on_tokens is not None:
                    on_tokens(self._part(0, world.letters("begun")[:-1], [0] * 5))
                await asyncio.sleep(0.01)
            raise EngineError("broken on purpose")

    policy = Failing(world.tokenizer(), lambda context, turn: "")

    async def scene():
        async with world.serving(world.session(policy)) as (_, (token,), client):
            for stream in (False, True):
                status, told = await post(client, token, messages=hello(), stream=stream)
                assert (status, told["error"]["message"]) == (500, "broken on purpose")
            status, told = await events(client, token, CHAT, messages=hello())
            assert status == 200 and told[-1]["error"]["message"] == "broken on purpose"

    world.run(scene)


def test_what_does_not_fit_and_what_is_no_request(monkeypatch):
    monkeypatch.setattr(talk, "BODY_TIMEOUT_S", 0.3)
    policy = scripted()
    limits = sessions.SessionLimits(turn_tokens=10, context_tokens=100, requests=2)

    async def scene():
        async with world.serving(world.session(policy, limits)) as (gateway, (token,), client):
            status, told = await post(client, token, messages=hello("long " * 200))
            assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
            status, told = await post(client, token, MESSAGES, messages=hello("long " * 200), max_tokens=5)
            assert (status, told["error"]["type"]) == (400, "invalid_request_error")
            assert told["error"]["message"].startswith("prompt is too long: ")
            headers = {"Authorization": f"Bearer {token}"}
            for data in (b"", b"{", b"[]", b"\xff", b'{"messages": 3}', b'{"messages": []}', b"[" * 100_000):
                async with client.post(CHAT, data=data, headers=headers) as response:
                    assert response.status == 400 and json.loads(await response.read())["error"]["message"]
            async with client.post(CHAT, data=b" " * (17 * 2**20), headers=headers) as response:
                assert response.status == 413
            for wrong in ("/v1/nothing", "/v1/score"):
                assert (await post(client, token, wrong, messages=hello()))[0] == 404
            host, port = gateway.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 100\r\n\r\n"
            writer.write(head.encode() + b'{"mess')
            assert b"408" in await asyncio.wait_for(reader.readline(), 20)
            writer.close()
            for expected in (200, 200, 403):
                assert (await post(client, token, messages=hello(f"{expected}")))[0] in (expected, 200)
            assert (await post(client, token, messages=hello("another")))[0] == 403

    world.run(scene)
    assert len(policy.turns) == 2


def test_a_request_for_more_samples_than_are_left_draws_none():
    policy = scripted()

    async def scene():
        session = world.session(policy, sessions.SessionLimits(400, 4000, requests=3))
        async with world.serving(session) as (_, (token,), client):
            for n, expected in ((4, 403), (3, 200)):
                assert (await post(client, token, messages=hello(), n=n))[0] == expected
                assert not session.running and len(policy.turns) == 3 * (expected == 200)
            told = {"x-stainless-retry-count": "1"}
            assert (await post(client, token, headers=told, messages=hello(), n=3))[0] == 200  # all given again
            assert len(session.close()) == len(policy.turns) == 3

    world.run(scene)


@pytest.mark.parametrize("count, again", [("", True), ("00", True), ("x", True), ("0", False), ("2", True)])
def test_what_a_retry_header_says(count, again):
    """A header that is no number says nothing: two requests at once are then one sample."""
    policy = scripted(pause_s=0.02)

    async def scene():
        async with world.serving(world.session(policy)) as (_, (token,), client):
            headers = {"x-stainless-retry-count": count}
            await asyncio.gather(*(post(client, token, headers=headers, messages=hello()) for _ in range(2)))
        assert len(policy.turns) == 2 - again

    world.run(scene)


def test_no_tool_that_a_client_offers_is_the_engines_fault():
    """Else a policy could make its lost episode a failure, which is not trained."""
    answer = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    policy = scripted(lambda context, turn: world.letters(answer))
    template = chat_templates.TEMPLATES["qwen3-coder"][0]
    made = Renderer(world.tokenizer(), template, datetime.datetime(2026, 1, 1))
    limits = sessions.SessionLimits(2000, 40_000, 100)
    deep = {}
    for _ in range(470):
        deep = {"items": deep}
    wrong = [{"type": 5}, {"type": None}, {"enum": 5}, {"anyOf": 5}, {"$ref": "#/$defs/A"}, 5, deep]

    async def scene():
        session = sessions.Session(policy, made, world.tokenizer(), limits, world.SAMPLING, "task", 0)
        async with world.serving(session) as (_, (token,), client):
            for schema in wrong:
                function = {"name": "f", "parameters": {"properties": {"x": schema}, "$defs": {"A": 5}}}
                tools = [{"type": "function", "function": function}]
                status, _ = await post(client, token, messages=hello(), tools=tools)
                assert status in (200, 400) and session.failure is None, schema
            for prior in ("", "x"):
                status, told = await post(client, token, RESPONSES, input="x", previous_response_id=prior)
                assert (status, told["error"]["param"]) == (400, "previous_response_id")

    world.run(scene)


def test_a_client_that_does_not_read_its_stream_is_cut_off(monkeypatch):
    monkeypatch.setattr(talk, "WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(sessions, "LINGER_S", 0.02)
    write, written = web.StreamResponse.write, []

    async def stuck(self, data):
        written.append(data)
        await (write(self, data) if len(written) == 1 else asyncio.sleep(world.WAIT_S))

    monkeypatch.setattr(web.StreamResponse, "write", stuck)
    policy = scripted(lambda context, turn: world.letters("x" * 300), piece=1, pause_s=0.01)

    async def scene():
        session = world.session(policy)
        async with world.serving(session) as (_, (token,), client):
            with pytest.raises(aiohttp.ClientError):
                await events(client, token, CHAT, messages=hello())
            while session.running:
                await asyncio.sleep(0.01)
        assert len(written) == 2 and not policy.left_open

    world.run(scene)


async def raw_request(url, header):
    """What a POST to the admin routes gets, with a header that no client library would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(
        b"POST /sessions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n" + header + b"\r\n{}"
    )
    told = await reader.read()
    writer.close()
    return told


def test_admin_routes_open_show_give_and_end_sessions():
    policy = scripted()

    def make(body):
        if "task_id" not in body:
            raise BadRequest("'task_id' is missing", "task_id")
        return world.session(policy, task=body["task_id"], sample=body.get("sample", 0))

    async def scene():
        async with world.serving(make=make, admin_token="admin-secret") as (gateway, _, client):

            async def admin(method, path, headers=ADMIN, **body):
                async with client.request(method, path, headers=headers, json=body) as response:
                    return response.status, await response.json()

            for headers in ({}, {"Authorization": "Bearer admin-secre"}, {"Authorization": "admin-secret2"}):
                assert (await admin("POST", "/sessions", headers, task_id="t"))[0] == 401
            told = await raw_request(gateway.url, b"Authorization: Bearer \xff\xfe\r\n")
            assert told.startswith(b"HTTP/1.1 401"), "a token that is no text"
            assert (await admin("POST", "/sessions", sample=1))[0] == 400
            status, made = await admin("POST", "/sessions", task_id="t", sample=3)
            assert status == 201 and set(made) == {"id", "token"}
            assert (await post(client, made["token"], messages=hello()))[0] == 200
            path = f"/sessions/{made['id']}"
            status, looked = await admin("GET", path)
            assert (status, looked["running"], looked["counters"]["requests"]) == (200, 0, 1)
            assert (await admin("GET", path, {"Authorization": f"Bearer {made['token']}"}))[0] == 401
            assert (await admin("GET", "/sessions/" + made["token"]))[0] == 404
            _, given = await admin("GET", path + "/trajectories")
            assert (await post(client, made["token"], messages=hello("more")))[0] == 401, "it is over"
            assert (await admin("DELETE", path))[0] == 200 and gateway.sessions == 0
            assert (await admin("GET", path))[0] == 404
            return given

    given = world.run(scene)
    trajectories = tuple(codec.decode_trajectory(row, "row") for row in given["trajectories"])
    assert len(trajectories) == 1
    world.check(policy, trajectories, "t", 3)


def test_a_server_without_sessions_keeps_nothing_and_samples_as_it_is_asked():
    policy = scripted(lambda context, turn: f"saw {len(context)}")

    def one_shot(ask):
        limits = sessions.SessionLimits(turn_tokens=100, context_tokens=500, requests=1)
        return sessions.Session(policy, world.renderer(), world.tokenizer(), limits, None, f"x/{ask.seed}", 0)

    async def scene():
        async with world.serving(one_shot=one_shot, name="mine", strict_name=True) as (gateway, _, client):
            answers = [await post(client, "any key", messages=hello(), temperature=0.5, seed=s) for s in (1, 1, 2)]
            assert [status for status, _ in answers] == [200] * 3 and gateway.sessions == 0
            status, told = await post(client, "any key", messages=hello(), model="other")
            assert (status, told["error"]["code"]) == (404, "model_not_found")

    world.run(scene)
    assert [t.sampling.temperature for t in policy.turns] == [0.5] * 3 and not policy.left_open
    keys = [(t.task_id, t.conversation) for t in policy.turns]
    assert keys[0] == keys[1] != keys[2]
