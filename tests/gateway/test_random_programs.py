"""Many programs at once that behave at random, over HTTP: whatever they do, tokens are exact and nothing is shared.

Of every session: each sampled token is ACTION in exactly one place, each trajectory is what the policy saw, and no
word of another session is in it.
"""

import asyncio
import hashlib
import json

import pytest

from jaxagent.gateway import session as sessions
from tests.gateway import world
from tests.gateway.programs import Program
from tests.gateway.scripted import Scripted

STEPS, PROGRAMS = 25, 4


class Random(Scripted):
    """Samples by key, context and turn alone: letters, words or calls, some of them broken."""

    def answer(self, turn):
        key = f"{turn.task_id}/{turn.sample}/{turn.conversation}/{turn.turn}/{turn.context}"
        digest = hashlib.sha256(key.encode()).hexdigest()
        kinds = {"0": "<tool_call>{", "1": world.call("a") + world.call(digest[:4]), "2": "the quick fox " + digest[:3]}
        text = kinds.get(digest[0], world.call(digest[:5]) if digest[0] in "3456789" else digest[:12])
        return world.letters(text) if digest[1] in "0123" else text


def poster(client, token):
    async def post(body, patience, retry):
        headers = {"Authorization": f"Bearer {token}"} | ({"x-stainless-retry-count": "1"} if retry else {})

        async def whole():
            async with client.post("/v1/chat/completions", json=body, headers=headers) as response:
                raw = await response.read()
                assert response.status == 200, raw
            if not body["stream"]:
                return json.loads(raw)["choices"][0]["message"]
            lines = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: {")]
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
            calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
            return {
                "role": "assistant",
                "content": "".join(delta.get("content") or "" for delta in deltas) or None,
            } | ({"tool_calls": calls} if calls else {})

        try:
            return await asyncio.wait_for(whole(), patience)
        except TimeoutError:
            return None

    return post


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(seed, monkeypatch):
    monkeypatch.setattr(sessions, "LINGER_S", 0.003)
    policy = Random(world.tokenizer(), lambda context, turn: "", pause_s=0.001)
    limits = sessions.SessionLimits(turn_tokens=200, context_tokens=100_000, requests=10_000)
    words = [f"secret{i}{seed}word" for i in range(PROGRAMS)]

    async def scene():
        ours = [world.session(policy, limits, sample=i) for i in range(PROGRAMS)]
        async with world.serving(*ours) as (_, tokens, client):
            programs = [
                Program(seed * 100 + i, words[i], [world.SHELL_JSON], poster(client, token))
                for i, token in enumerate(tokens)
            ]
            await asyncio.gather(*(program.run(STEPS) for program in programs))
            while any(one.running for one in ours):
                await asyncio.sleep(0.005)
        return ours, [one.close() for one in ours]

    ours, given = world.run(scene)
    assert not policy.left_open
    for sample, (session, trajectories) in enumerate(zip(ours, given, strict=True)):
        untrained = [t for t in policy.done if t.sample == sample and "<tools>" not in text_of(t.context)]
        given_up, counters = session.counters["cancelled"], session.counters
        assert 0 <= len(untrained) - counters["side_requests"] <= given_up
        trained = Scripted(world.tokenizer(), lambda context, turn: "")
        trained.turns = [t for t in policy.turns if all(t is not other for other in untrained)]
        world.check(trained, trajectories, sample=sample, given_up=given_up)
        actions = sum(int(t.action_mask.sum()) for t in trajectories)
        whole = sum(len(t.sampled) for t in policy.done if t.sample == sample)
        assert actions <= counters["sampled_tokens"] <= whole, "every sampled token is in a trajectory"
        if not given_up:
            assert counters["sampled_tokens"] == whole == actions + sum(len(t.sampled) for t in untrained)
        for trajectory in trajectories:
            text = text_of(trajectory.tokens)
            assert [word for word in words if word in text] == [words[sample]]
    again = sum(one.counters["replayed"] + one.counters["retries_joined"] for one in ours)
    assert sum(one.counters["forks"] for one in ours) > 4 and again > 0


def text_of(ids):
    return world.tokenizer().decode(ids)
