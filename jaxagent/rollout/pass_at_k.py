"""pass@k: the chance that at least one of k attempts at a task passes, estimated without bias, with an interval.

Counts in (per task n attempts that did not fail, c of them passed), numbers out; pure functions. The estimator is that
of "Evaluating Large Language Models Trained on Code" (Chen et al., arXiv 2107.03374, section 2.1, eq. 1); the naive
1 - (1 - c/n)^k is biased and is not used. Axis letters: T tasks, R resamples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

LEVEL = 0.95  # of the intervals
RESAMPLES = 10_000
LEAST_TASKS = 5  # of a bootstrap: of one or two, the draws are all alike, and the interval is far too short
BOOTSTRAP_SEED = 0  # fixed: equal counts give equal intervals
_CHUNK = 2**22  # numbers drawn at once


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the share of the k-subsets of n attempts that hold one of the c that passed.

    Computed as the chance that k attempts, drawn one after the other without putting back, all miss: a product of k
    numbers in [0, 1], in which no binomial coefficient can overflow.

    Raises ValueError: k < 1, fewer than k attempts (the estimator does not exist), or c outside [0, n].
    """
    if k < 1:
        raise ValueError(f"pass@k needs k of 1 or more, got {k}.")
    if n < k:
        raise ValueError(f"pass@{k} needs {k} attempts or more, got {n}.")
    if not 0 <= c <= n:
        raise ValueError(f"Of {n} attempts {c} cannot have passed.")
    return 1.0 - math.prod(max(n - c - drawn, 0) / (n - drawn) for drawn in range(k))


def estimate(counts: Sequence[tuple[int, int]], k: int) -> dict[str, Any] | None:
    """Mean pass@k over the tasks with (n, c) in `counts`; None where no task has k attempts.

    The interval is over tasks: another draw of tasks from where these come from. Where every task's estimate is 0 or 1
    (always so with one attempt per task) the mean is a proportion, and Wilson's interval is right also at its ends,
    where a bootstrap has width 0. Fewer than `LEAST_TASKS` tasks, and tasks with all the same estimate, get Wilson's
    interval, too: estimates in [0, 1] vary no more than a proportion of the same mean, so it is wide enough.

    Returns:
      "mean", "low" and "high" of the "interval" ("bootstrap" or "wilson"), "tasks" in the mean, and "too_few": tasks
      left out of it, since fewer than k of their attempts count.
    """
    values = [pass_at_k(n, c, k) for n, c in counts if n >= k]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    proportion = all(value in (0.0, 1.0) for value in values)
    if proportion or len(values) < LEAST_TASKS or len(set(values)) == 1:
        name, (low, high) = "wilson", wilson_interval(math.fsum(values), len(values))
    else:
        name, (low, high) = "bootstrap", bootstrap_interval(np.array(values))
    too_few = len(counts) - len(values)
    return {"mean": mean, "low": low, "high": high, "interval": name, "tasks": len(values), "too_few": too_few}


def wilson_interval(passed: float, n: int) -> tuple[float, float]:
    """The score interval of a proportion: all p with |passed/n - p| <= z sqrt(p(1-p)/n) (Wilson, JASA 22, 1927)."""
    z = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
    share, width = passed / n, z * z / n
    centre = (share + width / 2) / (1 + width)
    half = math.sqrt(share * (1 - share) * width + width * width / 4) / (1 + width)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def bootstrap_interval(values: np.ndarray, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Percentiles of the mean of float[T] `values` over `resamples` draws of T of them, with putting back."""
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    size, means = len(values), []
    rows = max(_CHUNK // size, 1)
    for start in range(0, resamples, rows):
        drawn = rng.integers(size, size=(min(rows, resamples - start), size))
        means.append(values[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
