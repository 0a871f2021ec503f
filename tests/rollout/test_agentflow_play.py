"""AgentFlow's episodes as trajectories: which calls of the planner are trained, and what a failing role leaves."""

import asyncio
import dataclasses

import pytest
from scripted import ScriptedPolicy

from configs import agentflow
from jaxagent.config import SamplingConfig
from jaxagent.config.choice import Choice
from jaxagent.envs.agentflow.attempt import AgentFlowAttempt
from jaxagent.envs.agentflow.environment import AgentFlow
from jaxagent.envs.agentflow.reading import GENERATOR
from jaxagent.envs.cast import NoRoom
from jaxagent.roles.base import Reply, TextRole
from jaxagent.rollout.cast import Roles
from jaxagent.rollout.play import Play
from jaxagent.rollout.templates import Plain
from jaxagent.types import StopReason, Task

TASK = Task("t", "Of 126 shells Victor sells 72. How many are left?", ("54",), "one_step/take")
STEP = f"Context:\nSub-Goal: 126 - 72\nTool Name: {GENERATOR}"
# Conversations in the order of their beginning: plan, step, executor, generator, verifier, final output.
SAID = {0: [" take"], 1: [STEP], 5: [" \\boxed{54}"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Says(TextRole):
    """Says a text, or raises an exception."""

    text: str = ""

    def speaker(self, task, sample, number):
        return self

    async def reply(self, messages, stop_strings, max_tokens):
        if not self.text:
            raise ConnectionError("refused")
        return Reply(self.text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(Says):
    """A role whose context has no room."""

    async def reply(self, messages, stop_strings, max_tokens):
        raise NoRoom("too long")


async def no_sandbox():
    raise AssertionError("nobody wrote a program")


def play(tokenizer, roles=None, said=SAID, **changes):
    raw = agentflow.get_config().env
    fields = {name: value for name, value in raw.items() if name not in ("name", "sandbox")}
    config = AgentFlow(**fields | {"turn_tokens": 100, "context_tokens": 400} | changes)
    roles = {
        name: Choice("jaxagent.roles:ROLES").make(f"arithmetic_{name}")
        for name in ("executor", "verifier", "generator")
    } | (roles or {})
    policy = ScriptedPolicy(tokenizer, lambda task, sample: said)
    rollout = Play(
        lambda task, cast: AgentFlowAttempt(task, cast, config, no_sandbox),
        policy,
        tokenizer,
        Plain(),
        config,
        SamplingConfig(1.0, 1.0, 0, 0.0),
        2.0,
        Roles(roles, {name: role.speaker for name, role in roles.items()}),
    )
    return asyncio.run(rollout(TASK, 0)), policy


@pytest.mark.parametrize(
    ("changes", "sessions", "heard"),
    [
        (dict(trained="all"), [0, 1, 2], 0),
        (dict(trained="without_final"), [0, 1], 1),
        (dict(trained="steps"), [1], 2),
        (dict(trained="all", prompt_tokens=30), [], 3),
    ],
)
def test_trained_calls_are_trajectories_and_the_others_are_only_heard(trained, changes, sessions, heard):
    episode, policy = play(trained, **changes)
    assert (episode.stop_reason, episode.reward) == (StopReason.ANSWER, 1.0)
    assert [t.tokens.tolist() for t in episode.trajectories] == [policy.sessions[i].tokens for i in sessions]
    asides = [talk for talk in episode.heard if talk.role == "policy"]
    assert len(asides) == heard and episode.metrics["trajectories"] == len(sessions)
    assert [talk.role for talk in episode.heard if talk.role != "policy"] == ["executor", "generator", "verifier"]
    assert episode.metrics["generator_calls"] == episode.metrics["generator_replies"] == 1
    assert episode.metrics["long_prompts"] == (3 if "prompt_tokens" in changes else 0)


def test_a_role_that_plays_plan_and_final_output(trained):
    episode, policy = play(
        trained, {"planner": Says(text="\\boxed{54}")}, {1: [STEP]}, trained="steps", planner_role=True
    )
    assert episode.reward == 1.0 and len(episode.trajectories) == len(policy.sessions) == 1
    assert [talk.role for talk in episode.heard] == ["planner", "executor", "generator", "verifier", "planner"]


def test_a_reply_that_is_cut_is_used_as_it_is(trained):
    episode, _ = play(trained, said=SAID | {5: ["and so it is " * 50 + "\\boxed{54}"]})
    assert episode.stop_reason is StopReason.TOKEN_LIMIT and episode.metrics["cut_replies"] == 1
    assert episode.reward == 0.0 and len(episode.trajectories) == 3


@pytest.mark.parametrize("role", ["executor", "verifier", "generator", "judge"])
def test_a_role_that_fails_is_a_failed_episode_and_no_reward(trained, role):
    changes = {"judge": True} if role == "judge" else {}
    said = SAID | {5: [" 54"]}  # not in a box: the judge is asked
    episode, _ = play(trained, {role: Says()}, said, **changes)
    assert episode.stop_reason is StopReason.ENV_ERROR and episode.reward == 0.0 and episode.rewards == {}
    assert role in episode.error and "refused" in episode.error


@pytest.mark.parametrize(("text", "stop"), [("VERDICT: True", StopReason.TURN_LIMIT), ("Right!", StopReason.ENV_ERROR)])
def test_a_judge_without_a_verdict_is_a_failure(trained, text, stop):
    episode, _ = play(trained, {"judge": Says(text=text)}, SAID | {5: [" 54"]}, judge=True)
    assert episode.stop_reason is stop and episode.reward == (stop is StopReason.TURN_LIMIT)


@pytest.mark.parametrize("role", ["executor", "verifier", "generator"])
def test_a_role_whose_context_the_policy_fills_ends_the_steps_and_the_episode_is_judged(trained, role):
    said = {0: [" take"], 1: [STEP]} | {number: [" \\boxed{54}"] for number in (3, 4, 5)}
    episode, _ = play(trained, {role: Full()}, said)
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.TOKEN_LIMIT, 1.0, "")
    assert episode.metrics["no_room"] == episode.metrics[f"{role}_no_room"] == 1 and len(episode.trajectories) == 3


def test_a_judge_whose_context_the_answer_fills_is_not_convinced(trained):
    episode, _ = play(trained, {"judge": Full()}, SAID | {5: [" 54"]}, judge=True)
    assert (episode.stop_reason, episode.reward) == (StopReason.TURN_LIMIT, 0.0)
    assert episode.rewards == {"solved": 0.0, "exact": 0.0} and episode.metrics["judge_no_room"] == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noting(Says):
    """Notes what it is shown."""

    shown: list = dataclasses.field(default_factory=list)

    async def reply(self, messages, stop_strings, max_tokens):
        self.shown.append(messages[-1].content)
        return Reply(self.text)


@pytest.mark.parametrize("style", ["full", "compact"])
def test_roles_are_shown_a_bounded_part_of_what_the_policy_writes(trained, style):
    long = "so " * 3_000
    step = f"Context: {long}\nSub-Goal: {long}\nTool Name: {long}"
    roles = {name: Noting(text=f'Conclusion: CONTINUE tool.execute(query="""{long}""")')
             for name in ("executor", "verifier", "generator")}  # fmt: skip
    said = {0: [long]} | {number: [step] for number in range(1, 14)}
    limits = dict(style=style, plan_chars=300, step_chars=100, result_chars=100, turn_tokens=30_000)
    episode, _ = play(trained, roles, said, **limits, context_tokens=90_000, token_budget=0, unknown_tool="nothing")
    assert episode.metrics["steps"] == 3 and not episode.metrics["no_room"], episode.error
    said = {0: [long]} | {number: [step.replace(f"Tool Name: {long}", f"Tool Name: {GENERATOR}")] for number in (1, 5)}
    play(trained, roles, said, **limits, context_tokens=90_000, token_budget=0, max_turns=1)
    assert roles["executor"].shown and len(roles["verifier"].shown) == 4
    assert all(len(text) < 5_000 for name in ("executor", "verifier") for text in roles[name].shown)
