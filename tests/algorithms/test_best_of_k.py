"""max@k and pass@k advantages: by enumerating every subset, and the expected gradient of max@k itself."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms import checks, compose
from jaxagent.config import ConfigError
from tests.algorithms.entries import BEST_OF_K


def by_subsets(name: str, kept: list[float], k: int) -> list[float]:
    """Every subset of k written out."""
    n, k = len(kept), min(k, len(kept))
    if n == 1:  # left alone by the failures of the others
        return [0.0]
    if k == 1 and name == "max_at_k":
        return kept
    subsets = list(itertools.combinations(range(n), k))
    best = {s: max(kept[i] for i in s) for s in subsets}
    if name == "max_at_k":
        without = {(s, i): max(kept[j] for j in s if j != i) for s in subsets for i in s}
        return [sum(best[s] - without[s, i] for s in subsets if i in s) * n / len(subsets) for i in range(n)]
    mean = sum(best.values()) / len(subsets)
    std = math.sqrt(sum((b - mean) ** 2 for b in best.values()) / len(subsets)) + 1e-6
    with_i = [[best[s] for s in subsets if i in s] for i in range(n)]
    return [(sum(b) / len(b) - mean) / std for b in with_i]


K = 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(BEST_OF_K)), st.sampled_from([1, 2, K, 5]), st.integers(1, 4))
def test_equals_every_subset_written_out(seed, name, k, levels):
    rng = np.random.default_rng(seed)
    rewards, mask = rng.integers(0, levels, (3, 6)) / 4 - 0.25, rng.random((3, 6)) < 0.7  # with ties, and all equal
    rewards[~mask] = np.nan  # never read
    got = BEST_OF_K[name](k=k)(rewards, mask)
    assert not got[~mask].any()
    for group, keep, row in zip(rewards, mask, got, strict=True):
        if keep.any():
            np.testing.assert_allclose(row[keep], by_subsets(name, [float(r) for r in group[keep]], k), atol=1e-9)


@pytest.mark.parametrize("right", range(1, 8))
def test_zero_and_one_rewards_give_the_papers_closed_form(right):
    n, k, wrong = 8, 4, 8 - right
    p = 1 - math.comb(wrong, k) / math.comb(n, k)
    got = BEST_OF_K["pass_at_k"](k=k)(np.array([[1.0] * right + [0.0] * wrong]), np.ones((1, n), bool))[0]
    std = math.sqrt(p * (1 - p)) + 1e-6
    expected = [(1 - p) / std] * right + [(1 - p - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / std] * wrong
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_the_expected_gradient_is_that_of_max_at_k():
    """Two actions of rewards 0 and 1, n = 3, k = 2: mean over attempts of A grad log p, over all outcomes, exactly."""
    n, k, p, rewards = 3, 2, 0.3, np.array([0.0, 1.0])
    score = np.array([-1 / (1 - p), 1 / p])  # d log p(action) / dp
    expected = 0.0
    for actions in itertools.product((0, 1), repeat=n):
        advantages = BEST_OF_K["max_at_k"](k=k)(rewards[list(actions)][None], np.ones((1, n), bool))[0]
        probability = np.prod([p if a else 1 - p for a in actions])
        expected += probability * np.mean(advantages * score[list(actions)])
    np.testing.assert_allclose(expected, k * (1 - p) ** (k - 1), rtol=1e-12)  # d/dp of 1 - (1 - p)^k


def test_trains_by_its_name_and_refuses_a_k_beyond_the_group(rl, make_group):
    group = make_group(("pa", 1.0), ("pa", 0.0), ("pa", 0.0))
    config = rl(advantage=dict(name="max_at_k", k=2), group_size=3)
    checks.check(config)
    np.testing.assert_allclose([s.advantages[1] for s in compose.streams([group], config, 0.0)[0]], [2, 0, 0])
    with pytest.raises(ConfigError, match=r"rl\.advantage\.k must be 1 to rl\.group_size \(3\), got 4"):
        checks.check(rl(advantage=dict(name="pass_at_k", k=4), group_size=3))
