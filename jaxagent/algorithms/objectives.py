"""What `rl.objective` can name: how an advantage moves the policy, each with its constants.

An entry is called with `policy_loss.Tokens` and gives `policy_loss.Losses`; the formulas are in `policy_loss.py`. An
objective of your own is such a class in a module of yours, `--config.rl.objective=my_package.my_module:MyObjective`.
No jax before an entry is called: a config is read without it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from jaxagent.config.ranges import NonNegativeFloat, PositiveFloat, ZeroToOne, more_than

if TYPE_CHECKING:
    from jaxagent.algorithms.policy_loss import Losses, Tokens


@dataclasses.dataclass(frozen=True)
class PPOClip:
    """PPO (arXiv 1707.06347). DAPO (arXiv 2503.14476) has clip_high 0.28."""

    clip_low: ZeroToOne = 0.2  # the importance ratio's range is [1 - clip_low, 1 + clip_high]
    clip_high: NonNegativeFloat = 0.2

    def __call__(self, tokens: Tokens) -> Losses:
        from jaxagent.algorithms.policy_loss import clipped_policy_loss

        return clipped_policy_loss(*tokens[:3], self.clip_low, self.clip_high)


@dataclasses.dataclass(frozen=True)
class DualClip(PPOClip):
    """PPO's, with a cap where the advantage is negative (arXiv 1912.09729); constants of verl's default loss."""

    clip_dual: Annotated[float, more_than(1)] = 3.0  # the loss is at most so many times the advantage's size

    def __call__(self, tokens: Tokens) -> Losses:
        from jaxagent.algorithms.policy_loss import dual_clip_loss

        return dual_clip_loss(*tokens[:3], self.clip_low, self.clip_high, self.clip_dual)


@dataclasses.dataclass(frozen=True)
class GSPO:
    """The ratio is the sequence's, which moves less than a token's (arXiv 2507.18071, section 5.1)."""

    clip_low: ZeroToOne = 3e-4  # the ratio's range is [1 - clip_low, 1 + clip_high]
    clip_high: NonNegativeFloat = 4e-4

    def __call__(self, tokens: Tokens) -> Losses:
        from jaxagent.algorithms.policy_loss import sequence_ratio_loss

        mean = tokens.sequence_mean(tokens.logprobs - tokens.old_logprobs)
        return sequence_ratio_loss(*tokens[:3], mean, self.clip_low, self.clip_high)


@dataclasses.dataclass(frozen=True)
class GMPO:
    """The ratio is the geometric mean of a sequence's clipped ones (arXiv 2507.20673, section 4)."""

    clip_low: NonNegativeFloat = 0.4  # the logarithm of a token's ratio is in [-clip_low, clip_high]
    clip_high: NonNegativeFloat = 0.4

    def __call__(self, tokens: Tokens) -> Losses:
        from jaxagent.algorithms.policy_loss import geometric_mean_loss

        return geometric_mean_loss(tokens, self.clip_low, self.clip_high)


@dataclasses.dataclass(frozen=True)
class DPPO:
    """A token's trust region is its probability's, not its ratio's (binary TV, arXiv 2602.04879); verl's constants."""

    low: ZeroToOne = 0.2  # by how much a token's probability may have fallen where A < 0
    high: ZeroToOne = 0.2  # and risen where A > 0
    cap: PositiveFloat = 20.0  # of the ratio, as a number

    def __call__(self, tokens: Tokens) -> Losses:
        from jaxagent.algorithms.policy_loss import probability_mask_loss

        return probability_mask_loss(*tokens[:3], self.low, self.high, self.cap)


@dataclasses.dataclass(frozen=True)
class CISPO:
    """A clipped ratio keeps its gradient (arXiv 2506.13585): no lower bound; the paper does not give the upper one."""

    clip_low: ZeroToOne = 1.0  # the ratio's range is [1 - clip_low, 1 + clip_high]
    clip_high: NonNegativeFloat = 0.28

    def __call__(self, tokens: Tokens) -> Losses:
        from jaxagent.algorithms.policy_loss import cispo_loss

        return cispo_loss(*tokens[:3], self.clip_low, self.clip_high)


@dataclasses.dataclass(frozen=True)
class SoftGate:
    """SAPO (arXiv 2511.20347): a gate that closes softly instead of a clip."""

    tau_positive: PositiveFloat = 1.0  # how fast the gate closes where the advantage is positive
    tau_negative: PositiveFloat = 1.05  # and elsewhere

    def __call__(self, tokens: Tokens) -> Losses:
        from jaxagent.algorithms.policy_loss import soft_gate_loss

        return soft_gate_loss(*tokens[:3], self.tau_positive, self.tau_negative)


@dataclasses.dataclass(frozen=True)
class ImportanceSampling:
    """The policy gradient with the ratio as it is, without any bound."""

    def __call__(self, tokens: Tokens) -> Losses:
        from jaxagent.algorithms.policy_loss import importance_sampling_loss

        return importance_sampling_loss(*tokens[:3])


@dataclasses.dataclass(frozen=True)
class Reinforce:
    """The policy gradient without a ratio (Williams, 1992): of a step's updates only the first is exact."""

    def __call__(self, tokens: Tokens) -> Losses:
        from jaxagent.algorithms.policy_loss import reinforce_loss

        return reinforce_loss(tokens.logprobs, tokens.advantages)


@dataclasses.dataclass(frozen=True)
class NoObjective:
    """Auxiliary terms alone are trained."""

    def __call__(self, tokens: Tokens) -> Losses:
        from jaxagent.algorithms.policy_loss import no_policy_loss

        return no_policy_loss(tokens.logprobs)


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
    "none": NoObjective,
}
