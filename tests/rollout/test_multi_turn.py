"""Whole episodes of the search environment with a scripted policy: every way an episode can end."""

import asyncio
import contextlib
import dataclasses
import os
import re
from functools import partial

import numpy as np
import pytest
from scripted import ScriptedPolicy

from jaxagent.config import SamplingConfig
from jaxagent.envs.base import Message, Observation, Step, Verdict
from jaxagent.envs.search.environment import INVALID_ACTION, Search, SearchAttempt
from jaxagent.envs.search.retriever.backends import Bm25Config
from jaxagent.envs.search.retriever.base import Passage, RetrieverError
from jaxagent.envs.search.retriever.bm25 import Bm25
from jaxagent.envs.search.rewards import ExactMatch, extract_answer
from jaxagent.rewards import text
from jaxagent.rewards.composite import Composite, Part
from jaxagent.rewards.length import soft_overlong
from jaxagent.rewards.view import View
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.sandbox.base import SandboxLost
from jaxagent.types import StopReason, Task, TokenKind

TASK = Task("t1", "What is the calling code of Ghana?", ("233",))
RETRIEVER = Bm25([Passage("0", "Ghana", "The calling code of Ghana is 233."), Passage("1", "Togo", "Togo is small.")])
SEARCH, ANSWER = "<search> calling code Ghana</search>", "<answer> 233</answer>"
SAMPLING = SamplingConfig(1.0, 1.0, 0, 0.0)


def config(**changes) -> Search:
    base = Search(
        prompt="plain",
        max_turns=3,
        final_turn=False,
        turn_tokens=60,
        observation_tokens=300,
        context_tokens=1000,
        episode_timeout_s=5.0,
        max_failed_steps=3,
        reward=ExactMatch(min_answers=1),
        retriever=Bm25Config(topk=1),
    )
    return dataclasses.replace(base, **changes)


def play(tokenizer, script, retriever=RETRIEVER, make=None, request_timeout_s=2.0, **changes):
    cfg = config(**changes)
    policy = ScriptedPolicy(tokenizer, lambda task, sample: script)
    make = make or (lambda task: SearchAttempt(task, cfg, retriever))
    rollout = MultiTurn(make, policy, tokenizer, Plain(), cfg, SAMPLING, request_timeout_s)
    episode = asyncio.run(rollout(TASK, 2))
    assert all(session.closed for session in policy.sessions)
    for trajectory, session in zip(episode.trajectories, policy.sessions, strict=False):
        assert trajectory.tokens.tolist() == session.tokens  # the engine's tokens, always
    return episode, policy


def test_search_then_answer(trained):
    episode, policy = play(trained, [SEARCH, ANSWER])
    assert episode.stop_reason == StopReason.ANSWER and episode.reward == 1.0 and episode.turns == 2
    assert episode.rewards["em"] == 1.0 and episode.rewards["retrieval_hit"] == 1.0
    assert (episode.sample, episode.error) == (2, "")
    expected = (
        "Question: What is the calling code of Ghana?\n" + SEARCH
        + "\n\n<information>Doc 1(Title: Ghana) The calling code of Ghana is 233.</information>\n\n" + ANSWER
    )  # fmt: skip
    assert episode.text == expected
    (trajectory,) = episode.trajectories
    assert trained.decode(trajectory.tokens) == expected
    assert trained.decode(trajectory.tokens[trajectory.action_mask]) == SEARCH + ANSWER
    assert [call[3] for call in policy.calls] == [0, 1]
    metrics = episode.metrics
    assert metrics["searches"] == 1 and metrics["invalid_actions"] == 0
    assert metrics["action_tokens"] == len(trained.encode(SEARCH)) + len(trained.encode(ANSWER))
    assert metrics["observation_tokens"] == (trajectory.kinds == TokenKind.OBSERVATION).sum()
    assert metrics["decode_s"] == 1.0 and metrics["total_s"] >= metrics["engine_s"]


@pytest.mark.parametrize("at", ["start", "step", "verify", None])
def test_a_lost_sandbox_is_no_end_of_an_episode(trained, at):
    """Whoever asked for the attempt plays it again; what the attempt holds is freed before."""
    freed = []

    def make(task):
        attempt = SearchAttempt(task, config(), RETRIEVER)

        async def lost(*arguments):
            raise SandboxLost("its host is gone")

        async def close():
            freed.append(at)

        attempt.close = close
        if at:
            setattr(attempt, at, lost)
        return attempt

    with pytest.raises(SandboxLost) if at else contextlib.nullcontext():
        play(trained, [SEARCH, ANSWER], make=make)
    assert freed == [at]


