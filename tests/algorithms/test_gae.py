"""GAE: hand numbers, the textbook double sum in float64, gaps equal dropping them, finite gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms.gae import gae


class HandNumbers(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_two_turns_with_an_observation_between(self):
        rewards, values = jnp.array([0.0, 0.0, 7.0, 1.0]), jnp.array([0.5, 0.25, 9.0, 0.5])
        mask = jnp.array([True, True, False, True])
        advantages, returns = self.variant(lambda r, v, m: gae(r, v, m, 0.5, 0.5))(rewards, values, mask)
        # Backwards over the three actions: 1 - .5 = .5; .5*.5 - .25 + .25*.5 = .125; .5*.25 - .5 + .25*.125 = -.34375
        np.testing.assert_allclose(advantages, [-0.34375, 0.125, 0.0, 0.5], rtol=1e-6)
        np.testing.assert_allclose(returns, [0.15625, 0.375, 0.0, 1.0], rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_monte_carlo_limit(self):
        """gamma = lambda = 1: the return of every action is the reward to come, whatever the critic says."""
        rewards, values = jnp.array([0.0, 0.25, 0.0, 1.0]), jnp.array([3.0, -1.0, 8.0, 0.3])
        mask = jnp.array([True, True, False, True])
        _, returns = self.variant(lambda r, v, m: gae(r, v, m, 1.0, 1.0))(rewards, values, mask)
        np.testing.assert_allclose(returns, [1.25, 1.25, 0.0, 1.0], rtol=1e-6)


compiled = jax.jit(gae)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1), st.floats(0, 1))
def test_equals_the_double_sum_over_action_tokens_alone(seed, gamma, lam):
    rng = np.random.default_rng(seed)
    rewards, values, mask = rng.normal(size=9), rng.normal(size=9), rng.random(9) < 0.6
    advantages, returns = compiled(np.float32(rewards), np.float32(values), mask, gamma, lam)
    r, v = rewards[mask], np.append(values[mask], 0.0)
    deltas = r + gamma * v[1:] - v[:-1]
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r))) for t in range(len(r))]
    np.testing.assert_allclose(np.asarray(advantages)[mask], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(returns)[mask], np.array(expected) + v[:-1], rtol=1e-5, atol=1e-5)
    assert not np.any(np.asarray(advantages)[~mask])


def test_what_stands_in_the_gaps_is_never_read():
    mask = jnp.array([True, False, True])
    poison = jnp.array([0.1, jnp.nan, 0.2])
    advantages, _ = gae(poison, poison, mask, 0.9, 0.9)
    clean, _ = gae(jnp.nan_to_num(poison), jnp.nan_to_num(poison), mask, 0.9, 0.9)
    np.testing.assert_array_equal(advantages, clean)
    gradient = jax.grad(lambda values: gae(poison, values, mask, 0.9, 0.9)[0].sum())(poison)
    assert np.all(np.isfinite(gradient))
