"""What an algorithm asks of the learner beside samples: a critic, a reference, the policy's own scores, a teacher."""

from __future__ import annotations

from jaxagent.algorithms import corrections
from jaxagent.algorithms.token_advantages import TOKEN_ADVANTAGES, WITH_OLD, WITHOUT_CRITIC
from jaxagent.config import RLConfig


def needs_critic(rl: RLConfig) -> bool:
    """Whether the advantage reads `Rollout.values`."""
    return rl.advantage in TOKEN_ADVANTAGES and rl.advantage not in WITHOUT_CRITIC


def needs_reference(rl: RLConfig) -> bool:
    """Whether a frozen reference is kept and `Rollout.reference` filled."""
    return rl.kl.coefficient != 0


def needs_teacher(rl: RLConfig) -> bool:
    """Whether a teacher is opened and `Rollout.teacher` filled."""
    return rl.distill.coefficient != 0


def needs_student_top_k(rl: RLConfig) -> bool:
    """Whether `Rollout.students` is filled."""
    return needs_support(rl) and rl.distill.support != "teacher"


def needs_support(rl: RLConfig) -> bool:
    """Whether distributions are compared in top-k tokens, which travel with the streams."""
    return needs_teacher(rl) and rl.distill.loss != "sampled" and rl.distill.support != "vocabulary"


def needs_whole_teacher(rl: RLConfig) -> bool:
    """Whether the loss itself runs the teacher, to compare whole vocabularies."""
    return needs_teacher(rl) and rl.distill.loss != "sampled" and rl.distill.support == "vocabulary"


def needs_old(rl: RLConfig) -> bool:
    """Whether the learner scores the samples before its first update, to fill `Rollout.old`."""
    return rl.correction.name in corrections.IMPORTANCE or rl.advantage in WITH_OLD
