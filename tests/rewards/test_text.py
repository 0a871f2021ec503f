"""Text comparisons, by hand and by properties. (The published functions: tests/envs/search/test_search_rewards.py.)"""

import re
import string
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.rewards import text
from jaxagent.rewards.view import View
from jaxagent.types import Task


def view(answer, *gold) -> View:
    return View(Task("t", "q", tuple(gold)), (("action", ""),), answer)


def test_the_best_of_several_gold_answers_counts():
    assert text.token_f1("New York City", ["London", "York City", "York"]) == pytest.approx(0.8)
    assert text.token_f1("anything", []) == 0.0


def test_views_without_an_answer_score_nothing_and_with_one_the_three_scores():
    assert (text.em(view(None, "")), text.sub_em(view(None, "")), text.f1(view(None, ""))) == (0.0, 0.0, 0.0)
    v = view("It is Accra.", "Accra")
    assert (text.em(v), text.sub_em(v), text.f1(v)) == (0.0, 1.0, 0.5)
    v = view("The Accra!", "Lomé", "accra")
    assert (text.em(v), text.sub_em(v), text.f1(v)) == (1.0, 1.0, 1.0)


def reference_f1(prediction: str, gold: str) -> float:
    """SQuAD's description step by step: precision and recall of the bags of words."""
    bags = []
    for side in (prediction, gold):
        side = "".join(c for c in side.lower() if c not in string.punctuation)
        bags.append(Counter(re.sub(r"\b(a|an|the)\b", " ", side).split()))
    sizes = [sum(bag.values()) for bag in bags]
    if 0 in sizes:
        return float(sizes == [0, 0])
    common = sum(min(count, bags[1][word]) for word, count in bags[0].items())
    if common == 0:
        return 0.0
    precision, recall = common / sizes[0], common / sizes[1]
    return 2 * precision * recall / (precision + recall)


WORDS = st.lists(st.sampled_from(["the", "cat", "Cat,", "sat", "a", "mat", "7", "-"]), max_size=8).map(" ".join)


@settings(deadline=None)
@given(WORDS, WORDS)
def test_token_f1_is_the_harmonic_mean_of_precision_and_recall(a, b):
    assert text.token_f1(a, [b]) == pytest.approx(reference_f1(a, b), abs=1e-12)
    assert text.token_f1(a, [b]) == text.token_f1(b, [a])
    if text.exact_match(a, [b]):
        assert text.token_f1(a, [b]) == 1.0
