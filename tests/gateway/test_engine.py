"""Sessions over a real engine in exact numerics: what HTTP gives is what the engine samples, in any company."""

import asyncio
import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from jaxagent.agents.programs import Command
from jaxagent.config import EngineConfig, MeshConfig
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.gateway import sampler
from jaxagent.gateway import session as sessions
from jaxagent.gateway.session import SessionLimits
from jaxagent.gateway.threads import conversation_key
from jaxagent.models import sharding
from jaxagent.models.spec import round_up
from jaxagent.types import StopReason
from tests.engine import test_recorded
from tests.gateway import world
from tests.gateway.episodes import CONFIG, TASK
from tests.gateway.world import post
from tests.models import tiny

CONTEXT, TURNS = 600, 3
LIMITS = SessionLimits(turn_tokens=24, context_tokens=CONTEXT, requests=50)


def tiny_spec():
    size = world.tokenizer().vocab_size
    return tiny.spec(vocab_size=size, padded_vocab_size=round_up(size, 64), logprob_chunk_tokens=64)


@pytest.fixture(scope="module")
def engine():
    with running(tiny_spec()) as driver:
        yield driver


@contextlib.contextmanager
def running(spec, exact=True):
    """A driver, in fast numerics one that records choices."""
    tokenizer = world.tokenizer()
    cfg = EngineConfig(
        slots=4,
        steps_per_dispatch=4,
        prefill_tokens=64,
        pages=240,
        page_tokens=16,
        tile_rows=8,
        kv_on_update="recompute",
        cache_dtype="float32",
        request_timeout_s=60.0,
    )
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, context=1))
    stops = automaton.build([], tokenizer.token_bytes(), spec.padded_vocab_size)
    setup = EngineSetup(cfg=cfg, context=CONTEXT, stops=stops, eos_ids=tokenizer.eos_ids, exact=exact, seed=5)
    model = LanguageModel(spec, cfg.cache_dtype, records=not exact)
    with Driver(model, tiny.random_params(spec), 3, setup, mesh) as driver:
        driver.start(timeout_s=120)
        yield driver


async def play(client, token, name, leave=False):
    """A program of three turns with a tool offered, an edit of the past and a request for a title."""
    history = [{"role": "user", "content": f"task {name}"}]
    for turn in range(TURNS):
        body = dict(messages=history, tools=[world.SHELL_JSON], stream=bool(turn % 2))
        if leave:
            work = asyncio.create_task(post(client, token, **body))
            await asyncio.sleep(0.02)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await asyncio.sleep(0.05)
        _, told = await post(client, token, **body | {"stream": False}, headers={"x-stainless-retry-count": "1"})
        message = told["choices"][0]["message"]
        history = [*history, message, {"role": "user", "content": f"{name} goes on"}]
    await post(client, token, messages=[{"role": "user", "content": "a title"}])
    await post(client, token, messages=[*history[:2], {"role": "user", "content": "other"}], tools=[world.SHELL_JSON])


def played(driver, names, together, leave=False):
    """{name: trajectories} of programs that run at once, or one after the other."""

    async def scene():
        ours = {name: world.session(driver, LIMITS, task=name) for name in names}
        async with world.serving(*ours.values()) as (_, tokens, client):
            programs = [play(client, token, name, leave) for name, token in zip(names, tokens, strict=True)]
            if together:
                await asyncio.gather(*programs)
            else:
                for program in programs:
                    await program
        return {name: one.close() for name, one in ours.items()}

    return world.run(scene)


@pytest.mark.slow
def test_experts_are_of_their_own_tokens_also_where_clients_leave_and_pasts_are_edited():
    spec = dataclasses.replace(tiny_spec(), family="qwen3_moe", pattern=())
    with running(spec, exact=False) as driver:
        trajectories = played(driver, ["one", "two"], together=True, leave=True)
    weights = tiny.random_params(spec)
    for trajectory in (t for each in trajectories.values() for t in each):
        tokens = np.zeros(CONTEXT, np.int32)
        tokens[: len(trajectory)] = trajectory.tokens
        known = trajectory.experts[:, 0] != 255
        assert known[:-1].all() and not known[-1]
        expected = np.asarray(test_recorded.chosen(spec, weights, tokens))[: len(trajectory)]
        np.testing.assert_array_equal(trajectory.experts[known], expected[known])


def columns(trajectories):
    return [
        (t.tokens.tolist(), t.kinds.tolist(), t.logprobs.tobytes(), t.policy_versions.tolist(), t.turns.tolist())
        for t in trajectories
    ]


