"""ReSearch's protocol and reward: numbers by hand (each is the published function's output too), episodes, settings."""

import asyncio

import pytest

from data_pipelines import geography
from jaxagent.config import ConfigError
from jaxagent.data import sources
from jaxagent.data_pipelines.sources import Geography
from jaxagent.envs.base import Transcript
from jaxagent.envs.search import research
from jaxagent.envs.search.environment import PROTOCOLS, Search, SearchAttempt, render_prompt
from jaxagent.envs.search.retriever.base import Passage
from jaxagent.envs.search.rewards import ExactMatch
from jaxagent.rewards.view import View
from jaxagent.rollout import demonstrations
from jaxagent.types import StopReason, Task, TokenKind

THINK, SEARCHED = "<think> t </think>", "<search> q </search> <result>\nred\n</result>"


def box(answer: str) -> str:
    return f"<answer> The final answer is \\[ \\boxed{{{answer}}} \\] </answer>"


def reward(text: str, *answers: str, ended=StopReason.ANSWER) -> dict[str, float]:
    return research.ReSearch()(View(Task("t", "q", answers), ((text, ""),), ended=ended))


@pytest.mark.parametrize(
    ("text", "answers", "wanted"),
    [
        (THINK + box("red car"), ["the red car"], 1.0),
        (THINK + SEARCHED + THINK + box("red"), ["red car"], 2 / 3),  # P = 1, R = 1/2
        (THINK + box("red car"), ["blue", "a car"], 2 / 3),  # the best of both; P = 1/2, R = 1
        (THINK + box("green"), ["red"], 0.1),
        (THINK + box(""), ["red"], 0.1),
        (THINK + box("yes it is"), ["yes"], 0.1),  # "yes" is compared as a whole
        (THINK + box("yes"), ["Yes"], 1.0),
        (box("red"), ["red"], 0.0),  # no thought
        (THINK + "<think>" + box("red"), ["red"], 0.0),
        (THINK + box("red") + box("red"), ["red"], 0.0),
        (THINK + "<answer> red </answer>", ["red"], 0.0),  # no box
        (THINK + "</answer> \\boxed{red} <answer>", ["red"], 0.0),
        (THINK + "<search> q </search>" + box("red"), ["red"], 0.0),  # no result
        (THINK + "<search> q <result> r </search></result>" + box("red"), ["red"], 0.0),
        (THINK + "<answer> \\boxed{red </answer>" + "}", ["red"], 0.0),  # the box ends behind the answer
        (THINK + box("\\frac{red}{car}"), ["frac redcar"], 0.1),  # braces within a box are its own
        (THINK + "<answer> \\boxed red$ and \\boxed{car} </answer>", ["red"], 1.0),  # as published
        ("text outside of tags " + box("red") + " </think><think>", ["red"], 1.0),  # as published: order is free
    ],
)
def test_rewards_by_hand(text, answers, wanted):
    assert reward(text, *answers)["reward"] == pytest.approx(wanted, abs=1e-12)


def test_an_attempt_that_was_cut_has_nothing():
    for ended in (StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT, None):
        scores = reward(THINK + box("red"), "red", ended=ended)
        assert (scores["reward"], scores["em"], scores["well_formed"], scores["answered"]) == (0.0, 0.0, 1.0, 0.0)


def test_components():
    scores = reward(THINK + SEARCHED + THINK + box("the red"), "red")
    assert scores == {"reward": 1.0, "em": 1.0, "f1": 1.0, "answered": 1.0, "well_formed": 1.0, "retrieval_hit": 1.0}


@pytest.mark.parametrize(
    "piece", ["<think>", "</think>", "<search>", "</search>", "<result>", "<answer>", "\\boxed{", "{"]
)
def test_hostile_texts_cost_time_that_grows_with_their_length_alone(piece):
    for text in (
        piece * 100_000,
        THINK + f"<answer> \\boxed{{ {piece * 100_000} </answer>",
        piece * 100_000 + "</search>",
    ):
        assert reward(text, "red")["reward"] in (0.0, 0.1)
        research.parse_action(text)


def test_the_prompts_letter_for_letter():
    how = (
        "are enclosed within <think> </think> and <answer> </answer> tags respectively, and the search query and "
        "result are enclosed within <search> </search> and <result> </result> tags respectively. For example, <think> "
        "This is the reasoning process. </think> <search> search query here </search> <result> search result here "
        "</result> <think> This is the reasoning process. </think> <answer> The final answer is \\[ "
        "\\boxed{answer here} \\] </answer>. In the last part of the answer, the final exact answer is enclosed "
        "within \\boxed{} with latex format."
    )
    chat = Search(protocol="research", prompt="research_chat", reward=research.ReSearch())
    system, user = chat.messages("Who is it")
    assert (system.role, user.role, user.content) == ("system", "user", "Who is it?")
    assert system.content.startswith("You are a helpful assistant that can solve the given question step by step with")
    assert system.content.endswith(f"topics if needed. The reasoning process and answer {how}")
    base = render_prompt("research", "Who is it?")
    assert base.startswith("A conversation between User and Assistant. The user asks a question, and the assistant")
    assert base.endswith(f"topics if needed. The reasoning process and answer {how} User: Who is it?. Assistant:")


