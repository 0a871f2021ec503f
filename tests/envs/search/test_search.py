"""The published protocol, letter for letter: prompt, documents, actions, invalid text, turns."""

import asyncio
import dataclasses

import pytest

from jaxagent.config import ConfigError
from jaxagent.envs.base import Step, Transcript
from jaxagent.envs.search import environment as search
from jaxagent.envs.search.environment import REWARDS, Search
from jaxagent.envs.search.retriever.backends import Bm25Config
from jaxagent.envs.search.retriever.base import Passage
from jaxagent.envs.search.rewards import Efficiency, Judged, Overlong, Shaping
from jaxagent.rewards.judge import Judgement, JudgeSettings
from jaxagent.types import StopReason, Task, TokenKind

TASK = Task("t", "who wrote hamlet", ("William Shakespeare",))
FOUND = [Passage("1", '"Hamlet"', "A play.\nBy Shakespeare. ", 2.0), Passage("2", "Macbeth", "", 1.0)]


class Found:
    def __init__(self, passages):
        self.passages, self.asked = passages, []

    async def search(self, queries, topk):
        self.asked.append((list(queries), topk))
        return [self.passages[:topk] for _ in queries]


def config(prompt="search_r1", max_turns=2, final_turn=False, reward="em", min_answers=2, topk=3, shaping=None):
    return Search(
        prompt=prompt, max_turns=max_turns, final_turn=final_turn, turn_tokens=500, observation_tokens=500,
        context_tokens=4096, episode_timeout_s=60.0, reward=REWARDS[reward](min_answers=min_answers), shaping=shaping,
        retriever=Bm25Config(topk=topk),
    )  # fmt: skip


def play(actions, cfg, retriever):
    environment = search.SearchAttempt(TASK, cfg, retriever)

    async def steps():
        return [await environment.start()] + [await environment.step(action) for action in actions]

    return environment, asyncio.run(steps())


def test_the_published_prompt():
    _, ((message,),) = play([], config(), Found([]))
    assert message.role == "user"
    assert message.content.startswith(
        "Answer the given question. You must conduct reasoning inside <think> and </think>"
    )
    assert "search as many times as your want. If" in message.content
    assert message.content.endswith("For example, <answer> Beijing </answer>. Question: who wrote hamlet?\n")
    assert "\n" not in message.content[:-1] and "  " not in message.content


@pytest.mark.parametrize("question", ["x", " x ", "x?", "x? "])
def test_a_question_ends_in_one_question_mark(question):
    assert search.render_prompt("plain", question) == "Question: x?\n"
    system, user = config(prompt="chat", min_answers=1).messages(question)
    assert (system.role, user.role, user.content) == ("system", "user", "x?") and "<search>" in system.content


def test_documents_are_rendered_as_published():
    retriever = Found(FOUND)
    environment, (_, step) = play(["<think>a</think> <search> hamlet\nauthor </search>"], config(), retriever)
    assert step.observation.parts == (
        (
            '\n\n<information>Doc 1(Title: "Hamlet") A play.\nBy Shakespeare. \n'
            "Doc 2(Title: Macbeth)</information>\n\n",
            TokenKind.OBSERVATION,
        ),
    )
    assert step.observation.role == ""
    assert retriever.asked == [(["hamlet\nauthor"], 3)]
    assert environment.counters == {"searches": 1, "invalid_actions": 0, "empty_searches": 0}


def test_an_empty_result_is_shown_and_counted():
    environment, (_, step) = play(["<search>q</search>"], config(), Found([]))
    assert step.observation.text == "\n\n<information></information>\n\n"
    assert environment.counters["empty_searches"] == 1


def test_invalid_actions_are_warnings():
    environment, (_, step) = play(["I do not know"], config(), Found([]))
    assert step.observation.parts == ((search.INVALID_ACTION, TokenKind.WARNING),)
    assert search.INVALID_ACTION == (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>. "
        "Let me try again.\n"
    )
    assert environment.counters["invalid_actions"] == 1


@pytest.mark.parametrize(("final_turn", "turns"), [(False, 2), (True, 3)])
def test_turn_limit(final_turn, turns):
    retriever = Found(FOUND)
    _, (_, *steps) = play(["<search>q</search>"] * turns, config(final_turn=final_turn), retriever)
    assert [step.stop_reason for step in steps] == [None] * (turns - 1) + [StopReason.TURN_LIMIT]
    assert len(retriever.asked) == turns - 1