def test_trajectories_are_the_engines_own_tokens_and_log_probs(engine):
    given = played(engine, ["one"], together=True)["one"]
    assert len(given) == 2 and max(t.turns[-1] for t in given) == TURNS - 1

    async def again(trajectory):
        """The same tokens asked of the engine itself, turn by turn."""
        starts = np.flatnonzero(np.diff(trajectory.action_mask.astype(int), prepend=0) == 1)
        ends = [*np.flatnonzero(np.diff(trajectory.action_mask.astype(int)) == -1), len(trajectory) - 1]
        context = trajectory.tokens[: starts[0]]
        key = conversation_key(context.tolist(), 0)
        session = await engine.open("one", 0, conversation=key)
        before = 0
        for turn, (start, end) in enumerate(zip(starts, ends, strict=True)):
            new = trajectory.tokens[before:start]
            g = await engine.generate(session, new, LIMITS.turn_tokens, world.SAMPLING, turn, 60, stop_strings=None)
            np.testing.assert_array_equal(g.tokens, trajectory.tokens[start : end + 1])
            np.testing.assert_array_equal(g.logprobs, trajectory.logprobs[start : end + 1])
            assert set(trajectory.policy_versions[start : end + 1].tolist()) == {3}
            before = end + 1
        engine.close(session)

    for trajectory in given:
        world.run(lambda trajectory=trajectory: again(trajectory))


def test_interleaved_sessions_equal_those_that_run_alone(engine, monkeypatch):
    monkeypatch.setattr(sessions, "LINGER_S", 0.01)
    names = ["left", "right", "third"]
    alone = {name: columns(played(engine, [name], together=True)[name]) for name in names}
    assert len({str(one) for one in alone.values()}) == 3
    together = {name: columns(given) for name, given in played(engine, names, together=True).items()}
    assert together == alone
    disturbed = {name: columns(given) for name, given in played(engine, names, together=True, leave=True).items()}
    assert disturbed == alone, "clients that leave and come back change nothing"


def test_stop_strings_found_by_the_engine_or_after_it_give_the_same_trajectories(engine, monkeypatch):
    async def scene():
        session = world.session(engine, LIMITS, task="stops")
        history = [world.user("go")]
        for i in range(4):
            answer = await session.answer(world.ask(*history, stops=("e", "an", "</")))
            session.delivered(answer)
            history += [world.assistant(answer.text), world.user(f"turn {i}")]
            stopped.append(answer.stop_string)
        return session.close()

    stopped = []
    found_by_engine = columns(world.run(scene))
    monkeypatch.setattr(sampler, "ENGINE_STOP_BYTES", 0)
    assert columns(world.run(scene)) == found_by_engine
    assert stopped[:4] == stopped[4:] and sum(stop is not None for stop in stopped[:4]) >= 2


TALKS = """
import json, os, time, urllib.request
messages = [{"role": "user", "content": "hello"}]
for turn in range(3):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    message = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "go on"}]
    time.sleep(0.2)
"""


class Learning:
    """The engine, and new weights for it after its first turn, while whoever asked is at work."""

    def __init__(self, engine, params, version):
        self._engine, self._new, self._update = engine, (params, version), None
        self.open, self.close = engine.open, engine.close

    async def generate(self, *asked, **more):
        if self._update is not None:
            await self._update
        generation = await self._engine.generate(*asked, **more)
        if self._update is None:
            self._update = asyncio.create_task(asyncio.to_thread(self._engine.update_params, *self._new))
        return generation


def test_the_engine_takes_new_weights_while_an_agent_program_works(engine, scene):
    old, new = (jax.device_put(tiny.random_params(tiny_spec(), seed)) for seed in (0, 1))
    config = dataclasses.replace(CONFIG, context_tokens=CONTEXT, turn_tokens=24)
    agent = Command(words=("/usr/bin/python3", "-c", TALKS))

    async def judge(sandbox):
        return 1.0

    try:
        policy = Learning(engine, new, 4)
        episode = scene.play(policy, agent, config, judge=judge)
        assert (episode.stop_reason, episode.reward) == (StopReason.ANSWER, 1.0), episode.error
        (trajectory,) = episode.trajectories
        actions = trajectory.action_mask
        versions = [set(trajectory.policy_versions[actions & (trajectory.turns == t)].tolist()) for t in range(3)]
        assert versions == [{3}, {4}, {4}]

        async def again():
            """The third turn as the new weights alone would have it."""
            start = int(np.flatnonzero(actions & (trajectory.turns == 2))[0])
            first = int(np.flatnonzero(actions)[0])
            key = conversation_key(trajectory.tokens[:first].tolist(), 0)
            session = await engine.open(TASK.id, 3, conversation=key)
            context = trajectory.tokens[:start]
            g = await engine.generate(session, context, 24, world.SAMPLING, 2, 60, stop_strings=None)
            engine.close(session)
            np.testing.assert_array_equal(g.tokens, trajectory.tokens[start:])
            np.testing.assert_array_equal(g.logprobs, trajectory.logprobs[start:])

        world.run(again)
    finally:
        engine.update_params(old, 3)
