"""On-policy distillation: losses that pull the policy to a teacher, on the tokens that the policy itself sampled.

With p the policy's (the student's) and q the teacher's next-token distribution in a context that the policy made, both
at the sampling temperature:

  sampled     advantage log q(y) - log p(y) of the sampled token y alone: a sample of -KL(p || q), whose policy gradient
              has the expectation of the gradient of KL(p || q)   (Lu et al., "On-Policy Distillation", Thinking
              Machines 2025; the single-step term of MiniLLM, Gu et al., arXiv 2306.08543, eq. 4)
  reverse_kl  KL(p || q): the student keeps to what the teacher finds likely             (MiniLLM)
  forward_kl  KL(q || p): the student covers all that the teacher does
  jsd         beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p         (GKD, arXiv 2306.13649, eq. 1)

The last three need distributions, not samples: over the whole vocabulary, or over a support of top-k tokens in which
both are renormalised (without that a top-k sum is no divergence: it can be negative).
The gradient of the sampled term's own value would be useless, as that of "k1" in `policy_loss.py`: so it is a number.
Axis letters: T tokens, V vocabulary or support, K top-k tokens, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxagent import contract
from jaxagent.algorithms.late import jax, jnp
from jaxagent.types import Trajectory

Array = Any  # numpy.ndarray or jax.Array

_EXCLUDED = -1e30  # a logit of probability 0 that keeps gradients finite


class Scores(NamedTuple):
    """What a model says of one trajectory; 0 outside action tokens. Log-probs are at the sampling temperature."""

    logprobs: np.ndarray  # f32[T] of the token itself
    top_ids: np.ndarray  # i32[T, K] the most likely tokens in its place, the likeliest first
    top_logprobs: np.ndarray  # f32[T, K]
    candidate_logprobs: np.ndarray  # f32[T, C] of the tokens that were asked about


class Support(NamedTuple):
    """The tokens over which the two distributions of one trajectory are compared."""

    ids: np.ndarray  # i32[T, K]
    teacher_logprobs: np.ndarray  # f32[T, K]; -inf: an entry that does not count (the token stands there already)


def sampled_advantages(student_logprobs: Array, teacher_logprobs: Array, mask: Array) -> Array:
    """log q - log p, float[T], of the tokens that the student sampled, an advantage without a gradient of its own.

    0 outside the mask, bool[T], where the log-probs may be anything. Runs on NumPy and JAX arrays.
    """
    contract.check_arrays(student_logprobs, teacher_logprobs, mask, types=[float, float, bool])
    xp = student_logprobs.__array_namespace__()
    difference = xp.where(mask, teacher_logprobs, 0.0) - xp.where(mask, student_logprobs, 0.0)
    return difference if xp is np else jax.lax.stop_gradient(difference)


def renormalise(scores: jax.Array, support: jax.Array, temperature: float) -> jax.Array:
    """log softmax(scores / temperature) over the support, f32[..., V]; 0 outside it, and where it is empty.

    `scores` are logits, or log-probs (then the temperature is 1); anything (inf, nan) outside the support.
    """
    _check_support(support, scores)
    # Double where: what is not in the support must give neither a value nor a gradient, whatever it holds.
    scores = jnp.where(support, scores.astype(jnp.float32), 0.0) / temperature
    return jnp.where(support, jax.nn.log_softmax(jnp.where(support, scores, _EXCLUDED)), 0.0)


def kl(a: jax.Array, b: jax.Array, support: jax.Array) -> jax.Array:
    """KL(a || b) = sum exp(a) (a - b) over the support, f32[...], of log-probs f32[..., V] that `renormalise` gave."""
    _check_support(support, a, b)
    return jnp.sum(jnp.where(support, jnp.exp(a) * (a - b), 0.0), axis=-1)


def _check_support(support: jax.Array, *scores: jax.Array) -> None:
    """A support of [..., 1] is a live token's whole vocabulary."""
    contract.check_arrays(*scores, types=float)
    contract.check_arrays(support, types=bool, rank=scores[0].ndim)


def divergences(divergence: Any, student: jax.Array, teacher: jax.Array, support: jax.Array) -> jax.Array:
    """What one of `teachers.LOSSES` says of log-probs [..., V] of both. Raises ConfigError unless it is f32[...]."""
    answer = contract.call(divergence, student, teacher, support)
    return contract.array(
        divergence, answer, contract.Array("divergences", "one number per target, [B, R]", student.shape[:-1])
    )


def support_of(which: str, teacher: Scores, student_ids: np.ndarray) -> Support:
    """The support of one trajectory, with the teacher's log-probs in it: [T, C], [T, K] or [T, C + K].

    `which`: "student", whose most likely tokens are `student_ids` i32[T, C], the candidates that the teacher was asked
    about; "teacher" (its own top-k); or "union", where a token that is in both counts once.
    """
    if which == "teacher":
        return Support(teacher.top_ids, teacher.top_logprobs)
    contract.check_arrays(student_ids, teacher.candidate_logprobs, types=[int, float], rank=2)
    if which == "student":
        return Support(student_ids, teacher.candidate_logprobs)
    twice = (teacher.top_ids[:, :, None] == student_ids[:, None, :]).any(axis=2)
    new = np.where(twice, np.float32(-np.inf), teacher.top_logprobs)
    return Support(
        np.concatenate([student_ids, teacher.top_ids], axis=1),
        np.concatenate([teacher.candidate_logprobs, new], axis=1),
    )


def metrics(trajectories: Sequence[Trajectory], teacher: Sequence[Scores]) -> dict[str, float | None]:
    """Means over sampled tokens, before the step's first update; None where there are none.

    distill/reverse_kl is the sampled estimate of KL(p || q) in nats per token, p as recorded when sampling;
    distill/agreement the share of sampled tokens that are the teacher's most likely ones.
    """
    kl, agree, tokens = 0.0, 0.0, 0
    for trajectory, scores in zip(trajectories, teacher, strict=True):
        mask = trajectory.action_mask.copy()
        mask[:1] = False  # nothing predicts the first token
        kl -= float(sampled_advantages(trajectory.logprobs.astype(np.float64), scores.logprobs, mask).sum())
        agree += float((scores.top_ids[mask, 0] == trajectory.tokens[mask]).sum())
        tokens += int(mask.sum())
    return {
        "distill/reverse_kl": kl / tokens if tokens else None,
        "distill/agreement": agree / tokens if tokens else None,
    }
