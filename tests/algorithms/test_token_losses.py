"""KL losses per token: their gradients, and what they estimate."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxagent.algorithms.policy_loss import kl_estimate, kl_loss


def test_absurd_ratios_stay_finite():
    extreme = jnp.array([-1e4, 1e4])
    for estimator in ("k1", "k2", "k3", "abs"):
        total = lambda lp: kl_loss(lp, jnp.zeros(2), estimator).sum()  # noqa: B023, E731
        assert np.isfinite(total(extreme)) and np.all(np.isfinite(jax.grad(total)(extreme)))


class KL(chex.TestCase, parameterized.TestCase):
    @parameterized.parameters(("k1", 1e-6), ("k2", 1e-6), ("k3+", 1e-6))
    def test_expected_gradient_is_that_of_the_true_kl(self, estimator, tolerance):
        """Over a whole vocabulary: E_p[grad of the estimate] = grad KL(p || q), for k1 too."""
        logits, reference = jnp.array([0.3, -1.0, 0.8, 0.0]), jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.5, 0.1]))
        p = jax.nn.softmax(logits)

        def expected(z):
            return jnp.sum(p * kl_loss(jax.nn.log_softmax(z), reference, estimator))

        def true(z):
            return jnp.sum(jax.nn.softmax(z) * (jax.nn.log_softmax(z) - reference))

        np.testing.assert_allclose(jax.grad(expected)(logits), jax.grad(true)(logits), atol=tolerance)

    def test_k3_as_it_stands_has_the_gradient_of_the_other_divergence(self):
        logits, reference = jnp.array([0.3, -1.0, 0.8]), jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.5]))
        p = jax.nn.softmax(logits)
        got = jax.grad(lambda z: jnp.sum(p * kl_loss(jax.nn.log_softmax(z), reference, "k3")))(logits)
        other = jax.grad(lambda z: jnp.sum(jnp.exp(reference) * (reference - jax.nn.log_softmax(z))))(logits)
        np.testing.assert_allclose(got, other, atol=1e-6)

    @parameterized.parameters("k1", "k2", "k3", "k3+", "abs")
    def test_gradient_equals_torch_autograd(self, estimator):
        torch = pytest.importorskip("torch")
        rng = np.random.default_rng(0)
        logprobs, reference = rng.normal(-2, 0.5, (2, 50)).astype(np.float32)
        x = torch.from_numpy(logprobs.astype(np.float64)).requires_grad_()
        d = x - torch.from_numpy(reference.astype(np.float64))
        by_gradient = {"k1": d * d / 2, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d, "k3+": d * d / 2, "abs": d.abs()}
        by_gradient[estimator].sum().backward()
        got = jax.grad(lambda lp: kl_loss(lp, jnp.asarray(reference), estimator).sum())(jnp.asarray(logprobs))
        np.testing.assert_allclose(got, x.grad, rtol=1e-5, atol=1e-6)

    def test_k1_and_k3_are_unbiased(self):
        p, q = jnp.array([0.7, 0.2, 0.1]), jnp.array([0.3, 0.3, 0.4])
        true = jnp.sum(p * jnp.log(p / q))
        for estimator in ("k1", "k3"):
            np.testing.assert_allclose(jnp.sum(p * kl_estimate(jnp.log(p), jnp.log(q), estimator)), true, rtol=1e-5)

    def test_unknown_estimator(self):
        with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
            kl_estimate(np.zeros(1), np.zeros(1), "k4")
