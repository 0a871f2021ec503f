"""What an algorithm asks of the learner beside what its choices say themselves."""

from __future__ import annotations

from jaxagent.config import RLConfig


def refresh_due(rl: RLConfig, steps_done: int) -> bool:
    """Whether the reference becomes a copy of the policy now."""
    return rl.kl is not None and rl.kl.refresh_every > 0 and steps_done % rl.kl.refresh_every == 0


def most_targets(rl: RLConfig, action_tokens: int, context_tokens: int) -> int:
    """Most tokens of one trajectory that the loss can need: fixes the shape of a batch before the first one exists.

    Args:
      rl: the stage's config.
      action_tokens: most tokens the policy can sample in one trajectory.
      context_tokens: most tokens of one trajectory.
    """
    if rl.echo is None:
        return min(action_tokens, context_tokens)
    return min(action_tokens + rl.echo.max_tokens, context_tokens) if rl.echo.max_tokens else context_tokens
