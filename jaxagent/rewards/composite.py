"""A weighted sum of rewards: outcomes in full, shaping under a cap, every part reported under its own name.

    reward = Composite(
        (
            Part("em", text.em, weight=1.0, low=0.0, high=1.0),
            Part("overlong", partial(length.soft_overlong, max_tokens=4096, buffer_tokens=1024),
                 weight=0.5, low=-1.0, high=0.0, shaping=True),
        ),
        shaping_cap=0.3,
    )
    reward(view)       # {"reward": 0.875, "em": 1.0, "overlong": -0.25, "shaping": -0.125}

A composite is itself a reward.
"""

from __future__ import annotations

import dataclasses
import logging
import math

from jaxagent import contract
from jaxagent.config import ConfigError
from jaxagent.rewards.view import Reward, View

logger = logging.getLogger(__name__)

RESERVED = ("reward", "shaping", "mean")  # "mean": reward/mean is the trained reward in the metrics
ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Part:
    """One reward with its weight. `low` and `high` are its own range; a value outside is an error."""

    name: str
    reward: Reward
    weight: float
    low: float
    high: float
    shaping: bool = False  # how it was done, and not whether: counts only up to the composite's cap

    @property
    def span(self) -> tuple[float, float]:
        """Least and most it can add to the sum."""
        low, high = sorted((self.weight * self.low, self.weight * self.high))
        return low, high


@dataclasses.dataclass(frozen=True)
class Composite:
    """The sum of weighted outcomes, plus that of weighted shaping clipped to [-shaping_cap, shaping_cap].

    Raises:
      ConfigError: no outcome, names that are reserved, empty or used twice, ranges or weights that are not finite.
    """

    parts: tuple[Part, ...]
    shaping_cap: float

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        for name in names:
            if not name or name in RESERVED or "/" in name or names.count(name) > 1:
                raise ConfigError(f"reward part '{name}': names must be unique, without '/', and not among {RESERVED}")
        for part in self.parts:
            if not all(map(math.isfinite, (part.weight, part.low, part.high))) or part.low >= part.high:
                raise ConfigError(f"reward part '{part.name}' needs a finite weight and a finite range low < high")
        if not any(part.weight and not part.shaping for part in self.parts):
            raise ConfigError("a composite reward needs a part that is not shaping, with a weight that is not 0")
        if not (math.isfinite(self.shaping_cap) and self.shaping_cap >= 0.0):
            raise ConfigError(f"shaping_cap {self.shaping_cap} must be finite and not negative")
        if self.outcome_frac < 0.5:
            logger.warning(
                "Outcome is %.0f%% of what can be earned (%s): a policy may do better by pleasing the rest. "
                "Lower shaping_cap (%g) or the weights.",
                100 * self.outcome_frac,
                ", ".join(f"{p.name} {p.span[0]:g}..{p.span[1]:g}{' shaping' * p.shaping}" for p in self.parts),
                self.shaping_cap,
            )

    @property
    def outcome_frac(self) -> float:
        """How much of the possible difference between two episodes is outcome, in (0, 1]: its span over all spans."""
        outcome = sum(high - low for low, high in (p.span for p in self.parts if not p.shaping))
        spans = [p.span for p in self.parts if p.shaping]
        shaping = self._clip(sum(high for _, high in spans)) - self._clip(sum(low for low, _ in spans))
        return outcome / (outcome + shaping)

    def __call__(self, view: View) -> dict[str, float]:
        """The parts of one episode.

        Returns:
          "reward": the sum; each part's own value, unweighted, under its name; what a part reports beside it as
          "name/key"; "shaping": what shaping added, after weights and cap.

        Raises:
          ValueError: a part's value is not in its range.
        """
        report: dict[str, float] = {}
        sums = {False: 0.0, True: 0.0}
        for part in self.parts:
            scores = contract.scores(part.reward, view)
            value = scores.pop("reward")
            if not part.low - ROUNDING <= value <= part.high + ROUNDING:
                raise ValueError(f"reward part '{part.name}' is {value}, outside of {part.low:g}..{part.high:g}")
            sums[part.shaping] += part.weight * value
            report[part.name] = value
            report |= {f"{part.name}/{key}": v for key, v in scores.items()}
        shaping = self._clip(sums[True])
        return {"reward": sums[False] + shaping, **report, "shaping": shaping}

    def _clip(self, value: float) -> float:
        return max(-self.shaping_cap, min(self.shaping_cap, value))
