"""Ranges of numbers: the words in which the schema states them, `Annotated[int, at_least(1)]`.

A range holds finite numbers only. `str` of one completes the sentence "must be ...".
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, each end included unless it is excluded."""

    low: float = -math.inf
    high: float = math.inf
    without_low: bool = False
    without_high: bool = False

    def __contains__(self, number: float) -> bool:
        if isinstance(number, float) and not math.isfinite(number):  # NaN, too
            return False
        above = number > self.low if self.without_low else number >= self.low
        return above and (number < self.high if self.without_high else number <= self.high)

    def __str__(self) -> str:
        low = f"{'more than' if self.without_low else 'at least'} {self.low:,.12g}" if self.low > -math.inf else ""
        high = f"{'less than' if self.without_high else 'at most'} {self.high:,.12g}" if self.high < math.inf else ""
        return " and ".join(end for end in (low, high) if end) or "finite"


def at_least(low: float) -> Range:
    """low and all above."""
    return Range(low)


def more_than(low: float) -> Range:
    """All above low."""
    return Range(low, without_low=True)


def between(low: float, high: float, without: str = "neither") -> Range:
    """From low to high, without the ends that `without` names: "neither", "low", "high" or "both"."""
    return Range(low, high, without in ("low", "both"), without in ("high", "both"))


FiniteFloat = Annotated[float, Range()]
NonNegativeFloat = Annotated[float, at_least(0)]
NonNegativeInt = Annotated[int, at_least(0)]
PositiveFloat = Annotated[float, more_than(0)]
PositiveInt = Annotated[int, at_least(1)]
SECONDS = between(0, 1e9, without="low")  # what Python's locks and timers can wait
Seconds = Annotated[float, SECONDS]
SecondsOrZero = Annotated[float, between(0, 1e9)]
ZeroToOne = Annotated[float, between(0, 1)]