class Engine:
    """Answers every query with two passages, and remembers them."""

    def __init__(self):
        self.asked = []

    async def search(self, queries, topk):
        self.asked += queries
        return [[Passage("0", '"Ghana"', "Its capital is Accra."), Passage("1", '"Accra"', "A city.")][:topk]]

    async def close(self):
        """Nothing is open."""


ENVIRONMENT = Search(protocol="research", prompt="plain", reward=research.ReSearch(), max_turns=3)


def play(*actions):
    async def played():
        engine = Engine()
        attempt = SearchAttempt(Task("t", "Capital of Ghana?", ("Accra",)), ENVIRONMENT, engine)
        assert attempt.stop_strings == ("</search>",)
        turns, step = [], None
        for action in actions:
            step = await attempt.step(action)
            turns.append((action, step.observation.text if step.observation else ""))
            kinds = {kind for _, kind in step.observation.parts} if step.observation else set()
        verdict = await attempt.verify(Transcript("", tuple(turns), ended=step.stop_reason))
        return turns, step.stop_reason, verdict, attempt.counters, engine.asked, kinds

    return asyncio.run(played())


def test_an_episode_by_hand():
    search = "<think> <search> not this </think> <search> capital of Ghana </search>"
    turns, reason, verdict, counters, asked, _ = play(search, THINK + box("Accra"))
    assert turns[0][1] == ' <result>\n"Ghana"\nIts capital is Accra.\n\n"Accra"\nA city.\n</result>'
    assert asked == ["capital of Ghana"] and reason is StopReason.ANSWER and counters["searches"] == 1
    assert verdict.reward == 1.0  # as published: a <search> within a search passes
    verdict = play("<think> t </think> <search> capital of Ghana </search>", THINK + box("Accra"))[2]
    assert verdict.reward == 1.0 and verdict.components["em"] == 1.0 and verdict.components["retrieval_hit"] == 1.0


def test_a_search_for_nothing_asks_nobody_and_the_last_search_is_not_carried_out():
    turns, reason, _, counters, asked, _ = play("<search>  </search>", "</search>", "<search> q </search>")
    assert [shown for _, shown in turns] == [" <result>\ninvalid query\n</result>"] * 2 + [""]
    assert asked == [] and reason is StopReason.TURN_LIMIT and counters["invalid_actions"] == 2
    assert play("<search> </search>")[-1] == {TokenKind.WARNING}
    shown = ENVIRONMENT.observation("<search> </search>", turns[0][1])
    assert shown.parts[0][1] == TokenKind.WARNING
    assert (
        ENVIRONMENT.observation("<search> a</search>", " <result>\nx\n</result>").parts[0][1] == TokenKind.OBSERVATION
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protocol": "research", "reward": research.ReSearch()}, "env.prompt='search_r1' tells"),
        ({"prompt": "research"}, "env.prompt='research' tells the policy of the protocol 'research'"),
        ({"prompt": "plain", "protocol": "research", "reward": ExactMatch()}, "env.reward=ExactMatch cannot read"),
        ({"prompt": "plain", "reward": research.ReSearch()}, "env.reward=ReSearch cannot read"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Search(**settings)


@pytest.mark.slow  # reads the list of all cities
def test_demonstrations_of_the_world_are_written_in_the_protocol(tmp_path):
    source = Geography(num_cities=200, num_curriculum=4, num_demonstrations=40, early_answer_frac=0.5)
    assert "protocol" not in source.settings(0, Search()) and source.settings(0, ENVIRONMENT)["protocol"] == "research"
    geography.write(tmp_path / "data", **source.settings(0, ENVIRONMENT))
    protocol, kinds = PROTOCOLS["research"], set()
    for row in demonstrations.load(tmp_path / "data/full.jsonl"):
        *searches, last = row["turns"]
        assert all(protocol.parse(turn["action"])[0] == "search" for turn in searches)
        assert protocol.parse(last["action"])[0] == "answer"
        answer = research.boxed_answer(last["action"]).strip()
        turns = tuple((turn["action"], turn["observation"]) for turn in row["turns"])
        view = View(Task("t", "q", (answer,)), turns, ended=StopReason.ANSWER)
        assert research.ReSearch()(view)["reward"] == 1.0
        kinds.add(len(searches))
    assert kinds == {1, 2}
    assert len(sources.load_tasks(tmp_path / "data", "train")) > 100
