"""Search-R1's verifier: its answer, its format, the two published reward profiles. Pure functions on text.

See Jin et al., "Search-R1" (https://arxiv.org/abs/2503.09516). The functions repeat the published scores number for
number, oddities included; where an oddity matters, the docstring says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.config import RewardConfig
from jaxagent.envs import tags
from jaxagent.rewards.format import follows
from jaxagent.rewards.text import exact_match, sub_exact_match

ANSWER, INFORMATION = tags.pair("answer"), tags.pair("information")

# (state, tag) -> state, see `rewards.format`. (The published check also counts opening and closing tags; no text that
# this table accepts can fail that.)
MOVES = {
    ("start", "<think>"): "in_think",
    ("in_think", "</think>"): "after_think",
    ("after_think", "<search>"): "in_search",
    ("in_search", "</search>"): "after_search",
    ("after_search", "<information>"): "in_information",
    ("in_information", "</information>"): "information",
    ("information", "<think>"): "in_think",
    ("after_think", "<answer>"): "in_answer",
    ("in_answer", "</answer>"): "end",
}


def extract_answer(text: str, min_answers: int) -> str | None:
    """The last <answer> of `text`, stripped; None when there are fewer than `min_answers`.

    As published, `text` is prompt + response and `min_answers` 2, because the prompt's example is one. (The full
    published prompt matches twice, "<answer> and </answer>" too, so without any answer of the policy's own it yields
    "Beijing". With `min_answers` 1 and only the policy's text this cannot happen.)
    """
    found = tags.inside(*ANSWER, text)
    return found[-1].strip() if len(found) >= min_answers and found else None


def well_formed(response: str) -> bool:
    """True when the response is (think search information)* think answer, closed, with nothing in between.

    `response` is everything after the prompt, observations included and end-of-sequence text removed.
    """
    return follows(MOVES, response)


def retrieval_hit(response: str, answers: Sequence[str]) -> bool:
    """True when a normalised gold answer stands inside one of the <information> blocks."""
    return any(sub_exact_match(block, answers) for block in tags.inside(*INFORMATION, response))


def score(config: RewardConfig, answer_text: str, response: str, answers: Sequence[str]) -> dict[str, float]:
    """The trained reward and its components.

    Args:
      config: the profile and its constants. "em": 1 for an exact match, else 0. "em_format": see `format_score`.
      answer_text: where the answer is looked for: prompt + response as published, or the policy's own text.
      response: everything after the prompt.
      answers: gold answers.

    Returns:
      "reward" (what is trained), "em", "sub_em", "answered", "well_formed", "retrieval_hit", each in [0, 1].
    """
    prediction = extract_answer(answer_text, config.min_answers)
    matched = prediction is not None and exact_match(prediction, answers)
    valid, hit = well_formed(response), retrieval_hit(response, answers)
    reward = float(matched) if config.profile == "em" else format_score(config, prediction, matched, valid, hit)
    return {
        "reward": reward,
        "em": float(matched),
        "sub_em": float(prediction is not None and sub_exact_match(prediction, answers)),
        "answered": float(prediction is not None),
        "well_formed": float(valid),
        "retrieval_hit": float(hit),
    }


def format_score(config: RewardConfig, prediction: str | None, matched: bool, valid: bool, hit: bool) -> float:
    """The format-aware profile with structure score s, final format score f, retrieval score r:

    |               | well formed                | not well formed |
    | ------------- | -------------------------- | --------------- |
    | exact match   | 1                          | 1 - s           |
    | other answer  | s, + r if retrieval hit    | f               |
    | no answer     | s, + r if retrieval hit    | 0               |
    """
    if matched:
        return 1.0 if valid else 1.0 - config.structure_score
    if valid:
        return config.structure_score + (config.retrieval_score if hit else 0.0)
    return 0.0 if prediction is None else config.final_format_score
