"""Estimators of the KL divergence to a frozen reference, per token, from the sampled token alone.

With d = log p - log p_ref of a token sampled from p (see Schulman, "Approximating KL Divergence",
http://joschu.net/blog/kl-approx.html):

  k1   d                    unbiased, high variance
  k2   d^2 / 2              biased, low variance
  k3   exp(-d) - 1 + d      unbiased and non-negative; "low_var_kl"; GRPO's (arXiv 2402.03300, eq. 4)
  abs  |d|

In the reward an estimator is a number. In the loss its gradient is what matters, and that of k1 is useless:
E_p[grad d] = E_p[grad log p] = 0. So k1 in the loss has k1's value and k2's gradient, whose expectation
E_p[d * grad log p] is the gradient of KL(p || p_ref). k2, k3 and abs are differentiated as they stand; the expected
gradient of k3 is that of the OTHER divergence, KL(p_ref || p), so "k3+" has k3's value and k2's gradient too.
"""

from __future__ import annotations

from typing import Any

import chex
import jax

Array = Any  # numpy.ndarray or jax.Array

_MAX_DIFFERENCE = 20.0  # of d inside exp: finite values and gradients
_MAX_K3 = 10.0  # published implementations clamp k3 here


def kl_estimate(logprobs: Array, reference_logprobs: Array, estimator: str) -> Array:
    """The estimate of each token, float of the inputs' shape. Runs on NumPy and JAX arrays.

    Raises:
      ValueError: unknown estimator.
    """
    chex.assert_equal_shape([logprobs, reference_logprobs])
    chex.assert_type([logprobs, reference_logprobs], float)
    xp = logprobs.__array_namespace__()
    d = logprobs - reference_logprobs
    match estimator:
        case "k1":
            return d
        case "k2":
            return 0.5 * d * d
        case "k3" | "k3+":
            bounded = xp.clip(d, -_MAX_DIFFERENCE, _MAX_DIFFERENCE)
            return xp.clip(xp.exp(-bounded) - 1.0 + bounded, -_MAX_K3, _MAX_K3)
        case "abs":
            return xp.abs(d)
    raise ValueError(f"unknown KL estimator '{estimator}'")


def kl_loss(logprobs: jax.Array, reference_logprobs: jax.Array, estimator: str) -> jax.Array:
    """The estimate of each token, f32[...], with a gradient that lowers the KL (see the module docstring)."""
    reference_logprobs = jax.lax.stop_gradient(reference_logprobs)
    if estimator not in ("k1", "k3+"):
        return kl_estimate(logprobs, reference_logprobs, estimator)
    value = kl_estimate(logprobs, reference_logprobs, estimator)
    with_gradient = kl_estimate(logprobs, reference_logprobs, "k2")
    return jax.lax.stop_gradient(value - with_gradient) + with_gradient
