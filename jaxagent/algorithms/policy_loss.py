"""The clipped policy objective, per token.

In: log-probs and advantages of any shape. Out: losses of that shape; the caller's weights do every reduction.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# exp(20) is far outside any clip range; the bound keeps values and gradients finite for tokens of weight 0.
MAX_LOG_RATIO = 20.0


def clipped_policy_loss(
    logprobs: jax.Array, behaviour_logprobs: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """PPO's pessimistic surrogate: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), r = p / p_behaviour.

    See "Proximal Policy Optimization Algorithms" (Schulman et al., arXiv 1707.06347), eq. 7; different bounds as in
    "DAPO" (Yu et al., arXiv 2503.14476), eq. 10.

    Args:
      logprobs: f32[...] under the policy being trained; gradients flow through it alone.
      behaviour_logprobs: f32[...] recorded when the tokens were sampled.
      advantages: f32[...].
      clip_low, clip_high: how far r may fall below and rise above 1.

    Returns:
      loss f32[...], and f32[...] 1 where the clipped branch is active (no gradient), else 0.
    """
    behaviour_logprobs, advantages = jax.lax.stop_gradient((behaviour_logprobs, advantages))
    ratio = jnp.exp(jnp.clip(logprobs - behaviour_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -ratio * advantages
    clipped = -jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    return jnp.maximum(plain, clipped), (clipped > plain).astype(jnp.float32)