def test_wrong_answer_is_an_honest_zero(trained):
    episode, _ = play(trained, ["<answer> 234</answer>"])
    assert (episode.stop_reason, episode.reward) == (StopReason.ANSWER, 0.0)


def test_invalid_action_is_told_and_counted(trained):
    episode, policy = play(trained, ["hmm", ANSWER])
    assert episode.stop_reason == StopReason.ANSWER and episode.reward == 1.0
    assert episode.metrics["invalid_actions"] == 1
    kinds = episode.trajectories[0].kinds
    assert (kinds == TokenKind.WARNING).sum() == len(trained.encode(INVALID_ACTION))
    assert policy.calls[1][0] == trained.encode(INVALID_ACTION)
    assert "hmm" + INVALID_ACTION + ANSWER in episode.text  # the sampled EOS is in the tokens, not in the text


@pytest.mark.parametrize(("final_turn", "generations"), [(False, 3), (True, 4)])
def test_turn_limit_with_n_and_n_plus_one_turns(trained, final_turn, generations):
    episode, policy = play(trained, [SEARCH] * 9, final_turn=final_turn)
    assert episode.stop_reason == StopReason.TURN_LIMIT and episode.reward == 0.0
    assert len(policy.calls) == episode.turns == generations
    assert episode.metrics["searches"] == generations - 1  # the last turn's search would have no reader
    assert not episode.stop_reason.is_failure


def test_the_final_turn_may_answer(trained):
    episode, _ = play(trained, [SEARCH] * 3 + [ANSWER], final_turn=True)
    assert (episode.stop_reason, episode.reward) == (StopReason.ANSWER, 1.0)


def test_a_turn_out_of_tokens_ends_the_episode(trained):
    episode, policy = play(trained, ["long " * 50], turn_tokens=5)
    assert episode.stop_reason == StopReason.TOKEN_LIMIT and episode.metrics["action_tokens"] == 5
    assert policy.calls[0][1] == 5


def test_the_context_bounds_everything(trained):
    length = len(trained.encode("Question: What is the calling code of Ghana?\n"))
    episode, policy = play(trained, [SEARCH] * 3, context_tokens=length + len(trained.encode(SEARCH)) + 4)
    assert episode.stop_reason == StopReason.TOKEN_LIMIT
    assert len(episode.trajectories[0]) == length + len(trained.encode(SEARCH))  # what was never shown is not there
    episode, policy = play(trained, [SEARCH], context_tokens=length + 3)
    assert policy.calls[0][1] == 3 and episode.stop_reason == StopReason.TOKEN_LIMIT
    episode, policy = play(trained, [SEARCH], context_tokens=length)
    assert episode.stop_reason == StopReason.ENV_ERROR and "env.context_tokens" in episode.error and not policy.calls


def test_engine_failure_and_timeouts(trained):
    episode, _ = play(trained, [SEARCH, RuntimeError("device lost\nbadly")])
    assert episode.stop_reason == StopReason.ENGINE_ERROR and episode.error == "RuntimeError: device lost badly"
    assert episode.rewards == {} and episode.stop_reason.is_failure
    episode, _ = play(trained, ["hang"], request_timeout_s=0.05)
    assert episode.stop_reason == StopReason.TIMEOUT and "generation" in episode.error
    assert episode.trajectories == ()
    episode, _ = play(trained, ["hang"], episode_timeout_s=0.05)
    assert episode.stop_reason == StopReason.TIMEOUT and "episode" in episode.error


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(RetrieverError("down"), StopReason.ENV_ERROR), (TimeoutError("slow"), StopReason.TIMEOUT)],
)
def test_a_failing_retriever_is_not_an_empty_result(trained, failure, reason):
    class Broken:
        async def search(self, queries, topk):
            raise failure

    episode, _ = play(trained, [SEARCH, ANSWER], retriever=Broken())
    assert episode.stop_reason == reason and str(failure) in episode.error
    assert len(episode.trajectories) == 1 and episode.turns == 1 and episode.metrics["searches"] == 1


