"""Rewards of a final answer that an environment has found, as entries of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

from jaxagent.rewards import text
from jaxagent.rewards.view import View


@dataclasses.dataclass(frozen=True)
class ExactMatch:
    """1 where the answer is one of the gold answers after normalisation, else 0."""

    needs_answers: ClassVar[bool] = True
    score: ClassVar[Callable[[View], float]] = staticmethod(text.em)

    def __call__(self, view: View) -> Mapping[str, float]:
        """The reward, beside "answered" and "sub_em"."""
        answered = float(view.answer is not None)
        return {"reward": self.score(view), "answered": answered, "sub_em": text.sub_em(view)}


class Contains(ExactMatch):
    """1 where a gold answer stands inside the answer. It also pays for answers that list everything."""

    score = staticmethod(text.sub_em)


class TokenF1(ExactMatch):
    """F1 of the answer's words, the best over the gold answers."""

    score = staticmethod(text.f1)


REWARDS: dict[str, type] = {"em": ExactMatch, "sub_em": Contains, "f1": TokenF1}
