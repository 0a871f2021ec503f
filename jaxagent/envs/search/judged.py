"""A judge in place of exact match, for questions whose right answer can be written in many ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from jaxagent.envs.search.rewards import ExactMatch, extract_answer
from jaxagent.rewards.judge import Item, Judgement, JudgeSettings, Rubric, judged
from jaxagent.rewards.view import View

RUBRIC = Rubric((Item("right", "Is the answer right, by one of the reference answers?"),), low=0, high=1)


class Judge(Protocol):
    """What asks: `rewards.judge_client.HttpJudge`."""

    async def ask(self, rubric: Rubric, material: Mapping[str, str]) -> Judgement:
        """One judgement; raises JudgeError where there are too few usable replies."""
        ...

    async def close(self) -> None:
        """Closes the connections."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged(ExactMatch):
    """What a judge thinks of the final answer, from 0 to 1; exact match and the others are reported beside it."""

    judge: JudgeSettings

    def open(self) -> Judge:
        """The judge, for all attempts."""
        from jaxagent.rewards.judge_client import HttpJudge  # late: settings are read without aiohttp

        return HttpJudge(self.judge)

    async def ask(self, judge: Judge, view: View) -> tuple[View, Mapping[str, float]]:
        """The view with the judge's score, and what is counted; an attempt without an answer costs no call and has 0.

        Raises:
          JudgeError: too few usable replies: a failure of the episode, and no score.
        """
        answer = extract_answer(self.answer_text(view), self.min_answers)
        if answer is None:
            return dataclasses.replace(view, judged=0.0), {}
        material = {"question": view.task.prompt, "reference": "\n".join(view.task.answers), "answer": answer}
        judgement = await judge.ask(RUBRIC, material)
        return dataclasses.replace(view, judged=judgement.score), judgement.metrics

    def __call__(self, view: View) -> dict[str, float]:
        """The judge's score and the components of exact match."""
        return super().__call__(view) | {"reward": judged(view), "judged": judged(view)}