class Faulty:
    """An environment that fails, or hangs, in one of its methods."""

    stop_strings, counters = (), {"visits": 3.0}

    def __init__(self, place, hang=False):
        self.place, self.hang, self.closed = place, hang, 0

    async def visit(self, place):
        if place == self.place:
            if self.hang:
                await asyncio.Event().wait()
            raise KeyError(place)

    async def start(self):
        await self.visit("start")
        return (Message("user", "hello"),)

    async def step(self, action):
        await self.visit("step")
        if action == ANSWER:
            return Step(stop_reason=StopReason.ANSWER)
        return Step(Observation((("seen", TokenKind.OBSERVATION),)))

    async def verify(self, transcript):
        await self.visit("verify")
        assert transcript.prompt == "hello" and transcript.turns == ((SEARCH, "seen"), (ANSWER, ""))
        return Verdict(0.5, {"half": 0.5})

    async def close(self):
        self.closed += 1
        await self.visit("close")


@pytest.mark.parametrize("hang", [False, True])
@pytest.mark.parametrize("place", ["start", "step", "verify", "close", "nowhere"])
def test_faulty_environments(trained, place, hang, monkeypatch):
    monkeypatch.setattr("jaxagent.rollout.episode.CLOSE_TIMEOUT_S", 0.05)
    environment = Faulty(place, hang)
    episode, _ = play(trained, [SEARCH, ANSWER], make=lambda task: environment, episode_timeout_s=0.2)
    assert environment.closed == 1
    if place in ("close", "nowhere"):
        assert (episode.stop_reason, episode.reward, episode.rewards) == (StopReason.ANSWER, 0.5, {"half": 0.5})
    else:
        assert episode.stop_reason == (StopReason.TIMEOUT if hang else StopReason.ENV_ERROR)
        assert episode.reward == 0.0 and episode.rewards == {} and episode.error
    assert episode.metrics["visits"] == 3.0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"stop_strings": "</answer>"}, "stop_strings must be a tuple of texts"),  # its letters would be nine
        ({"stop_strings": ("</answer>", "")}, "stop_strings must be a tuple of texts"),
        ({"counters": {"searches": "many"}}, "Wrong.counters returned 'searches' that is the str 'many'"),
        ({"counters": {"searches": float("nan")}}, "Wrong.counters returned 'searches' of nan"),
        ({"counters": None}, "Wrong.counters returned counters that is None"),
        ({"step": "look"}, "Wrong.step returned a result that is the str 'look' where a Step is wanted"),
        ({"step": Step(stop_reason="over")}, "'over' is not a valid StopReason"),
    ],
)
def test_what_an_environment_says_of_itself_wrongly_fails_its_attempt(trained, changes, error):
    class Wrong(SearchAttempt):
        async def step(self, action):
            return changes.get("step") or await super().step(action)

    def make(task):
        attempt = Wrong(task, config(), RETRIEVER)
        for name in changes.keys() - {"step"}:
            setattr(attempt, name, changes[name])
        if "counters" in changes:
            attempt.step = lambda action: asyncio.sleep(0, Step(stop_reason=StopReason.ANSWER))
        return attempt

    episode, _ = play(trained, [ANSWER], make=make)
    assert episode.stop_reason == StopReason.ENV_ERROR and error in episode.error
    assert episode.rewards == {}


def test_an_error_can_be_logged_whatever_it_names(trained):
    episode, _ = play(trained, [RuntimeError(f"no {os.fsdecode(bytes([255]))}.txt")])
    assert episode.error == "RuntimeError: no ?.txt" and episode.error.encode()


def test_numbers_of_numpy_become_floats(trained):
    class Measured(SearchAttempt):
        async def verify(self, transcript):
            return Verdict(np.float32(0.5), {"em": np.float32(1.0)})

    episode, _ = play(trained, [ANSWER], make=lambda task: Measured(task, config(), RETRIEVER))
    assert type(episode.reward) is float and type(episode.rewards["em"]) is float and episode.reward == 0.5


def test_an_environment_that_cannot_be_made(trained):
    def make(task):
        raise OSError("no sandbox")

    episode, policy = play(trained, [ANSWER], make=make)
    assert episode.stop_reason == StopReason.ENV_ERROR and "no sandbox" in episode.error and not policy.calls


def test_cancellation_cleans_up_and_passes_through(trained):
    environment = Faulty("step", hang=True)
    policy = ScriptedPolicy(trained, lambda task, sample: [SEARCH])
    rollout = MultiTurn(lambda task: environment, policy, trained, Plain(), config(), SAMPLING, 1.0)

    async def cancelled():
        running = asyncio.create_task(rollout(TASK, 0))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert environment.closed == 1 and policy.sessions[0].closed


