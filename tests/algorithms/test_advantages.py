"""Group advantages: hand numbers, statistics.stdev as the witness, mask equals drop."""

import statistics

import chex
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms.advantages import group_advantages, whiten, zero_signal


class HandNumbers(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_group_of_four(self):
        rewards, mask = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 9.0, 0.0]]), jnp.ones((2, 4), bool)
        mask = mask.at[1, 2].set(False)  # the failed attempt's reward must not be read
        with_std = self.variant(lambda r, m: group_advantages(r, m, True))(rewards, mask)
        # mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4: (1 - 1/4) / (1/2) = 1.5
        np.testing.assert_allclose(with_std[0], [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
        # mean 2/3, unbiased variance (1/9 + 1/9 + 4/9) / 2 = 1/3: (1/3) / sqrt(1/3) = sqrt(1/3)
        np.testing.assert_allclose(with_std[1], [3**-0.5, 3**-0.5, 0, -2 * 3**-0.5], rtol=1e-5)
        centred = self.variant(lambda r, m: group_advantages(r, m, False))(rewards, mask)
        np.testing.assert_allclose(centred, [[0.75, -0.25, -0.25, -0.25], [1 / 3, 1 / 3, 0, -2 / 3]], rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_equal_rewards_give_zero_and_a_lone_attempt_its_reward(self):
        advantages = self.variant(lambda r, m: group_advantages(r, m, True))
        assert not np.any(advantages(jnp.full((1, 3), 0.7), jnp.ones((1, 3), bool)))
        np.testing.assert_allclose(advantages(jnp.array([[2.0]]), jnp.ones((1, 1), bool)), [[2.0]], rtol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_zero_signal(self):
        rewards = jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        mask = jnp.array([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
        np.testing.assert_array_equal(self.variant(zero_signal)(rewards, mask), [True, False, True, True])
        np.testing.assert_array_equal(self.variant(zero_signal)(rewards[:, :1], mask[:, :1]), [False] * 3 + [True])

    @chex.variants(with_jit=True, without_jit=True)
    def test_whiten(self):
        values, mask = jnp.array([[1.0, 99.0], [3.0, 5.0]]), jnp.array([[1, 0], [1, 1]], bool)
        np.testing.assert_allclose(self.variant(whiten)(values, mask), [[-1.0, 0.0], [0.0, 1.0]], atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 9))
def test_masked_group_equals_the_smaller_group(seed, size):
    rng = np.random.default_rng(seed)
    rewards, mask = rng.normal(size=(1, size)), rng.random((1, size)) < 0.7
    kept = [float(r) for r in rewards[mask]]
    got = group_advantages(rewards, mask, True)
    assert not got[~mask].any()
    if len(kept) > 1:
        mean, std = statistics.mean(kept), statistics.stdev(kept)
        np.testing.assert_allclose(got[mask], [(r - mean) / (std + 1e-6) for r in kept], rtol=1e-9, atol=1e-9)
