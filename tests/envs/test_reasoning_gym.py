"""reasoning-gym's data sets as ours: items, scores, splits, and what differs from one process to the next."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from jaxagent.config import ConfigError
from jaxagent.data.sources import load_tasks
from jaxagent.data_pipelines.sources import Puzzles
from jaxagent.envs import check
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.reasoning_gym.environment import ReasoningGym
from jaxagent.types import StopReason, Task
from tests.envs import games

pytestmark = pytest.mark.slow  # installs packages

COMPOSITE = json.dumps({"datasets": [{"name": name, "weight": 1, "config": {}} for name in ("chain_sum", "lcm")]})
SLOW = {"knight_swap"}  # seconds an item
OF_HASHES = {"isomorphic_strings", "polynomial_multiplication", "ransom_note"}  # other items in each process
NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}  # their answer is an example


@pytest.fixture(scope="module", autouse=True)
def reasoning_gym():
    with games.importable("reasoning_gym"):
        import reasoning_gym

        yield reasoning_gym


def sums():
    return ReasoningGym(make="chain_sum", arguments='{"max_terms": 3}')


def opening(*tasks):
    return Opening(None, tasks, lambda coroutine, timeout_s: asyncio.run(coroutine), lambda line: None)


def task_of(row):
    return Task(row["id"], row["prompt"], tuple(row["answers"]), metadata=row["metadata"])


def play(config, task, text):
    async def run(attempt):
        prompt = await attempt.start()
        step = await attempt.step(text)
        verdict = await attempt.verify(Transcript("", ((text, ""),)))
        await attempt.close()
        return prompt, step, verdict

    with config.open(opening(task)) as attempt_at:
        return asyncio.run(run(attempt_at(task)))


@pytest.mark.parametrize(
    ("make", "arguments"), [("chain_sum", '{"max_terms": 3}'), ("composite", COMPOSITE), ("countdown", "{}")]
)
def test_the_score_is_the_data_sets(reasoning_gym, make, arguments):
    config = ReasoningGym(make=make, arguments=arguments)
    dataset = config.dataset(5, 12)
    for row in config.tasks(5, 10, 2)["heldout"]:
        item = dataset[row["metadata"]["index"]]
        for answer in (item["answer"], f"{item['answer']} or so", "17", None, ""):
            text = "I do not know." if answer is None else f"<answer>1</answer> No: <answer> {answer} </answer>"
            prompt, step, verdict = play(config, task_of(row), text)
            assert prompt[-1].content == f"{item['question']}\n" and step.stop_reason == StopReason.ANSWER
            theirs = dataset.score_answer(answer, item)
            assert verdict.reward == verdict.components["score"] == theirs
            assert verdict.components["solved"] == float(theirs >= 1)


def test_its_own_answer_earns_1_and_nothing_earns_0():
    task = task_of(sums().tasks(0, 3, 1)["heldout"][0])
    with sums().open(opening(task)) as attempt_at:
        proof = asyncio.run(check.check(sums(), attempt_at, task))
    assert (proof["oracle"], proof["idle"], proof["error"]) == (1.0, 0.0, "")


def test_an_answer_that_was_cut_is_none():
    row = sums().tasks(0, 3, 1)["heldout"][0]
    cut = f"<answer>{row['answers'][0]}"
    assert play(sums(), task_of(row), cut)[2].reward == sums().dataset(0, 4).score_answer(
        None, {**sums().item(0, 4, 3)}
    )


def test_no_question_is_both_training_and_held_out(reasoning_gym, tmp_path):
    """Seeds alone do not part them: seed 1 begins with item 1 of seed 0."""
    one, other = (reasoning_gym.create_dataset("chain_sum", seed=seed, size=9) for seed in (0, 1))
    assert [one[i]["question"] for i in range(1, 9)] == [other[i]["question"] for i in range(8)]
    tiny = ReasoningGym(
        make="chain_sum", arguments='{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
    )
    Puzzles(num_train=60, num_heldout=20).write(tmp_path / "tiny", 0, tiny)

    def questions(split):
        source = load_tasks(tmp_path / "tiny", split, False)
        return [source[i].prompt for i in range(len(source))]

    train, heldout = questions("train"), questions("heldout")
    assert len({*train, *heldout}) == len(train) + len(heldout) < 80 and 0 < len(heldout) <= 20 < len(train)


def test_every_data_set_of_the_package_is_made_and_scores_its_own_answers(reasoning_gym):
    """A name that a later version adds is tried here; its items are the same in another process, or it is known."""
    from reasoning_gym.factory import DATASETS

    names = sorted({*DATASETS} - SLOW - {"composite"})
    assert len(names) > 90
    rows = {name: ReasoningGym(make=name).tasks(3, 2, 1)["heldout"][:1] for name in names}
    for name, (row,) in rows.items():
        item, dataset = ReasoningGym(make=name).item(3, 3, 2), ReasoningGym(make=name).dataset(3, 3)
        assert dataset.score_answer(item["answer"], item) == 1.0 or name in NO_ANSWER, name
        assert item["question"] == row["prompt"] and len(row["answers"]) == (item["answer"] is not None)
    code = (
        "import json, sys\nfrom jaxagent.envs.reasoning_gym.environment import ReasoningGym\n"
        "sys.path[:] = json.loads(sys.argv[1])\n"
        "names = json.loads(sys.argv[2])\n"
        "print(chr(10) + json.dumps({n: ReasoningGym(make=n).item(3, 3, 2)['question'] for n in names}))\n"
    )
    env = {**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [json.dumps(sys.path), json.dumps(names)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    elsewhere = json.loads(done.stdout.splitlines()[-1])
    assert {name for name, (row,) in rows.items() if elsewhere[name] != row["prompt"]} <= OF_HASHES


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"make": "no_such_set"}, "no_such_set"),
        ({"make": "chain_sum", "arguments": '{"colour": 1}'}, "colour"),
        ({"make": "chain_sum", "arguments": '{"min_terms": 0}'}, "min_terms"),
        ({"make": "chain_sum", "arguments": '{"seed": 1}'}, "seed"),
        ({"make": ""}, "name a data set"),
        ({"make": "composite"}, "at least one dataset"),
    ],
)
def test_what_cannot_be_made_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        ReasoningGym(**settings).tasks(0, 2, 1)


def test_too_few_questions_are_refused():
    constant = ReasoningGym(
        make="chain_sum", arguments='{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
    )
    with pytest.raises(ConfigError, match="all are held out"):
        constant.tasks(0, 1, 400)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task("a", "1 + 1", (), metadata={}), "names no item"),
        (Task("a", "1 + 1", (), metadata={"seed": 0, "size": 3, "index": 3}), "names no item"),
        (Task("a", "1 + 1", (), metadata={"seed": 0, "size": 3, "index": 1}), "PYTHONHASHSEED=0"),
    ],
)
def test_tasks_of_another_data_set_are_refused_at_start(task, words):
    with pytest.raises(ConfigError, match=words), sums().open(opening(task)):
        pass


def test_an_answer_at_which_the_score_fails_is_the_policys_mistake():
    primes = ReasoningGym(make="prime_factorization")
    row = primes.tasks(0, 3, 1)["heldout"][0]
    for text, reward in (("<answer>two and three</answer>", 0.0), (f"<answer>{row['answers'][0]}</answer>", 1.0)):
        assert play(primes, task_of(row), text)[2].reward == reward


@pytest.mark.parametrize(
    ("score", "error", "words"),
    [
        (float("nan"), ValueError, "finite"),
        (None, ValueError, "finite"),
        (RuntimeError("broken"), RuntimeError, "broken"),
    ],
)
def test_a_score_that_is_none_is_a_failure(monkeypatch, score, error, words):
    row = sums().tasks(0, 3, 1)["heldout"][0]

    def score_answer(self, answer, entry):
        if isinstance(score, Exception):
            raise score
        return score

    monkeypatch.setattr(type(sums().dataset(0, 4)), "score_answer", score_answer, raising=False)
    with pytest.raises(error, match=words):
        play(sums(), task_of(row), "<answer>1</answer>")
