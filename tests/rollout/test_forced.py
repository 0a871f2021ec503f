"""Forced tool calls: keyed, as often as asked, and never an action token."""

import asyncio
import dataclasses

import numpy as np
from scripted import ScriptedPolicy

from jaxagent.config import SamplingConfig
from jaxagent.envs.search.environment import TOOL_PREFIXES, Search, SearchAttempt
from jaxagent.envs.search.retriever.backends import Bm25Config
from jaxagent.envs.search.retriever.base import Passage
from jaxagent.envs.search.retriever.bm25 import Bm25
from jaxagent.envs.search.rewards import ExactMatch
from jaxagent.rollout.episode import NEVER, ForcedTools
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.types import StopReason, Task, TokenKind

TASK = Task("t1", "What is the calling code of Ghana?", ("233",))
RETRIEVER = Bm25([Passage("0", "Ghana", "The calling code of Ghana is 233.")])
CONFIG = Search(
    prompt="plain", max_turns=3, turn_tokens=60, observation_tokens=300, context_tokens=1000, episode_timeout_s=5.0,
    reward=ExactMatch(min_answers=1), retriever=Bm25Config(topk=1),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Scripted(ForcedTools):
    """Forces what it is told to, turn by turn."""

    prefixes: tuple[str, ...] = ()

    def choose(self, prefixes, task_id, sample, turn):
        assert tuple(prefixes) == TOOL_PREFIXES
        return self.prefixes[turn]


def play(tokenizer, script, forced, config=CONFIG):
    policy = ScriptedPolicy(tokenizer, lambda task, sample: script)
    rollout = MultiTurn(
        lambda task: SearchAttempt(task, config, RETRIEVER),
        policy, tokenizer, Plain(), config, SamplingConfig(1.0, 1.0, 0, 0.0), 2.0, forced=forced,
    )  # fmt: skip
    return asyncio.run(rollout(TASK, 2)), policy


def test_how_often_and_which():
    tools = ForcedTools(0.3, 0)
    found = [tools.choose(("a", "b", "c"), f"t{i}", s, n) for i in range(500) for s in range(4) for n in range(3)]
    for word in "abc":
        assert abs(found.count(word) / len(found) - 0.1) < 0.015
    assert found == [
        tools.choose(("a", "b", "c"), f"t{i}", s, n) for i in range(500) for s in range(4) for n in range(3)
    ]
    other = ForcedTools(0.3, 1)
    assert found != [
        other.choose(("a", "b", "c"), f"t{i}", s, n) for i in range(500) for s in range(4) for n in range(3)
    ]
    for one_apart in (lambda i: ("t", 0, i), lambda i: ("t", i, 0), lambda i: (f"t{i}", 0, 0)):
        assert len({tools.choose("abc", *one_apart(i)) for i in range(60)}) == 4  # each part of the key matters
    assert NEVER.choose(("a",), "t", 0, 0) == "" == tools.choose((), "t", 0, 0)
    assert all(ForcedTools(1.0, 0).choose(("a",), "t", s, 0) == "a" for s in range(50))


def test_forced_words_are_context_and_the_environment_reads_them(trained):
    forced = Scripted(1.0, 0, ("<search>", ""))
    episode, policy = play(trained, [" calling code Ghana</search>", "<answer> 233</answer>"], forced)
    assert (episode.stop_reason, episode.reward, episode.metrics["forced_turns"]) == (StopReason.ANSWER, 1.0, 1.0)
    assert episode.metrics["searches"] == 1.0
    assert "<search> calling code Ghana</search>\n\n<information>" in episode.text
    (trajectory,) = episode.trajectories
    assert trajectory.tokens.tolist() == policy.sessions[0].tokens  # what the engine saw
    prefix = trained.encode("<search>")
    ((first, *_),) = [np.flatnonzero(trajectory.action_mask)]
    before = slice(first - len(prefix), first)
    assert trajectory.tokens[before].tolist() == prefix
    assert (trajectory.kinds[before] == TokenKind.PROMPT).all() and not trajectory.logprobs[before].any()
    assert (trajectory.policy_versions[before] == -1).all()
    sampled = trained.decode(trajectory.tokens[trajectory.action_mask])
    assert sampled == " calling code Ghana</search><answer> 233</answer>"
    assert policy.calls[0][0][-len(prefix) :] == prefix and policy.calls[0][3] == 0


def test_in_a_later_turn_they_follow_the_observation(trained):
    forced = Scripted(1.0, 0, ("", "<answer>"))
    episode, policy = play(trained, ["<search> calling code Ghana</search>", " 233</answer>"], forced)
    assert (episode.reward, episode.metrics["forced_turns"]) == (1.0, 1.0)
    assert trained.decode(policy.calls[1][0]).endswith("</information>\n\n<answer>")


def test_no_room_no_force(trained):
    prompt = len(trained.encode("Question: What is the calling code of Ghana?\n"))
    small = dataclasses.replace(CONFIG, context_tokens=prompt + len(trained.encode("<search>")))
    episode, policy = play(trained, [" x</search>"], Scripted(1.0, 0, ("<search>",)), small)
    assert episode.metrics["forced_turns"] == 0.0 and policy.calls[0][1] >= 1


def test_off_leaves_no_trace(trained):
    episode, _ = play(trained, ["<answer> 233</answer>"], NEVER)
    assert "forced_turns" not in episode.metrics