def test_an_answer_on_the_last_turn_counts():
    _, (_, *steps) = play(["<search>q</search>", "<answer>a</answer>"], config(), Found(FOUND))
    assert steps[-1] == Step(stop_reason=StopReason.ANSWER)


def verdict(cfg, *turns):
    environment = search.SearchAttempt(TASK, cfg, Found([]))
    prompt = search.render_prompt(cfg.prompt, TASK.prompt)
    return asyncio.run(environment.verify(Transcript(prompt, turns)))


def test_verdicts():
    right = ("<think>x</think><answer>William Shakespeare</answer>", "")
    assert verdict(config(), right).reward == 1.0
    assert verdict(config(min_answers=1), right).reward == 1.0
    assert verdict(config(reward="em_format"), right).reward == 1.0
    assert verdict(config(reward="em_format"), ("<answer>William Shakespeare</answer>", "")).reward == 0.8
    assert "reward" not in verdict(config(), right).components and verdict(config(), right).components["em"] == 1.0


def test_shaping_is_added_under_its_cap_and_reported():
    """1,500 tokens can be sampled; 1,450 are half into the buffer of 100: -.5, times .4. One search repeated: -.5,
    times .2. Together -.3, which a cap of .25 cuts; the outcome and its parts keep their names."""
    shaping = Shaping(Overlong(100, 0.4), Efficiency(0.2, 0.5, 3), cap=0.25)
    cfg = config(min_answers=1, max_turns=2, final_turn=True, shaping=shaping)
    environment, _ = play(["<search>hamlet</search>", "<search>hamlet</search>"], cfg, Found(FOUND))
    turns = (("<search>hamlet</search>", "\n"), ("<answer>William Shakespeare</answer>", ""))
    prompt = search.render_prompt("search_r1", TASK.prompt)
    found = asyncio.run(environment.verify(Transcript(prompt, turns, action_tokens=(1400, 50))))
    assert found.reward == pytest.approx(0.75)
    assert found.components["em"] == 1.0 and found.components["outcome"] == 1.0
    assert found.components["overlong"] == -0.5 and found.components["efficiency"] == -0.5
    assert found.components["shaping"] == -0.25
    with pytest.raises(ConfigError, match=r"overlong\.buffer_tokens must be 1 to 1000"):
        config(shaping=Shaping(Overlong(2000, 0.4)))


def test_a_judge_in_place_of_exact_match():
    class Judge:
        async def ask(self, rubric, material):
            self.asked = dict(material)
            return Judgement(1.0, {"right": 1.0}, 2, ("cut off",))

    settings = JudgeSettings(url="http://x/v1", model="judge")
    cfg = dataclasses.replace(config(min_answers=1), reward=Judged(judge=settings), shaping=Shaping(Overlong(100, 0.4)))
    judge = Judge()

    def judged(*turns):
        attempt = search.SearchAttempt(TASK, cfg, Found([]), judge)
        transcript = Transcript("", turns, action_tokens=(10,) * len(turns))
        return asyncio.run(attempt.verify(transcript)), attempt.counters

    found, counters = judged(("<answer> the bard of Avon </answer>", ""))
    assert found.reward == 1.0 and found.components["judged"] == 1.0 and found.components["em"] == 0.0
    assert (counters["judge/valid"], counters["judge/failed"]) == (2, 1)
    assert judge.asked == {"question": TASK.prompt, "reference": "\n".join(TASK.answers), "answer": "the bard of Avon"}
    del judge.asked
    silent, counters = judged(("I give up.", ""))
    assert silent.reward == 0.0 and not hasattr(judge, "asked") and "judge/failed" not in counters


def test_what_was_only_read_is_no_answer():
    read = ("<search>q</search>", "<information><answer>William Shakespeare</answer></information>")
    assert verdict(config(min_answers=1), read).components == {
        "em": 0.0, "sub_em": 0.0, "answered": 0.0, "well_formed": 0.0, "retrieval_hit": 1.0,
    }  # fmt: skip
    told = ("hm", search.INVALID_ACTION)  # it quotes the answer tags; as published they count
    assert verdict(config(min_answers=1), told).components["answered"] == 0.0
    assert verdict(config(min_answers=2), told).components["answered"] == 1.0


def test_a_reward_that_can_only_be_zero_is_refused():
    with pytest.raises(ConfigError, match="min_answers=2"):
        config(prompt="plain", min_answers=2)
    config(prompt="plain", min_answers=1)
    config(prompt="search_r1", min_answers=2)


def test_a_step_is_either_observation_or_end():
    with pytest.raises(ValueError, match="either"):
        Step()