def test_overshoot_is_counted(trained):
    class Overshooting(ScriptedPolicy):
        async def generate(self, *arguments, **named):
            generation = await super().generate(*arguments, **named)
            extra = self.tokenizer.encode("\n")
            tokens = generation.tokens.tolist() + extra
            self.sessions[0].tokens += extra
            return dataclasses.replace(
                generation, tokens=np.array(tokens, np.int32), overshoot_bytes=1,
                logprobs=np.zeros(len(tokens), np.float32), policy_versions=np.zeros(len(tokens), np.int32),
            )  # fmt: skip

    policy = Overshooting(trained, lambda task, sample: [ANSWER])
    cfg = config()
    rollout = MultiTurn(lambda t: SearchAttempt(t, cfg, RETRIEVER), policy, trained, Plain(), cfg, SAMPLING, 1.0)
    episode = asyncio.run(rollout(TASK, 0))
    assert episode.reward == 1.0 and episode.metrics["overshoots"] == 1 and episode.text.endswith(ANSWER)
    assert episode.trajectories[0].tokens.tolist() == policy.sessions[0].tokens


def test_the_engine_is_told_what_is_urgent(trained):
    policy, cfg = ScriptedPolicy(trained, lambda task, sample: [ANSWER]), config()
    make = lambda task: SearchAttempt(task, cfg, RETRIEVER)  # noqa: E731
    rollout = MultiTurn(make, policy, trained, Plain(), cfg, SAMPLING, 1.0, group_size=8)
    asyncio.run(rollout(TASK, 19))
    assert policy.opened == ("t1", 19, 8, "")
    asyncio.run(rollout(dataclasses.replace(TASK, metadata={"domain": "airline"}), 19))
    assert policy.opened == ("t1", 19, 8, "airline")


class _Shaped(SearchAttempt):
    """Search with a composite reward out of `jaxagent.rewards`, and a reward for each turn."""

    turn_rewards = (0.25, 0.75)

    async def verify(self, transcript):
        reward = Composite(
            (
                Part("em", text.em, 1.0, 0.0, 1.0),
                Part("length", partial(soft_overlong, max_tokens=64, buffer_tokens=64), 0.5, -1.0, 0.0, True),
            ),
            shaping_cap=1.0,
        )
        answer = extract_answer(transcript.actions, 1)
        scores = reward(View(TASK, transcript.turns, answer, action_tokens=transcript.action_tokens))
        return Verdict(scores.pop("reward"), scores, self.turn_rewards)


def test_token_counts_reach_the_reward_and_turn_rewards_the_episode(trained):
    shaped = _Shaped(TASK, config(), RETRIEVER)
    episode, _ = play(trained, [SEARCH, ANSWER], make=lambda task: shaped)
    penalty = min(episode.metrics["action_tokens"] / 64, 1.0)  # observations are not the policy's length
    assert episode.rewards == {"em": 1.0, "length": -penalty, "shaping": -0.5 * penalty} and penalty > 0
    assert episode.reward == 1.0 - 0.5 * penalty
    assert episode.turn_rewards == (0.25, 0.75)


@pytest.mark.parametrize(
    ("messages", "came"),
    [
        ("hello", "that is the str 'hello'"),
        (None, "that is None"),
        ([], "that is a list"),
        ([{"role": "user"}], "a dict"),
    ],
)
def test_a_prompt_that_is_no_message_is_told_with_the_class(trained, messages, came):
    class Begun(SearchAttempt):
        async def start(self):
            return messages

    episode, _ = play(trained, [ANSWER], make=lambda task: Begun(task, config(), RETRIEVER))
    assert re.search(rf"Begun.start returned a result .*{came}.* where a list of Message is wanted", episode.error)


def test_a_logprob_that_is_no_number_is_the_engine_s_failure(trained, monkeypatch):
    generate = ScriptedPolicy.generate

    async def broken(self, *arguments, **named):
        generation = await generate(self, *arguments, **named)
        generation.logprobs[-1] = np.nan
        return generation

    monkeypatch.setattr(ScriptedPolicy, "generate", broken)
    cfg = config()
    policy = ScriptedPolicy(trained, lambda task, sample: [ANSWER])
    rollout = MultiTurn(lambda t: SearchAttempt(t, cfg, RETRIEVER), policy, trained, Plain(), cfg, SAMPLING, 1.0)
    episode = asyncio.run(rollout(TASK, 0))
    assert episode.stop_reason == StopReason.ENGINE_ERROR and "log-prob" in episode.error
