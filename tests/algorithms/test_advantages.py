"""Group advantages: statistics.stdev as the witness, mask equals drop."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms import compose
from jaxagent.algorithms.advantages import (
    whiten,
    zero_signal,
)
from jaxagent.types import StopReason
from tests.algorithms.entries import BEST_OF_K, GROUP, TURN


def test_whiten_and_a_group_of_one_is_a_signal():
    values, mask = np.array([[1.0, 99.0], [3.0, 5.0]]), np.array([[1, 0], [1, 1]], bool)
    np.testing.assert_allclose(whiten(values, mask), [[-1.0, 0.0], [0.0, 1.0]], atol=1e-6)
    np.testing.assert_array_equal(zero_signal(values[:, 1:], mask[:, 1:]), [True, False])


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
    assert not got[~mask].any()
    for group, keep, row in zip(rewards, mask, got, strict=True):
        expected = by_definition(name, group[keep].tolist(), size, rewards[mask].tolist())
        np.testing.assert_allclose(row[keep], expected, rtol=1e-9, atol=1e-9)


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
    silent = dict.fromkeys(("no_reward", "tree_rl", "branch_pairs"), 0.0)
    kept = (silent | {"group_mean_batch_std": 1 / (statistics.stdev([0.75, 0.5]) + 1e-6)}).get(name, 1.0)
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
