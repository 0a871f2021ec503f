"""Process rewards: from a value per turn to a reward per turn, which the episode carries as `turn_rewards`.

A value is what someone thinks of the state after a turn: a process reward model, a judge, the fraction of tests that
pass, the evidence retrieved so far. `Episode.turn_rewards` are paid at the ends of turns, beside `Episode.reward`,
which is paid at the end of the last one and does not contain them. An environment returns them in its `Verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def direct(values: Sequence[float], weight: float, cap: float) -> tuple[float, ...]:
    """weight * value per turn, scaled down together where needed so that absolute values sum to at most `cap`.

    Without a cap a policy can earn more by taking more turns than by being right; scaling keeps their proportions.
    """
    if cap < 0.0:
        raise ValueError(f"cap {cap} is negative")
    rewards = [weight * value for value in _finite(values)]
    total = math.fsum(map(abs, rewards))
    scale = cap / total if total > cap else 1.0
    return tuple(scale * reward for reward in rewards)


def progress(values: Sequence[float], start: float, gamma: float = 1.0) -> tuple[float, ...]:
    """gamma * value after the turn - value before it: potential-based shaping (Ng, Harada and Russell, 1999).

    With gamma 1 the sum is last value - `start`, so no way of taking turns earns more than the state it reaches. (The
    theorem that optimal policies do not change also wants the potential of the end to be 0: pass a last value of 0 for
    it, and nothing is paid for the end state either.)
    """
    values = _finite(values)
    return tuple(gamma * after - before for before, after in zip((start, *values), values, strict=False))


def _finite(values: Sequence[float]) -> list[float]:
    values = [float(value) for value in values]
    if not all(map(math.isfinite, values)):
        raise ValueError(f"values per turn must be finite, not {values}")
    return values
