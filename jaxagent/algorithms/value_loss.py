"""The critic's clipped regression, per token.

In: values and returns of any shape. Out: losses of that shape; the caller's weights do every reduction.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def clipped_value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, clip: float
) -> tuple[jax.Array, jax.Array]:
    """max((v - G)^2, (old + clamp(v - old, -clip, clip) - G)^2) / 2.

    The form used by PPO implementations (Huang et al., "The 37 Implementation Details of PPO", detail 9,
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details).

    Args:
      values: f32[...] the critic's estimates; gradients flow through them alone.
      old_values: f32[...] estimates when the advantages were computed.
      returns: f32[...] regression targets G.
      clip: trust region around `old_values`, in units of reward; 0 = no clipping.

    Returns:
      loss f32[...], and f32[...] 1 where the clipped branch is active, else 0.
    """
    chex.assert_equal_shape([values, old_values, returns])
    chex.assert_type([values, old_values, returns], float)
    old_values, returns = jax.lax.stop_gradient((old_values, returns))
    plain = 0.5 * jnp.square(values - returns)
    if clip == 0:
        return plain, jnp.zeros_like(plain)
    near = old_values + jnp.clip(values - old_values, -clip, clip)
    clipped = 0.5 * jnp.square(near - returns)
    return jnp.maximum(plain, clipped), (clipped > plain).astype(jnp.float32)
