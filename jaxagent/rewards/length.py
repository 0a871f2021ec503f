"""Rewards for length, in sampled tokens: DAPO's soft overlong punishment, linear and cosine shaping.

Tokens are those the policy sampled, over all turns; observations are not its length. On top of a zero/one outcome these
are shaping: cap them (`composite`), or a short wrong answer beats a long right one.
"""

from __future__ import annotations

import math

from jaxagent.rewards.view import Reward, View, scalar


def sampled_tokens(view: View) -> int:
    """Sampled tokens of all turns.

    Raises:
      ValueError: the view has not one count per turn; a missing count must not look like a short episode.
    """
    if len(view.action_tokens) != len(view.turns):
        raise ValueError(f"{len(view.turns)} turns with {len(view.action_tokens)} token counts")
    return sum(view.action_tokens)


def overlong(tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft punishment, in [-1, 0] (Yu et al., https://arxiv.org/abs/2503.14476, equation 13).

    0 up to max - buffer tokens, then falling linearly to -1 at max, and -1 beyond. (The published code multiplies by a
    factor, here a composite's weight, and has no floor: its responses cannot be longer than max.)
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens {buffer_tokens} is not in 1..{max_tokens} (max_tokens)")
    return max(-1.0, min(0.0, (max_tokens - buffer_tokens - tokens) / buffer_tokens))


def linear(tokens: int, max_tokens: int, at_zero: float, at_max: float) -> float:
    """From `at_zero` to `at_max` in a straight line; `at_max` beyond."""
    return at_zero + (at_max - at_zero) * min(tokens / max_tokens, 1.0)


def cosine(tokens: int, max_tokens: int, at_zero: float, at_max: float) -> float:
    """From `at_zero` to `at_max` along half a cosine: flat at both ends; `at_max` beyond.

    at_max + (at_zero - at_max) (1 + cos(pi tokens / max)) / 2, from Yeo et al. (https://arxiv.org/abs/2502.03373).
    """
    return at_max + 0.5 * (at_zero - at_max) * (1.0 + math.cos(math.pi * min(tokens / max_tokens, 1.0)))


def soft_overlong(view: View, *, max_tokens: int, buffer_tokens: int) -> float:
    """`overlong` of an episode, in [-1, 0]."""
    return overlong(sampled_tokens(view), max_tokens, buffer_tokens)


def linear_length(view: View, *, max_tokens: int, at_zero: float, at_max: float) -> float:
    """`linear` of an episode."""
    return linear(sampled_tokens(view), max_tokens, at_zero, at_max)


def cosine_length(
    view: View,
    *,
    outcome: Reward,
    max_tokens: int,
    right: tuple[float, float],
    wrong: tuple[float, float],
    exceeded: float,
) -> float:
    """Yeo et al.'s whole reward: right answers earn more when short, wrong ones lose less when long.

    Args:
      outcome: a reward of which 1 means right and less means wrong, e.g. `text.em`.
      max_tokens: where the curves end.
      right, wrong: the values at no tokens and at `max_tokens`; in the paper (2, 1) and (-10, 0).
      exceeded: the value at `max_tokens` or more, right or wrong; in the paper -10.
    """
    tokens = sampled_tokens(view)
    if tokens >= max_tokens:
        return exceeded
    return cosine(tokens, max_tokens, *(right if scalar(outcome(view)) >= 1.0 else wrong))
