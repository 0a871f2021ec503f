"""Generalised advantage estimation over the action tokens of a trajectory.

In: rewards, values and the action mask of one trajectory. Out: advantages and returns. Time steps are ACTION tokens:
an observation between two turns is the environment's doing, so the last token of a turn is followed by the first token
of the next, with no step of discount for what lies between. Axis letter: T tokens. vmap for batches.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def check_tokens(mask: jax.Array, *streams: jax.Array) -> None:
    """Refuses with an AssertionError what is not bool[T] and float[T]: other shapes would broadcast."""
    chex.assert_rank(mask, 1)
    chex.assert_equal_shape([mask, *streams])
    chex.assert_type([mask, *streams], [bool, *[float] * len(streams)])


def gae(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, gamma: float, lam: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """delta_k = r_k + gamma v_{k+1} - v_k;  A_k = delta_k + gamma lam A_{k+1}, over action tokens k, and v_end = 0.

    See "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (Schulman et al.,
    arXiv 1506.02438), eq. 16.

    Args:
      rewards: f32[T], the reward of emitting each token.
      values: f32[T], the value of the state each token was sampled in.
      mask: bool[T], True for action tokens. What stands elsewhere in the inputs is never read.
      gamma: discount per action token.
      lam: lambda of the exponential average, a number or f32[].

    Returns:
      advantages and returns (advantages + values), f32[T], 0 outside the mask.
    """
    check_tokens(mask, rewards, values)

    def step(carry: tuple, token: tuple) -> tuple:
        next_value, next_advantage = carry
        reward, value, is_action = token
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = (jnp.where(is_action, value, next_value), jnp.where(is_action, advantage, next_advantage))
        return carry, jnp.where(is_action, advantage, 0.0)

    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)
    start = (jnp.zeros((), values.dtype), jnp.zeros((), values.dtype))
    _, advantages = jax.lax.scan(step, start, (rewards, values, mask), reverse=True)
    return advantages, advantages + values
