"""What other people's clients send to a session: each was seen with the package that the test names."""

import asyncio
import json
import os
import re
import urllib.request
from unittest import mock

import pytest

from jaxagent.agents.base import Where
from jaxagent.agents.programs import client_variables
from jaxagent.gateway import talk
from tests.gateway import world
from tests.gateway.scripted import Scripted

TOOL = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
HI = {"role": "user", "content": "x"}
ASKED = {
    "/chat/completions": {"messages": [HI]},
    "/messages": {"messages": [HI], "max_tokens": 9},
    "/responses": {"input": "x"},
    "/completions": {"prompt": "x"},
}


def serve(reply, scene, **more):
    async def whole():
        policy = Scripted(world.tokenizer(), reply)
        session = world.session(policy, **more)
        async with world.serving(session) as (_, (token,), client):
            result = await scene(client, token, session)
        world.check(policy, session.close(), given_up=1)
        return result

    return world.run(whole)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "shell"}}])
def test_a_demanded_call_is_a_wish(choice):
    """pydantic-ai's output_type, smolagents' ToolCallingAgent, langchain's with_structured_output."""

    async def scene(client, token, session):
        told = await world.post(client, token, messages=[HI], tools=[world.SHELL_JSON], tool_choice=choice)
        return *told, session.counters["ignored_fields"]

    status, body, ignored = serve(lambda c, t: world.call("ls"), scene)
    assert status == 200 and body["choices"][0]["message"]["tool_calls"] and ignored == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_n_is_as_many_draws_each_in_a_trajectory(path, stream):
    number = iter(range(100))

    async def scene(client, token, session):
        asked = {"messages": [HI]} if "chat" in path else {"prompt": "vote", "max_tokens": 50}
        body = asked | {"n": 4, "stream": stream, "stream_options": {"include_usage": True}}
        async with client.post(path, json=body, headers={"Authorization": f"Bearer {token}"}) as response:
            assert response.status == 200, await response.text()
            if not stream:
                told = await response.json()
                chosen = [one.get("message", {}).get("content") or one.get("text") for one in told["choices"]]
                return chosen, told["usage"], len(session.close())
            events = [line async for line in response.content if line.startswith(b"data: {")]
        parts = [json.loads(event[6:]) for event in events]
        texts = dict.fromkeys(range(4), "")
        for part in parts:
            for one in part["choices"]:
                texts[one["index"]] += (one["delta"].get("content") or "") if "delta" in one else one["text"]
        return list(texts.values()), parts[-1]["usage"], len(session.close())

    texts, usage, trajectories = serve(lambda c, t: f"sample {next(number)}", scene)
    assert sorted(texts) == [f"sample {i}" for i in range(4)] and trajectories == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["item_reference", "previous_response_id"])
