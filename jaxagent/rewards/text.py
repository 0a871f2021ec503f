"""Rewards that compare an answer with gold answers as text: exact match, substring, token F1; and the format of a text.

Rajpurkar et al., "SQuAD" (https://arxiv.org/abs/1606.05250). Every comparison takes the best of several gold answers.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from jaxagent.rewards.view import View

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only: curly quotes survive, as published


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces (Rajpurkar et al., SQuAD)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """True when the normalised prediction is one of the normalised gold answers."""
    return normalize_answer(prediction) in {normalize_answer(answer) for answer in answers}


def sub_exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """True when a normalised gold answer stands inside the normalised prediction.

    As published, a match is one of characters ("art" stands in "party"), and a gold answer of which nothing is left
    ("A") stands in every prediction. Good for evaluation; as a reward it pays for answers that list everything.
    """
    prediction = normalize_answer(prediction)
    return any(normalize_answer(answer) in prediction for answer in answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 over the gold answers, in [0, 1]: 2 P R / (P + R) of normalised words, counted with multiplicity.

    When no words are left of one side, it is 1 if none are left of the other and else 0 (SQuAD 2.0's rule; with
    SQuAD 1.1's, an exact match of "A" with "the" had F1 0). HotpotQA's rule, by which a yes, no or noanswer on one side
    alone has F1 0, is not in it: "no" and "no one" share a word. ReSearch's reward has that rule.
    """
    return max((_f1(prediction, answer) for answer in answers), default=0.0)


def _f1(prediction: str, answer: str) -> float:
    predicted, gold = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not predicted or not gold:
        return float(predicted == gold)
    common = (Counter(predicted) & Counter(gold)).total()
    return 2 * common / (len(predicted) + len(gold))


def em(view: View) -> float:
    """1 for an exact match, else 0; no answer is 0."""
    return float(view.answer is not None and exact_match(view.answer, view.task.answers))


def sub_em(view: View) -> float:
    """1 when a gold answer stands inside the answer, else 0."""
    return float(view.answer is not None and sub_exact_match(view.answer, view.task.answers))


def f1(view: View) -> float:
    """Token F1 in [0, 1]; no answer is 0."""
    return 0.0 if view.answer is None else token_f1(view.answer, view.task.answers)


Moves = Mapping[tuple[str, str], str]


def follows(moves: Moves, text: str, *, start: str = "start", end: str = "end") -> bool:
    """Whether a text has a format: whether its tags move a finite-state machine from `start` to `end`.

        MOVES = {("start", "<think>"): "in_think", ("in_think", "</think>"): "after_think", ...}
        follows(MOVES, "<think>hm</think><answer>7</answer>")

    The tags are those that the table (state, tag) -> state names; anything else, "<b>" too, is text, which is white
    space but in states whose names start with "in_". What has no move is not in the format: nested, unclosed, repeated
    and missing tags need no rules of their own.
    """
    tags = sorted({tag for _, tag in moves}, key=lambda tag: (-len(tag), tag))  # of two tags that fit, the longer one
    state, at = start, 0
    for tag in re.finditer("|".join(map(re.escape, tags)), text):
        if not _allowed(text[at : tag.start()], state) or (state, tag[0]) not in moves:
            return False
        state, at = moves[state, tag[0]], tag.end()
    return _allowed(text[at:], state) and state == end


def _allowed(text: str, state: str) -> bool:
    return state.startswith("in_") or not text.strip()
