"""The estimator against counting every subset, exact binomials and what it must be on average; intervals likewise."""

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest

from jaxagent.rollout.pass_at_k import BOOTSTRAP_SEED, bootstrap_interval, estimate, pass_at_k, wilson_interval


@pytest.mark.parametrize("n", range(1, 8))
def test_equals_counting_all_subsets(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations(range(n), k))
        share = Fraction(sum(any(i < c for i in subset) for subset in subsets), len(subsets))
        assert pass_at_k(n, c, k) == pytest.approx(float(share), abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k", "by_hand"), [(5, 2, 2, 0.7), (4, 1, 3, 0.75), (10, 1, 1, 0.1), (3, 0, 3, 0)])
def test_by_hand(n, c, k, by_hand):
    assert pass_at_k(n, c, k) == pytest.approx(by_hand, abs=1e-15)


def test_exact_where_it_must_be():
    assert pass_at_k(9, 0, 5) == 0.0
    assert pass_at_k(9, 9, 1) == 1.0
    assert pass_at_k(9, 5, 5) == 1.0  # only 4 missed: no 5 of them without one that passed


@pytest.mark.parametrize(("n", "c", "k"), [(200, 3, 100), (2000, 1, 17), (10_000, 3, 5_000), (10_000, 9_000, 2)])
def test_many_attempts_against_exact_binomials(n, c, k):
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("p", [Fraction(1, 10), Fraction(1, 2), Fraction(9, 10)])
def test_is_unbiased(p):
    """The mean over how many of n attempts pass is 1 - (1 - p)^k, which the naive estimator misses."""
    n, k = 6, 3
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(float(chance[c]) * pass_at_k(n, c, k) for c in range(n + 1))
    naive = sum(chance[c] * (1 - (1 - Fraction(c, n)) ** k) for c in range(n + 1))
    assert mean == pytest.approx(float(1 - (1 - p) ** k), abs=1e-14)
    assert abs(float(naive) - mean) > 1e-3


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (0, 0, 1), (4, 1, 0), (4, 5, 2), (4, -1, 2)])
def test_refused(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_mean_over_tasks_leaves_out_those_with_too_few_attempts():
    found = estimate([(4, 1), (4, 2), (1, 1), (0, 0)], 2)
    assert found["mean"] == pytest.approx((0.5 + 5 / 6) / 2)
    assert (found["tasks"], found["too_few"], found["interval"]) == (2, 2, "wilson")
    assert estimate([(1, 1)], 2) is None and estimate([], 1) is None


@pytest.mark.parametrize("counts", [[(4, 3)], [(4, 2)], [(4, 1), (4, 2)], [(4, 3)] * 4, [(4, 2)] * 40, [(1, 1)] * 3])
def test_an_interval_has_a_width_and_few_tasks_a_large_one(counts):
    """It is the score interval of a proportion of the same mean, whose variance no other in [0, 1] exceeds."""
    found, share = estimate(counts, 1), sum(c / n for n, c in counts) / len(counts)
    assert found["high"] - found["low"] > 0.2 and found["low"] <= found["mean"] <= found["high"]
    z, n = statistics.NormalDist().inv_cdf(0.975), len(counts)
    roots = np.roots([1 + z**2 / n, -2 * share - z**2 / n, share**2])  # (share - p)^2 = z^2 p (1 - p) / n
    assert (found["low"], found["high"]) == pytest.approx(sorted(roots.real), abs=1e-7)


def test_five_different_tasks_are_drawn_anew():
    assert estimate([(4, 1), (4, 2), (4, 3), (4, 3), (4, 4)], 1)["interval"] == "bootstrap"


def test_all_or_nothing_is_a_proportion():
    found = estimate([(1, 1), (1, 0), (1, 1), (1, 1)], 1)
    assert found["interval"] == "wilson" and (found["low"], found["high"]) == wilson_interval(3, 4)
    assert estimate([(8, 0)] * 30, 4)["high"] == pytest.approx(wilson_interval(0, 30)[1])


@pytest.mark.parametrize(("passed", "n"), [(0, 10), (1, 10), (5, 10), (10, 10), (1, 1), (237, 256)])
def test_wilson_ends_where_the_score_test_does(passed, n):
    """The roots of (share - p)^2 = z^2 p (1 - p) / n, with z written out."""
    z, share = 1.959963984540054, passed / n
    roots = np.roots([1 + z * z / n, -2 * share - z * z / n, share * share])
    assert wilson_interval(passed, n) == pytest.approx(sorted(roots.real), abs=1e-7)


def test_bootstrap_against_a_plain_loop():
    values = np.random.default_rng(3).random(37)
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    means = sorted(sum(values[int(i)] for i in rng.integers(37, size=37)) / 37 for _ in range(400))
    low, high = (np.interp(q * 399, range(400), means) for q in (0.025, 0.975))
    assert bootstrap_interval(values, resamples=400) == pytest.approx((low, high), abs=1e-12)


def test_bootstrap_against_every_resample():
    values = np.array([0.05, 0.3, 0.35, 0.7, 0.98])
    means = sorted(values[list(at)].mean() for at in itertools.product(range(5), repeat=5))
    exact = np.quantile(means, [0.025, 0.975])
    assert bootstrap_interval(values) == pytest.approx(exact, abs=0.015)
    assert bootstrap_interval(values) == bootstrap_interval(values)


def test_bootstrap_of_many_tasks_is_the_normal_interval():
    values = np.random.default_rng(0).random(5_000)
    half = 1.96 * values.std() / math.sqrt(5_000)
    assert bootstrap_interval(values) == pytest.approx((values.mean() - half, values.mean() + half), abs=half * 0.06)