def test_a_session_knows_what_it_answered(how, stream):
    """The ai package's openai() sends item_reference, OpenAI's examples send previous_response_id."""

    async def scene(client, token, session):
        asked = {"tools": [TOOL], "stream": stream}

        async def post(**more):
            head = {"Authorization": f"Bearer {token}"}
            async with client.post("/v1/responses", json=asked | more, headers=head) as response:
                text = await response.text()
                assert response.status == 200, text
                return last_response(text) if stream else await response.json()

        first = await post(input=[HI])
        item = first["output"][-1]
        out = {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        if how == "item_reference":
            named = [{"type": "item_reference", "id": one["id"]} for one in first["output"]]
            second = await post(input=[HI, *named, out])
            third = await post(input=[HI, *named, out, {"id": second["output"][0]["id"]}, HI])
        else:
            second = await post(input=[out], previous_response_id=first["id"])
            third = await post(input="more", previous_response_id=second["id"])
        status, refused = await world.post(client, token, "/v1/responses", input=[HI], previous_response_id="resp_0")
        assert status == 400 and "none of the last" in refused["error"]["message"]
        return third, len(session.close())

    third, trajectories = serve(lambda c, t: "I look." + world.call("ls") if t == 0 else f"done {t}", scene)
    assert third["output"][0]["content"][0]["text"] == "done 2" and trajectories == 1


def last_response(text):
    return json.loads([line for line in text.splitlines() if line.startswith("data: ")][-1][6:])["response"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_holds_the_threads_of_messages(stream):
    """The tool loop of Anthropic's SDK sends only what is new, and begins anew where its thread is not found."""

    async def scene(client, token, session):
        tool = {"name": "shell", "input_schema": {"type": "object"}}
        asked = {"model": "m", "max_tokens": 99, "stream": stream}

        async def post(**more):
            head = {"Authorization": f"Bearer {token}"}
            async with client.post("/v1/messages", json=asked | more, headers=head) as response:
                return response.status, await response.text()

        def ids(text):
            return {name: re.search(rf'"({name}_[0-9a-f]+)"', text)[1] for name in ("msg", "toolu") if name in text}

        system = [{"type": "text", "text": "Be brief."}]
        _, first = await post(messages=[HI], tools=[tool], system=system, thread={"type": "create"})
        out = {"type": "tool_result", "tool_use_id": ids(first)["toolu"], "content": "ok"}
        on = {"type": "continue", "previous_message_id": ids(first)["msg"]}
        _, second = await post(messages=[{"role": "user", "content": [out]}], thread=on)
        third = await post(messages=[HI], thread=on | {"previous_message_id": ids(second)["msg"]})
        lost = await post(messages=[HI], thread=on | {"previous_message_id": "msg_0"})
        return third, lost, len(session.close())

    third, lost, trajectories = serve(lambda c, t: "I look." + world.call("ls") if t == 0 else f"done {t}", scene)
    assert third[0] == 200 and "done" in third[1] and trajectories == 1
    assert lost[0] == 404 and json.loads(lost[1])["error"]["details"] == {"error_code": "thread_not_found"}


def test_other_sessions_items_are_not_known():
    async def scene():
        policy = Scripted(world.tokenizer(), lambda c, t: "secret")
        async with world.serving(world.session(policy), world.session(policy, sample=1)) as (_, tokens, client):
            _, first = await world.post(client, tokens[0], "/v1/responses", input="x")
            named = {"type": "item_reference", "id": first["output"][0]["id"]}
            return await world.post(client, tokens[1], "/v1/responses", input=[HI, named, HI])

    assert world.run(scene)[0] == 400


def test_variables_of_clients():
    """pydantic-ai, langchain, litellm and the ai package read ANTHROPIC_API_KEY; a proxy of the user's must not be
    asked for 127.0.0.1, and no key of the user's own may stay in place."""
    where = Where(
        url="http://127.0.0.1:1",
        token="t",
        model="m",
        instruction="",
        directory="/",
        home="/",
        context_tokens=1,
        turn_tokens=1,
    )
    told = client_variables(where)
    assert {told[name] for name in told if name.endswith(("_KEY", "_TOKEN"))} == {"t"}
    assert {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"} < set(told)
    openai = pytest.importorskip("openai")
    anthropic = pytest.importorskip("anthropic")
    mine = {"OPENAI_API_KEY": "real", "ANTHROPIC_API_KEY": "real", "HTTP_PROXY": "http://10.0.0.1:3", "NO_PROXY": "a"}
    with mock.patch.dict(os.environ, mine | told):
        assert openai.OpenAI().api_key == "t" and str(openai.OpenAI().base_url) == "http://127.0.0.1:1/v1/"
        assert anthropic.Anthropic().api_key == "t" and str(anthropic.Anthropic().base_url) == "http://127.0.0.1:1"
        assert urllib.request.proxy_bypass("127.0.0.1") and urllib.request.proxy_bypass("localhost")


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_every_route_has_a_short_path(prefix):
    """@ai-sdk/anthropic takes ANTHROPIC_BASE_URL for the place of /messages itself."""

    async def scene(client, token, session):
        asked = ASKED | {"/messages/count_tokens": {"messages": [HI]}}
        told = [await world.post(client, token, prefix + path, **body) for path, body in asked.items()]
        async with client.get(prefix + "/models") as response:
            told.append((response.status, None))
        _, refused = await world.post(client, token, prefix + "/messages", messages=[])
        assert refused["type"] == "error"  # in the dialect's form
        return [status for status, _ in told]

    assert serve(lambda c, t: "ok", scene) == [200] * 6


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_waits_for_a_place_says_so(path, monkeypatch):
    """Node's fetch gives up after 300 s without a head; a retry then has lost its place in the queue."""
    monkeypatch.setattr(talk, "PING_S", 0.05)

    async def scene(client, token, session):
        gate = session._sampler._policy.gate
        gate.clear()
        head, asked = {"Authorization": f"Bearer {token}"}, ASKED[path] | {"stream": True}
        async with asyncio.timeout(5), client.post(f"/v1{path}", json=asked, headers=head) as response:
            # Real events while nothing is sampled.
            first = [await response.content.readuntil(b"\n\n") for _ in range(3)]
            gate.set()
            rest = await response.content.read()
            return response.status, first, rest

    status, first, rest = serve(lambda c, t: "ok", scene)
    assert status == 200 and all(b"data: " in event for event in first) and b"ok" in rest
