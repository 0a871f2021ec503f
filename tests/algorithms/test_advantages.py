"""Group advantages: hand numbers, statistics.stdev as the witness, mask equals drop."""

import itertools
import statistics

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms import compose
from jaxagent.algorithms.advantages import (
    group_mean,
    group_mean_std,
    whiten,
    zero_signal,
)
from jaxagent.types import StopReason
from tests.algorithms.entries import BEST_OF_K, GROUP, TURN


class HandNumbers(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_group_of_four(self):
        rewards, mask = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 9.0, 0.0]]), jnp.ones((2, 4), bool)
        mask = mask.at[1, 2].set(False)  # the failed attempt's reward must not be read
        with_std = self.variant(group_mean_std)(rewards, mask)
        # mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4: (1 - 1/4) / (1/2) = 1.5
        np.testing.assert_allclose(with_std[0], [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
        # mean 2/3, unbiased variance (1/9 + 1/9 + 4/9) / 2 = 1/3: (1/3) / sqrt(1/3) = sqrt(1/3)
        np.testing.assert_allclose(with_std[1], [3**-0.5, 3**-0.5, 0, -2 * 3**-0.5], rtol=1e-5)
        centred = self.variant(group_mean)(rewards, mask)
        np.testing.assert_allclose(centred, [[0.75, -0.25, -0.25, -0.25], [1 / 3, 1 / 3, 0, -2 / 3]], rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_equal_rewards_give_zero_and_a_lone_attempt_its_reward(self):
        advantages = self.variant(group_mean_std)
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


class OtherBaselines(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_rewards_one_zero_zero_and_one_that_does_not_count(self):
        rewards, mask = jnp.array([[1.0, 0.0, 0.0, 9.0]]), jnp.array([[1, 1, 1, 0]], bool)
        by_hand = {
            # minus the mean of the others: 1 - 0, 0 - 1/2, 0 - 1/2
            "leave_one_out": [1.0, -0.5, -0.5, 0.0],
            # and over the std of the three: variance (4/9 + 1/9 + 1/9) / 2 = 1/3
            "leave_one_out_std": [3**0.5, -0.5 * 3**0.5, -0.5 * 3**0.5, 0.0],
            "no_baseline": [1.0, 0.0, 0.0, 0.0],
            # minus the mean and over it: (1 - 1/3) / (1/3)
            "maxrl": [2.0, -1.0, -1.0, 0.0],
        }
        for name, expected in by_hand.items():
            np.testing.assert_allclose(self.variant(GROUP[name])(rewards, mask)[0], expected, rtol=1e-5)


def test_a_rare_success_weighs_most_where_the_mean_divides_and_negative_rewards_say_nothing_there():
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0] * 4, [-1.0, -1.0, -1.0, 0.5]])
    got = GROUP["maxrl"](rewards, np.ones((4, 4), bool))
    np.testing.assert_allclose(got[:2], [[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1]], rtol=1e-5)
    assert not got[2:].any()
    # Batch scaling keeps the proportions of groups: 4 ones of 12 rewards, whose unbiased variance is 8 / 33.
    scaled = GROUP["group_mean_batch_std"](rewards[:3], np.ones((3, 4), bool))
    np.testing.assert_allclose(scaled, group_mean(rewards[:3], np.ones((3, 4), bool)) / (8 / 33) ** 0.5, rtol=1e-5)


COMPILED = {name: jax.jit(function) for name, function in GROUP.items()}


def by_definition(name: str, kept: list[float], planned: int, batch: list[float]) -> list[float]:
    """The counted rewards of one group of `planned` attempts, in plain Python; `batch` are those of all groups."""
    if name == "no_reward" or len(kept) < 2 <= planned:
        return [0.0] * len(kept)
    batch_std = statistics.stdev(batch) + 1e-6 if len(batch) > 1 else 1.0
    if len(kept) < 2 and name == "group_mean_batch_std":
        return [r / batch_std for r in kept]
    if len(kept) < 2 or name == "no_baseline":
        return kept
    mean, std = statistics.mean(kept), statistics.stdev(kept) + 1e-6
    others = [r - (sum(kept) - r) / (len(kept) - 1) for r in kept]
    return {
        "group_mean_std": [(r - mean) / std for r in kept],
        "group_mean": [r - mean for r in kept],
        "group_mean_batch_std": [(r - mean) / batch_std for r in kept],
        "maxrl": [(r - mean) / (mean + 1e-6) if mean > 0 else 0.0 for r in kept],
        "leave_one_out": others,
        "leave_one_out_std": [a / std for a in others],
    }[name]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 6]), st.sampled_from(sorted(GROUP)), st.booleans())
