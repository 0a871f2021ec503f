"""The server over real HTTP: who may ask, whole and streamed answers in every dialect, clients that go away."""

import json

from tests.gateway import world
from tests.gateway.scripted import Scripted
from tests.gateway.world import post


def scripted(reply=lambda context, turn: f"turn {turn} saw {len(context)}", **more):
    return Scripted(world.tokenizer(), reply, **more)


def hello(text="hello"):
    return [{"role": "user", "content": text}]


def test_chat_completions_whole_and_streamed():
    policy = scripted(lambda context, turn: "looking " + world.call("ls") if turn == 0 else "done")

    async def scene():
        session = world.session(policy)
        async with world.serving(session) as (_, (token,), client):
            status, first = await post(client, token, messages=hello(), tools=[world.SHELL_JSON], model="any")
            assert status == 200, first
            said = first["choices"][0]["message"]
            assert said["tool_calls"][0]["function"]["name"] == "shell"
            assert first["choices"][0]["finish_reason"] == "tool_calls"
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "a b"}
            body = dict(messages=[*hello(), said, result], tools=[world.SHELL_JSON], stream=True)
            headers = {"Authorization": f"Bearer {token}"}
            async with client.post("/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
                lines = [line.decode().removeprefix("data: ").strip() async for line in response.content]
            lines = [line for line in lines if line]
            assert lines.pop() == "[DONE]"
            pieces = [json.loads(line)["choices"][0] for line in lines]
            assert "".join(p["delta"].get("content") or "" for p in pieces) == "done"
            assert pieces[-1]["finish_reason"] == "stop"
        return session.close()

    trajectories = world.run(scene)
    assert len(trajectories) == 1
    world.check(policy, trajectories)
