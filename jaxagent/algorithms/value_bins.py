"""The critic as a classifier: values are the mean of a categorical distribution over bins, learnt by cross-entropy.

"Stop Regressing: Training Value Functions via Classification for Scalable Deep RL" (Farebrother et al.,
arXiv 2403.03950). In: logits and returns. Out: values, or losses per token; the caller's weights do every reduction.
Axis letter: N bins.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
from jax.scipy.special import erf


@dataclasses.dataclass(frozen=True)
class Bins:
    """N bins of equal width over [low, high]. Static under jit."""

    low: float
    high: float
    bins: int
    sigma: float  # of HL-Gauss, in bin widths

    @property
    def width(self) -> float:
        """Of one bin, in units of reward."""
        return (self.high - self.low) / self.bins

    @property
    def centres(self) -> jax.Array:
        """f32[N]."""
        return self.low + self.width * (jnp.arange(self.bins) + 0.5)


def expectation(logits: jax.Array, support: Bins) -> jax.Array:
    """The values, f32[...], of logits f32[..., N]: the mean of the bins' centres. 0 logits: the middle."""
    chex.assert_axis_dimension(logits, -1, support.bins)
    chex.assert_type(logits, float)
    return jax.nn.softmax(logits, axis=-1) @ support.centres


def two_hot(returns: jax.Array, support: Bins) -> jax.Array:
    """f32[...] -> f32[..., N] on the two centres around the return, whose mean is the return. Eq. 3.3 (Two-Hot).

    Returns beyond the outermost centres count as these.
    """
    chex.assert_type(returns, float)
    at = (returns - support.low) / support.width - 0.5
    at = jnp.clip(at, 0.0, support.bins - 1.0)[..., None]
    return jnp.maximum(1.0 - jnp.abs(at - jnp.arange(support.bins)), 0.0)


def hl_gauss(returns: jax.Array, support: Bins) -> jax.Array:
    """f32[...] -> f32[..., N]: a normal distribution around the return, cut off at low and high. HL-Gauss.

    The mass of bin i is (F(edge_{i+1}) - F(edge_i)) / (F(high) - F(low)), F the normal distribution function with mean
    the return (brought into [low, high]) and standard deviation sigma * width.
    """
    chex.assert_type(returns, float)
    edges = support.low + support.width * jnp.arange(support.bins + 1)
    returns = jnp.clip(returns, support.low, support.high)[..., None]
    below = erf((edges - returns) / (jnp.sqrt(2.0) * support.sigma * support.width))  # 2 F - 1
    return (below[..., 1:] - below[..., :-1]) / (below[..., -1:] - below[..., :1])


TARGETS = {"hl_gauss": hl_gauss, "two_hot": two_hot}


def categorical_value_loss(logits: jax.Array, returns: jax.Array, support: Bins, target: str) -> jax.Array:
    """Cross-entropy -sum over bins of target * log softmax(logits), less the target's own entropy: 0 when perfect.

    The entropy changes no gradient; without it a loss could not be read.

    Args:
      logits: f32[..., N]; gradients flow through them alone.
      returns: f32[...].
      support: the bins.
      target: "hl_gauss" or "two_hot".

    Returns:
      f32[...], not negative.
    """
    chex.assert_shape(logits, (*returns.shape, support.bins))
    chex.assert_type([logits, returns], float)
    goal = jax.lax.stop_gradient(TARGETS[target](returns, support))
    own = jnp.where(goal > 0, goal * jnp.log(jnp.where(goal > 0, goal, 1.0)), 0.0)
    return jnp.sum(own - goal * jax.nn.log_softmax(logits, axis=-1), axis=-1)
