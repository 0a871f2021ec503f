"""Search-R1's verifier: its answer, its format, the two published rewards, and shaping around them.

See Jin et al., "Search-R1" (https://arxiv.org/abs/2503.09516). The functions repeat the published scores number for
number, oddities included; where an oddity matters, the docstring says so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from jaxagent.config import ConfigError
from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ZeroToOne, between
from jaxagent.envs import tags
from jaxagent.rewards import length, tool_efficiency
from jaxagent.rewards.composite import Composite, Part
from jaxagent.rewards.judge import Item, JudgeSettings, Rubric, judged
from jaxagent.rewards.text import exact_match, follows, sub_exact_match
from jaxagent.rewards.view import Reward, View

if TYPE_CHECKING:
    from jaxagent.rewards.judge_client import HttpJudge

ANSWER, INFORMATION = tags.pair("answer"), tags.pair("information")

# (state, tag) -> state, see `rewards.text.follows`. (The published check also counts opening and closing tags; no text
# that this table accepts can fail that.)
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
    answers = tags.inside(*ANSWER, text)
    return answers[-1].strip() if len(answers) >= min_answers and answers else None


def well_formed(response: str) -> bool:
    """True when the response is (think search information)* think answer, closed, with nothing in between.

    `response` is everything after the prompt, observations included and end-of-sequence text removed.
    """
    return follows(MOVES, response)


def retrieval_hit(response: str, answers: Sequence[str]) -> bool:
    """True when a normalised gold answer stands inside one of the <information> blocks."""
    return any(sub_exact_match(block, answers) for block in tags.inside(*INFORMATION, response))


@dataclasses.dataclass(frozen=True)
class ExactMatch:
    """Search-R1's outcome reward, as a `rewards.view.Reward`: 1 for an exact match of the final answer, else 0."""

    min_answers: Annotated[int, between(1, 2)] = 1  # 2: as published, in prompt + response, where the prompt holds one

    def __call__(self, view: View) -> dict[str, float]:
        """The trained reward and its components, each in [0, 1]: "em", "sub_em", "answered", "well_formed", ..."""
        prediction = extract_answer(self.answer_text(view), self.min_answers)
        answers = view.task.answers
        matched = prediction is not None and exact_match(prediction, answers)
        valid, hit = well_formed(view.response), retrieval_hit(view.response, answers)
        return {
            "reward": self.value(prediction, matched, valid, hit),
            "em": float(matched),
            "sub_em": float(prediction is not None and sub_exact_match(prediction, answers)),
            "answered": float(prediction is not None),
            "well_formed": float(valid),
            "retrieval_hit": float(hit),
        }

    def answer_text(self, view: View) -> str:
        """Where the answer is looked for: prompt + response as published, or the policy's own text."""
        return view.prompt + view.response if self.min_answers > 1 else view.actions

    def value(self, prediction: str | None, matched: bool, valid: bool, hit: bool) -> float:
        """What is trained, of a final answer, whether it is right, the format and what was found."""
        return float(matched)


@dataclasses.dataclass(frozen=True)
class ExactMatchAndFormat(ExactMatch):
    """The format-aware profile with structure score s, final format score f, retrieval score r:

    |               | well formed                | not well formed |
    | ------------- | -------------------------- | --------------- |
    | exact match   | 1                          | 1 - s           |
    | other answer  | s, + r if retrieval hit    | f               |
    | no answer     | s, + r if retrieval hit    | 0               |
    """

    structure_score: ZeroToOne = 0.2  # s
    final_format_score: ZeroToOne = 0.1  # f
    retrieval_score: ZeroToOne = 0.0  # r

    def value(self, prediction: str | None, matched: bool, valid: bool, hit: bool) -> float:
        """The table's number."""
        if matched:
            return 1.0 if valid else 1.0 - self.structure_score
        if valid:
            return self.structure_score + (self.retrieval_score if hit else 0.0)
        return 0.0 if prediction is None else self.final_format_score


RUBRIC = Rubric((Item("right", "Is the answer right, by one of the reference answers?"),), low=0, high=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged(ExactMatch):
    """What a judge thinks of the final answer, from 0 to 1; exact match and the others are reported beside it."""

    judge: JudgeSettings

    def open(self) -> HttpJudge:
        """The judge, for all attempts."""
        from jaxagent.rewards.judge_client import HttpJudge  # late: settings are read without aiohttp

        return HttpJudge(self.judge)

    async def ask(self, judge: HttpJudge, view: View) -> tuple[View, Mapping[str, float]]:
        """The view with the judge's score, and what is counted; an attempt without an answer costs no call and has 0.
        Raises JudgeError: too few usable replies: a failure of the episode, and no score."""
        answer = extract_answer(self.answer_text(view), self.min_answers)
        if answer is None:
            return dataclasses.replace(view, judged=0.0), {}
        material = {"question": view.task.prompt, "reference": "\n".join(view.task.answers), "answer": answer}
        judgement = await judge.ask(RUBRIC, material)
        return dataclasses.replace(view, judged=judgement.score), judgement.metrics

    def __call__(self, view: View) -> dict[str, float]:
        """The judge's score and the components of exact match."""
        return super().__call__(view) | {"reward": judged(view), "judged": judged(view)}


@dataclasses.dataclass(frozen=True)
class Overlong:
    """DAPO's soft punishment of long episodes, in sampled tokens."""

    buffer_tokens: PositiveInt  # before the most tokens an episode can sample, where the punishment begins
    weight: PositiveFloat = 0.5


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """A punishment of searches that repeat an earlier one or go over the budget."""

    weight: PositiveFloat = 0.5  # all searches of an episode together cost at most this
    penalty: ZeroToOne = 0.5  # of one search, as a part of the weight
    budget: NonNegativeInt = 3  # searches per episode


@dataclasses.dataclass(frozen=True)
class Shaping:
    """What is added to an outcome for how it was reached (docs/rewards.md)."""

    overlong: Overlong | None = None
    efficiency: Efficiency | None = None
    cap: NonNegativeFloat = 0.3  # most that shaping can add or take


@functools.lru_cache(maxsize=8)
def shaped(outcome: Reward, shaping: Shaping | None, most_tokens: int) -> Reward:
    """The outcome with shaping around it. Raises ConfigError: shaping that cannot mean anything."""
    if shaping is None or not (shaping.overlong or shaping.efficiency):
        return outcome
    parts = [Part("outcome", outcome, weight=1.0, low=0.0, high=1.0)]
    if (long := shaping.overlong) is not None:
        if long.buffer_tokens > most_tokens:
            raise ConfigError(
                f"env.shaping.overlong.buffer_tokens must be 1 to {most_tokens} (all an episode can sample), "
                f"got {long.buffer_tokens}."
            )
        punish = functools.partial(length.soft_overlong, max_tokens=most_tokens, buffer_tokens=long.buffer_tokens)
        parts.append(Part("overlong", punish, weight=long.weight, low=-1.0, high=0.0, shaping=True))
    if (calls := shaping.efficiency) is not None:
        punish = functools.partial(
            tool_efficiency.tool_efficiency, tools=("search",), budget=calls.budget, penalty=calls.penalty
        )
        parts.append(Part("efficiency", punish, weight=calls.weight, low=-1.0, high=0.0, shaping=True))
    return Composite(tuple(parts), shaping.cap)
