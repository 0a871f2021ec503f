"""What `rl.objective` can name: how an advantage moves the policy, per token, each formula with its constants.

An entry is called with `policy_loss.Tokens` and gives `policy_loss.Losses`: the losses, and 1 where clipping stops or
caps the gradient; the learner's weights do every reduction. r is `Tokens.ratio`, A the advantage, sg stops a gradient.
An objective of your own is such a class in a module of yours, `--config.rl.objective=my_package.my_module:MyObjective`.
No jax before an entry is called: a config is read without it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

from jaxagent.algorithms.late import jax, jnp
from jaxagent.config.ranges import NonNegativeFloat, PositiveFloat, ZeroToOne, more_than

if TYPE_CHECKING:
    from jaxagent.algorithms.policy_loss import Losses, Tokens

_MAX_LOG_RATIO = 20.0  # of a sequence's mean, before exp


@dataclasses.dataclass(frozen=True)
class PPOClip:
    """PPO's pessimistic surrogate: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).

    See "Proximal Policy Optimization Algorithms" (Schulman et al., arXiv 1707.06347), eq. 7; different bounds as in
    "DAPO" (Yu et al., arXiv 2503.14476), eq. 10, which has clip_high 0.28.
    """

    clip_low: ZeroToOne = 0.2  # the importance ratio's range is [1 - clip_low, 1 + clip_high]
    clip_high: NonNegativeFloat = 0.2

    def __call__(self, tokens: Tokens) -> Losses:
        plain = -tokens.ratio * tokens.advantages
        clipped = -jnp.clip(tokens.ratio, 1.0 - self.clip_low, 1.0 + self.clip_high) * tokens.advantages
        return jnp.maximum(plain, clipped), (clipped > plain).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class DualClip(PPOClip):
    """PPO's loss, but never more than -clip_dual A where A < 0. The constants are those of verl's default loss.

    See "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning" (Ye et al., arXiv 1912.09729), eq. 5.
    """

    clip_dual: Annotated[float, more_than(1)] = 3.0  # the loss is at most so many times the advantage's size

    def __call__(self, tokens: Tokens) -> Losses:
        loss, clipped = super().__call__(tokens)
        bound = -self.clip_dual * tokens.advantages
        capped = (tokens.advantages < 0) & (loss > bound)
        return jnp.where(capped, bound, loss), jnp.where(capped, 1.0, clipped)


@dataclasses.dataclass(frozen=True)
class GSPO:
    """PPO's loss with the sequence's ratio, exp(mean over the sequence of log p - log p_old), which moves less.

    The token form of "Group Sequence Policy Optimization" (Zheng et al., arXiv 2507.18071), eq. 14: the value of every
    token's ratio is s, its gradient s * grad log p of that token. Summed with equal weights over a sequence whose
    tokens share one advantage this is the sequence form (eq. 5); with other weights or with advantages of single
    tokens each token keeps its own. The constants are of section 5.1.
    """

    clip_low: ZeroToOne = 3e-4  # the ratio's range is [1 - clip_low, 1 + clip_high]
    clip_high: NonNegativeFloat = 4e-4

    def __call__(self, tokens: Tokens) -> Losses:
        own = tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs)  # 0, with the gradient of log p
        mean = tokens.sequence_mean(tokens.logprobs - tokens.old_logprobs)
        mean = jnp.clip(jax.lax.stop_gradient(mean), -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        by_sequence = tokens._replace(logprobs=mean + own, old_logprobs=jnp.zeros_like(mean))
        return PPOClip(self.clip_low, self.clip_high)(by_sequence)


@dataclasses.dataclass(frozen=True)
class GMPO:
    """-s A, s = exp(mean over the sequence of the pessimistic log r): min(log r, clip_high) where A > 0, else
    max(log r, -clip_low).

    "Geometric-Mean Policy Optimization" (Zhao et al., arXiv 2507.20673), eq. 4, in its token form, as GSPO's: every
    token's value is s, and its gradient s * grad log p of that token, none where it is clipped. Summed with equal
    weights over a sequence of one advantage this is the sequence form, which verl has. The constants are of section 4.
    """

    clip_low: NonNegativeFloat = 0.4  # the logarithm of a token's ratio is in [-clip_low, clip_high]
    clip_high: NonNegativeFloat = 0.4

    def __call__(self, tokens: Tokens) -> Losses:
        log_ratio, positive = tokens.logprobs - tokens.old_logprobs, tokens.advantages > 0
        bounded = jnp.where(positive, jnp.minimum(log_ratio, self.clip_high), jnp.maximum(log_ratio, -self.clip_low))
        mean = jnp.clip(jax.lax.stop_gradient(tokens.sequence_mean(bounded)), -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        own = bounded - jax.lax.stop_gradient(bounded)  # 0, with the gradient of log p where it is not clipped
        return -jnp.exp(mean + own) * tokens.advantages, (bounded != log_ratio).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class DPPO:
    """-sg(min(r, cap)) A log p, and 0 where p itself, not the ratio, has gone too far in A's direction.

    That is p - p_old > high where A > 0, else p - p_old < -low (binary total variation). A rare token, whose ratio
    moves fast, is not masked for it. "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879), as
    verl has it, with verl's constants.
    """

    low: ZeroToOne = 0.2  # by how much a token's probability may have fallen where A < 0
    high: ZeroToOne = 0.2  # and risen where A > 0
    cap: PositiveFloat = 20.0  # of the ratio, as a number

    def __call__(self, tokens: Tokens) -> Losses:
        moved = jax.lax.stop_gradient(jnp.exp(tokens.logprobs) - jnp.exp(tokens.old_logprobs))
        ratio = jax.lax.stop_gradient(jnp.minimum(tokens.ratio, self.cap))
        outside = jnp.where(tokens.advantages > 0, moved > self.high, moved < -self.low)
        return jnp.where(outside, 0.0, -ratio * tokens.advantages * tokens.logprobs), outside.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class CISPO:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p: a clipped token keeps its gradient, capped.

    See "MiniMax-M1" (arXiv 2506.13585), eq. 4. Published without a lower bound; the paper does not give the upper one.
    """

    clip_low: ZeroToOne = 1.0  # the ratio's range is [1 - clip_low, 1 + clip_high]
    clip_high: NonNegativeFloat = 0.28

    def __call__(self, tokens: Tokens) -> Losses:
        ratio = jax.lax.stop_gradient(tokens.ratio)
        bounded = jnp.clip(ratio, 1.0 - self.clip_low, 1.0 + self.clip_high)
        return -bounded * tokens.advantages * tokens.logprobs, (bounded != ratio).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class SoftGate:
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A. A gate that closes softly instead of a clip.

    The gradient is -4 s (1 - s) A r grad log p with s = sigmoid(tau (r - 1)), that of -r A at r = 1 and less the
    farther r is from it. See "Soft Adaptive Policy Optimization" (Gao et al., arXiv 2511.20347).
    """

    tau_positive: PositiveFloat = 1.0  # how fast the gate closes where the advantage is positive
    tau_negative: PositiveFloat = 1.05  # and elsewhere

    def __call__(self, tokens: Tokens) -> Losses:
        tau = jnp.where(tokens.advantages > 0, self.tau_positive, self.tau_negative)
        gate = jax.nn.sigmoid(tau * (tokens.ratio - 1.0)) * (4.0 / tau)
        return -gate * tokens.advantages, jnp.zeros_like(gate)


@dataclasses.dataclass(frozen=True)
class ImportanceSampling:
    """-r A: the policy gradient corrected for the policy that sampled, with no bound on how far it goes."""

    def __call__(self, tokens: Tokens) -> Losses:
        return -tokens.ratio * tokens.advantages, jnp.zeros_like(tokens.logprobs)


@dataclasses.dataclass(frozen=True)
class Reinforce:
    """-A log p (Williams, 1992): no ratio, so that of a step's updates only the first is exact."""

    def __call__(self, tokens: Tokens) -> Losses:
        return -tokens.advantages * tokens.logprobs, jnp.zeros_like(tokens.logprobs)


