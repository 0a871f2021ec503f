"""Rewards of a final answer that an environment has found, as entries of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxagent.rewards import text
from jaxagent.rewards.view import View


@dataclasses.dataclass(frozen=True)
class ExactMatch:
    """1 where the answer is one of the gold answers after normalisation, else 0."""

    needs_answers: ClassVar[bool] = True

    def __call__(self, view: View) -> Mapping[str, float]:
        """The reward, beside "answered" and "sub_em"."""
        return _scores(view, text.em(view))


@dataclasses.dataclass(frozen=True)
class Contains:
    """1 where a gold answer stands inside the answer. It also pays for answers that list everything."""

    needs_answers: ClassVar[bool] = True

    def __call__(self, view: View) -> Mapping[str, float]:
        """The reward, beside "answered" and "sub_em"."""
        return _scores(view, text.sub_em(view))


@dataclasses.dataclass(frozen=True)
class TokenF1:
    """F1 of the answer's words, the best over the gold answers."""

    needs_answers: ClassVar[bool] = True

    def __call__(self, view: View) -> Mapping[str, float]:
        """The reward, beside "answered" and "sub_em"."""
        return _scores(view, text.f1(view))


REWARDS: dict[str, type] = {"em": ExactMatch, "sub_em": Contains, "f1": TokenF1}


def _scores(view: View, reward: float) -> dict[str, float]:
    return {"reward": reward, "answered": float(view.answer is not None), "sub_em": text.sub_em(view)}
