"""The verifier against outputs of the published functions, by hand, and by properties."""

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.envs.search.rewards import ExactMatch, ExactMatchAndFormat, extract_answer, retrieval_hit, well_formed
from jaxagent.rewards.text import exact_match, normalize_answer, sub_exact_match
from jaxagent.rewards.view import View
from jaxagent.types import Task

VECTORS = Path(__file__).resolve().parents[3].parent / "shared/data/reference-vectors"
MARK = "<|im_start|>assistant"


def vectors(name: str) -> list[dict]:
    path = VECTORS / name
    if not path.is_file():
        pytest.skip(f"{name} is not beside this checkout")
    return [json.loads(line) for line in path.read_text().splitlines()]


def config(profile="em_format", s=0.2, f=0.1, r=0.0, min_answers=2) -> ExactMatch:
    return ExactMatch(min_answers) if profile == "em" else ExactMatchAndFormat(min_answers, s, f, r)


def score(reward: ExactMatch, text: str, response: str, answers: list[str]) -> dict[str, float]:
    return reward(View(Task("t", "", tuple(answers)), ((response, ""),), prompt=text.removesuffix(response)))


def test_normalize_answer_equals_the_published_function():
    rows = vectors("normalize_answer.jsonl")
    assert len(rows) == 7
    for row in rows:
        assert normalize_answer(row["in"]) == row["out"]


def test_scores_equal_the_published_functions():
    rows = vectors("search_r1_rewards.jsonl")
    assert len(rows) == 10
    for row in rows:
        full, answers = row["solution_str"], row["target"]
        response = full[full.index(MARK) + len(MARK) :].lstrip()
        assert well_formed(response) == row["valid"], row["name"]
        assert extract_answer(full, 2) == row["extracted"], row["name"]
        assert retrieval_hit(response, answers) == row["retrieval_correct"], row["name"]
        for column, constants in {
            "qa_em": config("em"),
            "qa_em_format_0.2_0.1_0": config(),
            "qa_em_format_0.2_0.1_0.1": config(r=0.1),
            "qa_em_format_slime_default": config(s=0.0, f=0.0),
        }.items():
            scores = score(constants, full, response, answers)
            assert scores["reward"] == row[column], (row["name"], column)
            assert scores["sub_em"] == row["qa_subem"], row["name"]


def test_every_order_of_blocks_against_the_published_one():
    """(think search information)* think answer, as a regular expression over all 5,460 orders of up to six blocks."""
    names = {"t": "think", "s": "search", "i": "information", "a": "answer"}
    for size in range(1, 7):
        for order in itertools.product(names, repeat=size):
            response = "".join(f"<{names[n]}>x</{names[n]}>\n" for n in order)
            assert well_formed(response) == bool(re.fullmatch("(tsi)*ta", "".join(order))), order


def test_end_of_sequence_text_after_the_answer_is_not_well_formed():
    good = "<think>a</think><answer>b</answer>"
    assert well_formed(good) and well_formed(good + "\n")
    assert not well_formed(good + "<|im_end|>")


def test_response_only_counts_a_single_answer():
    scores = score(config("em", min_answers=1), "<answer> Accra</answer>", "<answer> Accra</answer>", ["Accra"])
    assert scores["reward"] == 1.0
    assert score(config("em", min_answers=2), "<answer> Accra</answer>", "", ["Accra"])["reward"] == 0.0
    assert extract_answer("no tags", 0) is None


def test_retrieval_score_only_for_well_formed_wrong_answers():
    block = "<think>t</think><search>q</search><information>Accra is it</information><think>t</think>"
    wrong = block + "<answer>Tema</answer>"
    assert score(config(r=0.3, min_answers=1), wrong, wrong, ["Accra"])["reward"] == pytest.approx(0.5)
    right = block + "<answer>the accra!</answer>"
    assert score(config(r=0.3, min_answers=1), right, right, ["Accra"])["reward"] == 1.0


@given(st.text(), st.text())
def test_normalisation_is_stable_and_exact_match_implies_sub_match(a, b):
    assert exact_match(a, [a]) and sub_exact_match(a + " " + b, [""])
    assert normalize_answer(a) == " ".join(normalize_answer(a).split())
    if exact_match(a, [b]):
        assert sub_exact_match(a, [b])


@given(st.lists(st.sampled_from(["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "x", " "])))
def test_a_well_formed_response_ends_with_its_only_answer(pieces):
    response = "".join(pieces)
    if well_formed(response):
        assert response.count("<answer>") == 1 and response.rstrip().endswith("</answer>")
        assert extract_answer(response, 1) is not None
