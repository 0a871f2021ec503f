"""Policy objectives, per token: how an advantage moves the policy. `objectives.py` names them.

In: log-probs and advantages of any shape. Out: losses of that shape, and 1 where clipping stops or caps the gradient;
the caller's weights do every reduction. Gradients flow through `logprobs` alone. `old_logprobs` are those of the policy
that the ratio r = p / p_old is taken to: the one that sampled, or the learner's own before the step's first update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxagent import contract
from jaxagent.algorithms.segments import sequence_mean, sequence_sum
from jaxagent.config import ConfigError

# exp(20) is far outside any clip range; the bound keeps values and gradients finite for tokens of weight 0.
MAX_LOG_RATIO = 20.0
Losses = tuple[jax.Array, jax.Array]


def clipped_policy_loss(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float
) -> Losses:
    """PPO's pessimistic surrogate: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), r = p / p_old.

    See "Proximal Policy Optimization Algorithms" (Schulman et al., arXiv 1707.06347), eq. 7; different bounds as in
    "DAPO" (Yu et al., arXiv 2503.14476), eq. 10.

    Args:
      logprobs: f32[...] under the policy being trained; gradients flow through it alone.
      old_logprobs: f32[...] of the policy that the ratio is taken to.
      advantages: f32[...].
      clip_low, clip_high: how far r may fall below and rise above 1.

    Returns:
      loss f32[...], and f32[...] 1 where the clipped branch is active (no gradient), else 0.
    """
    _check(logprobs, old_logprobs, advantages)
    old_logprobs, advantages = jax.lax.stop_gradient((old_logprobs, advantages))
    ratio = _ratio(logprobs, old_logprobs)
    plain = -ratio * advantages
    clipped = -jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    return jnp.maximum(plain, clipped), (clipped > plain).astype(jnp.float32)


def dual_clip_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
) -> Losses:
    """Where A < 0, PPO's loss but never more than -c A: min(max(-r A, -clip(r) A), -c A). Elsewhere PPO's loss.

    See "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning" (Ye et al., arXiv 1912.09729), eq. 5.
    Args as `clipped_policy_loss`; clip_dual: c > 1 + clip_high.
    """
    _check(logprobs, old_logprobs, advantages)
    loss, clipped = clipped_policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high)
    bound = -clip_dual * jax.lax.stop_gradient(advantages)
    capped = (advantages < 0) & (loss > bound)
    return jnp.where(capped, bound, loss), jnp.where(capped, 1.0, clipped)


def sequence_ratio_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mean_log_ratio: jax.Array,
    clip_low: float,
    clip_high: float,
) -> Losses:
    """GSPO: the ratio of a token is its sequence's, s = exp(mean over the sequence's tokens of log p - log p_old).

    The token form of "Group Sequence Policy Optimization" (Zheng et al., arXiv 2507.18071), eq. 14: the value of every
    token's ratio is s, its gradient s * grad log p of that token. Summed with equal weights over a sequence whose
    tokens share one advantage this is the sequence form (eq. 5); with other weights or with advantages of single
    tokens each token keeps its own.

    Args:
      logprobs, old_logprobs, advantages, clip_low, clip_high: as `clipped_policy_loss`.
      mean_log_ratio: f32[...] of the sequence each token belongs to.
    """
    _check(logprobs, old_logprobs, advantages, mean_log_ratio)
    own = logprobs - jax.lax.stop_gradient(logprobs)  # 0, with the gradient of log p
    log_ratio = jnp.clip(jax.lax.stop_gradient(mean_log_ratio), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clipped_policy_loss(log_ratio + own, jnp.zeros_like(log_ratio), advantages, clip_low, clip_high)


def cispo_loss(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float
) -> Losses:
    """CISPO: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p. A clipped token keeps its gradient, capped.

    See "MiniMax-M1" (arXiv 2506.13585), eq. 4. Published without a lower bound: clip_low >= 1.
    """
    _check(logprobs, old_logprobs, advantages)
    ratio = jax.lax.stop_gradient(_ratio(logprobs, old_logprobs))
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -bounded * jax.lax.stop_gradient(advantages) * logprobs, (bounded != ratio).astype(jnp.float32)


def soft_gate_loss(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, tau_positive: float, tau_negative: float
) -> Losses:
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A; tau is `tau_positive` where A > 0, else `tau_negative`.

    Nothing is clipped: the gradient is -4 s (1 - s) A r grad log p with s = sigmoid(tau (r - 1)), that of -r A at r = 1
    and less the farther r is from it. See "Soft Adaptive Policy Optimization" (Gao et al., arXiv 2511.20347); published
    taus 1.0 and 1.05. Args as `clipped_policy_loss`.
    """
    _check(logprobs, old_logprobs, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    gate = jax.nn.sigmoid(tau * (_ratio(logprobs, old_logprobs) - 1.0)) * (4.0 / tau)
    return -gate * advantages, jnp.zeros_like(logprobs)


def importance_sampling_loss(logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array) -> Losses:
    """-r A: the policy gradient corrected for the policy that sampled, with no bound on how far it goes."""
    _check(logprobs, old_logprobs, advantages)
    old_logprobs, advantages = jax.lax.stop_gradient((old_logprobs, advantages))
    return -_ratio(logprobs, old_logprobs) * advantages, jnp.zeros_like(logprobs)


def reinforce_loss(logprobs: jax.Array, advantages: jax.Array) -> Losses:
    """-A log p (Williams, 1992): exact for samples of the policy itself only."""
    _check(logprobs, advantages)
    return -jax.lax.stop_gradient(advantages) * logprobs, jnp.zeros_like(logprobs)


def no_policy_loss(logprobs: jax.Array) -> Losses:
    """0: auxiliary terms alone are trained."""
    return jnp.zeros_like(logprobs), jnp.zeros_like(logprobs)


class Tokens(NamedTuple):
    """What an objective may read of the tokens that the policy is trained on, f32[...] each; 0 at all other targets.

    Gradients flow through `logprobs` alone, and through sums of what is made of them. A sequence is one trajectory, and
    lies whole in one row; nothing else of a row, and no group, may be read: what is packed together is chance.
    """

    logprobs: jax.Array  # under the policy that is trained
    old_logprobs: jax.Array  # of the policy that the ratio is taken to
    advantages: jax.Array
    sequence_mean: Callable[[jax.Array], jax.Array]  # any f32[...] -> the mean over each token's sequence, no gradient
    sequence_sum: Callable[[jax.Array], jax.Array] | None = None  # -> the sum over it, at each of its tokens
    mask: jax.Array | None = None  # bool[...] which targets are such tokens
    behaviour_logprobs: jax.Array | None = None  # as recorded when sampled
    entropy: jax.Array | None = None  # of the policy's distribution, in nats; no gradient
    rewards: jax.Array | None = None  # the episode's; only where the objective's `reads` has "rewards"
    ages: jax.Array | None = None  # versions between the sampler and the step's policy; where it has "ages"

    @property
    def lengths(self) -> jax.Array:
        """f32[...]: how many such tokens the sequence of each has."""
        assert self.sequence_sum is not None, "only tokens made by hand have none"
        return self.sequence_sum(jnp.ones_like(self.logprobs))


READABLE = ("rewards", "ages")  # what `reads` of an objective may name


def reads_of(objective: Any) -> tuple[str, ...]:
    """What an objective reads of `READABLE`. Raises ConfigError where its `reads` has something else."""
    reads = getattr(objective, "reads", ())
    if not isinstance(reads, (tuple, list)) or not set(reads) <= set(READABLE):
        raise ConfigError(f"{contract.name_of(objective)}.reads is {reads!r:.100}: a tuple of {', '.join(READABLE)}.")
    return tuple(reads)


def tokens_of(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    sequence: jax.Array,
    **more: jax.Array | None,
) -> Tokens:
    """The tokens of packed rows, f32[B, R] each; mask and sequence as of `segments.sequence_sum`."""

    def mean(values: jax.Array) -> jax.Array:
        return sequence_mean(jax.lax.stop_gradient(values), mask, sequence)

    def total(values: jax.Array) -> jax.Array:
        return sequence_sum(values, mask, sequence)

    return Tokens(logprobs, old_logprobs, advantages, mean, total, mask, **more)


def geometric_mean_loss(tokens: Tokens, clip_low: float, clip_high: float) -> Losses:
    """GMPO: -s A, s = exp(mean over the sequence of the pessimistic log r): min(log r, clip_high) where A > 0, else
    max(log r, -clip_low).

    "Geometric-Mean Policy Optimization" (Zhao et al., arXiv 2507.20673), eq. 4, in its token form, as GSPO's: every
    token's value is s, and its gradient s * grad log p of that token, none where it is clipped. Summed with equal
    weights over a sequence of one advantage this is the sequence form, which verl has.
    """
    _check(tokens.logprobs, tokens.old_logprobs, tokens.advantages)
    old_logprobs, advantages = jax.lax.stop_gradient((tokens.old_logprobs, tokens.advantages))
    log_ratio = tokens.logprobs - old_logprobs
    bounded = jnp.where(advantages > 0, jnp.minimum(log_ratio, clip_high), jnp.maximum(log_ratio, -clip_low))
    mean = jnp.clip(jax.lax.stop_gradient(tokens.sequence_mean(bounded)), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    own = bounded - jax.lax.stop_gradient(bounded)  # 0, with the gradient of log p where it is not clipped
    return -jnp.exp(mean + own) * advantages, (bounded != log_ratio).astype(jnp.float32)


def probability_mask_loss(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, low: float, high: float, cap: float
) -> Losses:
    """DPPO with binary total variation: -sg(min(r, cap)) A log p, and 0 where p has gone too far in A's direction.

    That is p - p_old > high where A > 0, else p - p_old < -low. A rare token, whose ratio moves fast, is not masked for
    it. "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879), as verl has it.
    Args as `clipped_policy_loss`; low, high: of probabilities; cap: of the ratio.
    """
    _check(logprobs, old_logprobs, advantages)
    moved = jax.lax.stop_gradient(jnp.exp(logprobs) - jnp.exp(old_logprobs))
    ratio = jax.lax.stop_gradient(jnp.minimum(_ratio(logprobs, old_logprobs), cap))
    advantages = jax.lax.stop_gradient(advantages)
    outside = jnp.where(advantages > 0, moved > high, moved < -low)
    return jnp.where(outside, 0.0, -ratio * advantages * logprobs), outside.astype(jnp.float32)


def opsm_factor(tokens: Tokens, delta: float) -> jax.Array:
    """Off-policy sequence masking: 0 where A < 0 and the sequence's mean of log p_old - log p exceeds delta, else 1.

    What the policy has already left behind is not pushed down further. "DeepSeek-V3.2" (arXiv 2512.02556), section
    3.1; the constant 1e-4 is slime's. The denominator of the loss is not changed.
    """
    _check(tokens.logprobs, tokens.old_logprobs, tokens.advantages)
    drift = tokens.sequence_mean(tokens.old_logprobs - tokens.logprobs)
    return jnp.where((tokens.advantages < 0) & (drift > delta), 0.0, 1.0)


def _ratio(logprobs: jax.Array, old_logprobs: jax.Array) -> jax.Array:
    old_logprobs = jax.lax.stop_gradient(old_logprobs)
    return jnp.exp(jnp.clip(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _check(*arrays: jax.Array) -> None:
    chex.assert_equal_shape(arrays)  # others would broadcast
    chex.assert_type(arrays, float)
