"""What an algorithm asks of the learner: a critic, a reference, the policy's own scores, a teacher, targets."""

from __future__ import annotations

from jaxagent.algorithms import corrections
from jaxagent.algorithms.token_advantages import TOKEN_ADVANTAGES, WITH_OLD, WITHOUT_CRITIC
from jaxagent.config import RLConfig


def needs_critic(rl: RLConfig) -> bool:
    """Whether the advantage reads `Sample.values`."""
    return rl.advantage in TOKEN_ADVANTAGES and rl.advantage not in WITHOUT_CRITIC


def needs_reference(rl: RLConfig) -> bool:
    """Whether a frozen reference is kept and `Sample.reference` filled."""
    return rl.kl.coefficient != 0


def needs_teacher(rl: RLConfig) -> bool:
    """Whether a teacher is opened and `Sample.teacher` filled."""
    return rl.distill.coefficient != 0


def needs_student_top_k(rl: RLConfig) -> bool:
    """Whether `Sample.student` is filled."""
    return needs_support(rl) and rl.distill.support != "teacher"


def needs_support(rl: RLConfig) -> bool:
    """Whether distributions are compared in top-k tokens, which travel with the streams."""
    return needs_teacher(rl) and rl.distill.loss != "sampled" and rl.distill.support != "vocabulary"


def needs_whole_teacher(rl: RLConfig) -> bool:
    """Whether the loss itself runs the teacher, to compare whole vocabularies."""
    return needs_teacher(rl) and rl.distill.loss != "sampled" and rl.distill.support == "vocabulary"


def needs_old(rl: RLConfig) -> bool:
    """Whether the learner scores the samples before its first update, to fill `Sample.old`."""
    return rl.correction.name in corrections.IMPORTANCE or rl.advantage in WITH_OLD


def refresh_due(rl: RLConfig, steps_done: int) -> bool:
    """Whether the reference becomes a copy of the policy now."""
    return needs_reference(rl) and rl.kl.refresh_every > 0 and steps_done % rl.kl.refresh_every == 0


def most_targets(rl: RLConfig, action_tokens: int, context_tokens: int) -> int:
    """Most tokens of one trajectory that the loss can need: fixes the shape of a batch before the first one exists.

    Args:
      rl: the stage's config.
      action_tokens: most tokens the policy can sample in one trajectory.
      context_tokens: most tokens of one trajectory.
    """
    if rl.echo.coefficient == 0:
        return min(action_tokens, context_tokens)
    return min(action_tokens + rl.echo.max_tokens, context_tokens) if rl.echo.max_tokens else context_tokens
