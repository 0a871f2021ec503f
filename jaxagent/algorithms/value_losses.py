"""What a critic's `loss` can name: how values are learnt, and what the critic's head says of a state.

An entry is called with what the head gave, the values when the advantages were computed and the returns, f32[...] each,
and gives f32[...] twice: the loss of each token, whose gradient flows through the head's outputs alone, and 1 where the
clipped branch is active. The learner's weights do every reduction.
No jax before an entry is called: a config is read without it. Axis letter: N bins.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from jaxagent.algorithms.late import jax, jnp
from jaxagent.config.ranges import FiniteFloat, NonNegativeFloat, PositiveFloat, at_least
from jaxagent.contract import check_arrays


@dataclasses.dataclass(frozen=True)
class Squared:
    """max((v - G)^2, (old + clamp(v - old, -clip, clip) - G)^2) / 2: clipped regression. The head says the value v.

    The form used by PPO implementations (Huang et al., "The 37 Implementation Details of PPO", detail 9,
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details); 0.5 is verl's range.
    """

    heads: ClassVar[int] = 0  # logits of the head; 0: one number, f32[...] without an axis for it
    value_clip: NonNegativeFloat = 0.5  # in units of reward; 0 = not clipped

    def __call__(self, outputs: jax.Array, old_values: jax.Array, returns: jax.Array) -> tuple[jax.Array, jax.Array]:
        check_arrays(outputs, old_values, returns, types=float)
        old_values, returns = jax.lax.stop_gradient((old_values, returns))
        plain = 0.5 * jnp.square(outputs - returns)
        if self.value_clip == 0:
            return plain, jnp.zeros_like(plain)
        near = old_values + jnp.clip(outputs - old_values, -self.value_clip, self.value_clip)
        clipped = 0.5 * jnp.square(near - returns)
        return jnp.maximum(plain, clipped), (clipped > plain).astype(jnp.float32)

    def values(self, outputs: jax.Array) -> jax.Array:
        """f32[...] of what the head gave."""
        return outputs


@dataclasses.dataclass(frozen=True)
class Categorical:
    """Cross-entropy -sum over bins of target * log softmax(outputs), less the target's own entropy: 0 when perfect.

    The value is the mean of a categorical distribution over N bins of equal width over [low, high], of which the head
    gives the logits f32[..., N]. The entropy changes no gradient; without it a loss could not be read. See "Stop
    Regressing: Training Value Functions via Classification for Scalable Deep RL" (Farebrother et al., arXiv
    2403.03950). Nothing is clipped.
    """

    bins: Annotated[int, at_least(2)] = 51
    low: FiniteFloat = -0.25  # for rewards from 0 to 1: the width of a few bins beyond, for the spread of hl_gauss
    high: FiniteFloat = 1.25

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g}).")

    @property
    def heads(self) -> int:
        """Logits of the head."""
        return self.bins

    @property
    def width(self) -> float:
        """Of one bin, in units of reward."""
        return (self.high - self.low) / self.bins

    def target(self, returns: jax.Array) -> jax.Array:
        """The distribution that is learnt: f32[...] -> f32[..., N]."""
        raise NotImplementedError

    def __call__(self, outputs: jax.Array, old_values: jax.Array, returns: jax.Array) -> tuple[jax.Array, jax.Array]:
        goal = jax.lax.stop_gradient(self.target(returns))
        check_arrays(outputs, goal, types=float)
        check_arrays(returns, types=float)
        own = jnp.where(goal > 0, goal * jnp.log(jnp.where(goal > 0, goal, 1.0)), 0.0)
        loss = jnp.sum(own - goal * jax.nn.log_softmax(outputs, axis=-1), axis=-1)
        return loss, jnp.zeros_like(returns)

    def values(self, outputs: jax.Array) -> jax.Array:
        """The expectations, f32[...]: the mean of the bins' centres. 0 logits: the middle."""
        return jax.nn.softmax(outputs, axis=-1) @ (self.low + self.width * (jnp.arange(self.bins) + 0.5))


@dataclasses.dataclass(frozen=True)
class HLGauss(Categorical):
    """The target is a normal distribution around the return, cut off at low and high.

    The mass of bin i is (F(edge_{i+1}) - F(edge_i)) / (F(high) - F(low)), F the normal distribution function with mean
    the return (brought into [low, high]) and standard deviation sigma * width.
    """

    sigma: PositiveFloat = 0.75  # standard deviation of the target, in bin widths

    def target(self, returns: jax.Array) -> jax.Array:
        edges = self.low + self.width * jnp.arange(self.bins + 1)
        returns = jnp.clip(returns, self.low, self.high)[..., None]
        below = jax.lax.erf((edges - returns) / (jnp.sqrt(2.0) * self.sigma * self.width))  # 2 F - 1
        return (below[..., 1:] - below[..., :-1]) / (below[..., -1:] - below[..., :1])


class TwoHot(Categorical):
    """The target lies on the two bins' centres around the return, and has it as its mean: eq. 3.3.

    Returns beyond the outermost centres count as these.
    """

    def target(self, returns: jax.Array) -> jax.Array:
        at = jnp.clip((returns - self.low) / self.width - 0.5, 0.0, self.bins - 1.0)[..., None]
        return jnp.maximum(1.0 - jnp.abs(at - jnp.arange(self.bins)), 0.0)


VALUE_LOSSES: dict[str, type] = {"squared": Squared, "hl_gauss": HLGauss, "two_hot": TwoHot}