def test_masked_groups_equal_their_counted_attempts_alone(seed, size, name, equal):
    rng = np.random.default_rng(seed)
    rewards = np.full((3, size), 0.3) if equal else rng.integers(-4, 5, (3, size)) / 4
    mask = rng.random((3, size)) < 0.7
    rewards[~mask] = np.nan  # never read
    got = GROUP[name](rewards, mask)
    single = COMPILED[name](rewards.astype(np.float32), mask)
    assert not got[~mask].any()
    for group, keep, row in zip(rewards, mask, got, strict=True):
        expected = by_definition(name, group[keep].tolist(), size, rewards[mask].tolist())
        np.testing.assert_allclose(row[keep], expected, rtol=1e-9, atol=1e-9)
    if not equal:  # equal rewards of 0.3 give rounding over 1e-6
        np.testing.assert_allclose(single, got, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "rule"),
    [*itertools.product((*GROUP, *BEST_OF_K), ("full", "statistics")), *((name, None) for name in TURN)],
)
def test_what_the_failures_of_others_leave_alone_has_no_advantage(rl, make_group, name, rule):
    """One success of eight: the sandbox failed seven times. A group that was planned with one attempt keeps its R."""
    config = rl(advantage=dict(name=name) | (dict(multi_trajectory=rule) if rule else {}))
    lone = make_group(("paoa", 1.0), *[("pa", 0.0, StopReason.ENV_ERROR)] * 7)
    for group in (lone, make_group(("paoa paa", 1.0), ("pa", 1.0, StopReason.TIMEOUT))):
        trained = compose.streams([group], config, 0.0)[0]
        assert trained and not any(s.advantages.any() for s in trained)
        assert all(s.policy_weights.any() for s in trained)  # they count in the means, as every group without signal
    planned = compose.streams([make_group(("paoa", 0.75)), make_group(("pa", 0.5))], config, 0.0)[0]
    kept = {"no_reward": 0.0, "group_mean_batch_std": 1 / (statistics.stdev([0.75, 0.5]) + 1e-6)}.get(name, 1.0)
    np.testing.assert_allclose(planned[0].advantages, np.array([0, 0.75, 0, 0.75]) * kept)
    np.testing.assert_allclose(planned[1].advantages, np.array([0, 0.5]) * kept)


def test_a_batchs_std_is_of_all_counted_trajectories_when_groups_of_one_are_beside_others(rl, make_group):
    config = rl(advantage=dict(name="group_mean_batch_std", multi_trajectory="statistics"))
    groups = [make_group((text, reward)) for text, reward in (("pa", 1.0), ("pa paa", 5.0), ("pa", 3.0))]
    first, *both, last = compose.streams(groups, config, 0.0)[0]
    std = statistics.stdev([1.0, 5.0, 5.0, 3.0]) + 1e-6
    np.testing.assert_allclose([first.advantages[1], last.advantages[1]], [1 / std, 3 / std], rtol=1e-6)
    assert not any(s.advantages.any() for s in both)


def test_a_group_of_one_keeps_its_reward_beside_one_of_several_trajectories(rl, make_group):
    config = rl(advantage=dict(name="group_mean", multi_trajectory="statistics"))
    groups = [make_group(("pa", 0.75)), make_group(("pa paa", 0.5))]
    one, *both = compose.streams(groups, config, 0.0)[0]
    np.testing.assert_allclose(one.advantages, [0, 0.75])
    assert not any(s.advantages.any() for s in both)  # two trajectories of one reward
