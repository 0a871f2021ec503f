"""A reward for length, in sampled tokens: DAPO's soft overlong punishment.

Tokens are those the policy sampled, over all turns; observations are not its length. On top of a zero/one outcome it
is shaping: cap it (`composite`), or a short wrong answer beats a long right one.
"""

from __future__ import annotations

from jaxagent.rewards.view import View


def sampled_tokens(view: View) -> int:
    """Sampled tokens of all turns.

    Raises ValueError: the view has not one count per turn; a missing count must not look like a short episode.
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


def soft_overlong(view: View, *, max_tokens: int, buffer_tokens: int) -> float:
    """`overlong` of an episode, in [-1, 0]."""
    return overlong(sampled_tokens(view), max_tokens, buffer_tokens)