@dataclasses.dataclass(frozen=True)
class WebRL:
    """h(x) / b with x = b d - A, over a turn: its mean log ratio to the reference, d, is drawn towards A / b.

    d is the mean of log p - log p_ref over the turn's tokens, b is `rl.kl.coefficient`, and h the smooth L1: x^2 / 2
    within 1 of 0, else |x| - 1/2. Whoever has passed A / b is left there, and turns of A <= 0 are left out, unless
    `negative`. The gradient of d is b d - A, at most 1 in size: REINFORCE with the pull in the advantage, without a
    ratio. "WebRL" (Qi et al., arXiv 2411.02337) has (b d - A)^2, with sums for means; this is its released code's form.
    """

    reads: ClassVar[tuple[str, ...]] = ("turns",)
    reads_reference: ClassVar[bool] = True
    sure: ZeroToOne = 0.8  # from this probability per token under the reference on a turn has `sure_factor` times b
    sure_factor: PositiveFloat = 5.0
    negative: bool = False  # whether turns of A < 0 count, as in the paper

    def __call__(self, tokens: Tokens) -> Losses:
        reference = tokens.reference_logprobs
        assert reference is not None  # `reads_reference`
        length = jnp.maximum(tokens.turn_sum(jnp.ones_like(reference)), 1.0)
        gain = tokens.turn_sum(tokens.logprobs - reference) / length
        sure = jnp.exp(tokens.turn_sum(reference) / length) >= self.sure
        pull = tokens.kl_coefficient * jnp.where(sure, self.sure_factor, 1.0)
        sign = jnp.sign(tokens.advantages) if self.negative else (tokens.advantages > 0).astype(jnp.float32)
        short = jnp.maximum(sign * (tokens.advantages - pull * gain), 0.0)
        loss = jnp.where(short < 1.0, 0.5 * jnp.square(short), short - 0.5) / pull
        return loss, (short == 0.0).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class NoObjective:
    """0: auxiliary terms alone are trained."""

    def __call__(self, tokens: Tokens) -> Losses:
        return jnp.zeros_like(tokens.logprobs), jnp.zeros_like(tokens.logprobs)


OBJECTIVES: dict[str, type] = {
    "ppo_clip": PPOClip,
    "dual_clip": DualClip,
    "gspo": GSPO,
    "gmpo": GMPO,
    "dppo": DPPO,
    "cispo": CISPO,
    "sapo": SoftGate,
    "importance_sampling": ImportanceSampling,
    "reinforce": Reinforce,
    "webrl": WebRL,
    "none": NoObjective,
}
