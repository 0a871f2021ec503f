"""Advantages that compare the G attempts at a task, one number per attempt, and the statistics they are made of.

Functions of NumPy arrays. Args of each: rewards float[N, G], and mask bool[N, G] of the attempts
that count: an attempt that failed for reasons outside the policy changes no statistic. Returns float[N, G], 0 where
masked out. A group planned with ONE attempt (G = 1) has nothing to compare with: its baseline is 0 and its scale 1
(plain REINFORCE, as verl has it). An attempt that is left alone because the others of its group failed has A = 0: its
reward says nothing of how it compares.
Axis letters: N tasks, G samples per group. No jax here: a config is read without it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from jaxagent.config.ranges import PositiveInt
from jaxagent.contract import check_arrays

STD_EPSILON = 1e-6  # added to the standard deviation, as published implementations do
WHITEN_EPSILON = 1e-8  # added to the variance, as verl does


def check_groups(rewards: np.ndarray, mask: np.ndarray) -> None:
    """Refuses with an AssertionError what is not float[N, G] and bool[N, G]: other shapes would broadcast."""
    check_arrays(rewards, mask, types=[float, bool], rank=2)


def alone(mask: np.ndarray) -> np.ndarray:
    """bool[N, 1]: groups planned with several attempts of which at most one counts. Args: mask as above."""
    check_arrays(mask, types=bool, rank=2)
    return (np.sum(mask, axis=1, keepdims=True) < 2) & (mask.shape[1] > 1)


def zero_signal(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """bool[N]: groups without any learning signal: all counted rewards equal (or none). Args as above.

    A group of one counted attempt is such a group when others of it failed; a group that was planned with one
    attempt (G = 1) is not.
    """
    check_groups(rewards, mask)
    if rewards.shape[1] == 1:
        return ~mask[:, 0]
    low = np.min(np.where(mask, rewards, np.inf), axis=1)
    high = np.max(np.where(mask, rewards, -np.inf), axis=1)
    return ~(high > low)


def whiten(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Mean 0 and (unbiased) variance 1 over the masked elements: float[...], bool[...] -> float[...], 0 elsewhere.

    Fewer than two of them, or equal ones, become 0.
    """
    check_arrays(values, mask, types=[float, bool])
    values = np.where(mask, values, 0.0)
    count = np.sum(mask)
    centred = np.where(mask, values - np.sum(values) / np.maximum(count, 1), 0.0)
    variance = np.sum(centred * centred) / np.maximum(count - 1, 1)
    return centred / np.sqrt(variance + WHITEN_EPSILON)


def group_mean(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """A = R - mean(R)."""
    check_groups(rewards, mask)
    rewards = np.where(mask, rewards, 0.0)
    count = np.sum(mask, axis=1, keepdims=True)
    mean = np.where(count < 2, 0.0, np.sum(rewards, axis=1, keepdims=True) / np.maximum(count, 1))
    return np.where(mask & ~alone(mask), rewards - mean, 0.0)


def group_std(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float[N, 1]: the unbiased standard deviation (divided by G - 1) plus 1e-6; 1 for a group of one."""
    centred = group_mean(rewards, mask)
    count = np.sum(mask, axis=1, keepdims=True)
    variance = np.sum(centred * centred, axis=1, keepdims=True) / np.maximum(count - 1, 1)
    return np.where(count < 2, 1.0, np.sqrt(variance) + STD_EPSILON)


def group_mean_std(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """A = (R - mean(R)) / (std(R) + 1e-6)."""
    return group_mean(rewards, mask) / group_std(rewards, mask)


@dataclasses.dataclass(frozen=True)
class GroupAdvantage:
    """One number per attempt: rewards float[N, G], mask bool[N, G] of those that count -> float[N, G], 0 elsewhere."""

    drop_zero_signal: bool = False  # leave out groups whose rewards are all equal
    multi_trajectory: Literal["full", "divide", "statistics"] = "full"  # an episode of several: see estimate.py

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class TurnAdvantage:
    """One number per turn: rewards float[N, G, K] and mask bool[N, G, K] -> float[N, G, K], 0 where masked out.

    The episode's reward is in its last turn's. One that reads states is called with them too, i64[N, G, K]: turns of a
    group with equal numbers began in one state.
    """

    reads_states: ClassVar[bool] = False
    reads_branches: ClassVar[bool] = False  # of `rl.branching`: see branches.py
    drop_zero_signal: bool = False  # leave out groups whose rewards are all equal

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class GroupMeanStd(GroupAdvantage):
    """GRPO: "DeepSeekMath" (Shao et al., arXiv 2402.03300), section 4.1.2."""

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return group_mean_std(rewards, mask)


class GroupMean(GroupAdvantage):
    """Dr. GRPO: "Understanding R1-Zero-Like Training" (Liu et al., arXiv 2503.20783), section 3.2."""

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return group_mean(rewards, mask)


class GroupMeanBatchStd(GroupAdvantage):
    """A = (R - mean(R)) / (std + 1e-6): the mean is the group's, the unbiased std that of all counted rewards at once.

    Easy and hard groups keep their proportions: "Tricks or Traps?" (Liu et al., arXiv 2508.08221), section 4; TRL's
    scale_rewards="batch" has 1e-4 for 1e-6. Of fewer than two counted rewards the scale is 1.
    """

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        centred = group_mean(rewards, mask)
        rewards, count = np.where(mask, rewards, 0.0), np.sum(mask)
        off = np.where(mask, rewards - np.sum(rewards) / np.maximum(count, 1), 0.0)
        std = np.sqrt(np.sum(off * off) / np.maximum(count - 1, 1))
        return centred / np.where(count < 2, 1.0, std + STD_EPSILON)


class MaxRL(GroupAdvantage):
    """A = (R - mean(R)) / (mean(R) + 1e-6), for rewards from 0 on: the rarer a success, the more it weighs.

    "Maximum Likelihood Reinforcement Learning" (Tajwar et al., 2026), as SkyRL has it: of rewards of 0 and 1 the
    gradient is that of log p(success). A group whose mean is not above 0 has A = 0; so negative rewards say nothing
    of a group, where the formula would turn its signs.
    """

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        centred = group_mean(rewards, mask)
        rewards, count = np.where(mask, rewards, 0.0), np.sum(mask, axis=1, keepdims=True)
        mean = np.sum(rewards, axis=1, keepdims=True) / np.maximum(count, 1)
        scale = np.where(count < 2, 1.0, mean + STD_EPSILON)
        return np.where(scale > STD_EPSILON, centred / np.where(scale > STD_EPSILON, scale, 1.0), 0.0)


class LeaveOneOut(GroupAdvantage):
    """A = R - mean of the OTHERS' R = G / (G - 1) * (R - mean(R)).

    RLOO: "Back to Basics" (Ahmadian et al., arXiv 2402.14740), eq. 7 (after Kool et al., 2019).
    """

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        count = np.sum(mask, axis=1, keepdims=True)
        return group_mean(rewards, mask) * np.where(count < 2, 1.0, count / np.maximum(count - 1, 1))


class LeaveOneOutStd(LeaveOneOut):
    """A = (R - mean of the others' R) / (std(R) + 1e-6): one unbiased std, of the whole group.

    Polar's bridge to the trainer (NVIDIA-NeMo/ProRL-Agent-Server): leave-one-out and group scale together.
    """

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return super().__call__(rewards, mask) / group_std(rewards, mask)


class NoBaseline(GroupAdvantage):
    """A = R (Williams, "Simple statistical gradient-following algorithms", 1992)."""

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        check_groups(rewards, mask)
        return np.where(mask & ~alone(mask), rewards, 0.0)


class NoReward(GroupAdvantage):
    """A = 0: the reward is measured and not trained on, as in distillation alone."""

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        check_groups(rewards, mask)
        return np.zeros_like(rewards)


@dataclasses.dataclass(frozen=True)
class BestOfK(GroupAdvantage):
    """The best of k attempts counts: from ALL subsets of k attempts that count, counted and not drawn.

    Fewer than k attempts make one subset.
    """

    k: PositiveInt = 4  # attempts per subset, at most rl.group_size


class MaxAtK(BestOfK):
    """A_i = n / C(n, k) * sum over subsets I with i of max(I) - max(I without i): what i adds to the best of k.

    "Pass@K Policy Optimization" (Walder and Karkhanis, arXiv 2505.15201), eq. 33, its unbiased estimator of lowest
    variance, times n: the paper sums over attempts where a loss here is their mean. With k = 1, A = R.
    """

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        rewards, before, rank, n, size = _ordered(rewards, mask, self.k)
        # i adds something to the subsets in which it comes last: over j, the next best, with rank[j] to choose from.
        below = _choose(rank, size - 2, self.k)
        gaps = np.where(before, rewards[:, :, None] - rewards[:, None, :], 0.0)
        added = np.sum(gaps * below[:, None, :], axis=2) * (n / _choose(n, size, self.k))
        return np.where(mask & ~alone(mask), np.where(size < 2, rewards, added), 0.0)


class PassAtK(BestOfK):
    """A_i = (E[max(I) | i in I] - E[max(I)]) / (std of max(I) + 1e-6), over all subsets I of k attempts.

    "Pass@k Training" (Chen et al., arXiv 2508.10751): GRPO whose samples are subsets and whose reward is their best,
    an attempt having the mean over its subsets. For rewards 0 and 1 this is the paper's closed form: with m wrong
    attempts and p = 1 - C(m, k) / C(n, k), right ones have (1 - p) / sqrt(p (1 - p)) and wrong ones
    (1 - p - C(m - 1, k - 1) / C(n - 1, k - 1)) / sqrt(p (1 - p)). Any other reward may be used too.
    """

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        rewards, before, rank, n, size = _ordered(rewards, mask, self.k)
        last = _choose(rank, size - 1, self.k)
        best = np.where(mask, last / _choose(n, size, self.k), 0.0)  # share of subsets it is the best of
        over = rewards - np.sum(best * rewards, axis=1, keepdims=True)
        std = np.sqrt(np.sum(best * over * over, axis=1, keepdims=True))
        # Of the subsets with i: those in which i itself comes last, and those in which some j after it does.
        other = _choose(np.maximum(rank - 1, 0), size - 2, self.k) * over
        later = np.sum(np.where(before, other[:, :, None], 0.0), axis=1)
        with_i = (last * over + later) / _choose(n - 1, size - 1, self.k)
        count = np.sum(mask, axis=1, keepdims=True)
        return np.where(mask & ~alone(mask), np.where(count < 2, rewards, with_i / (std + STD_EPSILON)), 0.0)


def _ordered(rewards: np.ndarray, mask: np.ndarray, k: int) -> tuple[np.ndarray, ...]:
    """Rewards with 0 where masked; whether j comes before i, [N, i, j]; ranks [N, G]; n and size of subsets, [N, 1].

    Equal rewards are ordered by index: no sum above depends on it.
    """
    check_groups(rewards, mask)
    rewards = np.where(mask, rewards, 0.0)
    index = np.arange(rewards.shape[1])
    rewards_i, rewards_j = rewards[:, :, None], rewards[:, None, :]
    before = (rewards_j < rewards_i) | ((rewards_j == rewards_i) & (index[None, :] < index[:, None]))
    before = before & mask[:, :, None] & mask[:, None, :]
    n = np.maximum(np.sum(mask, axis=1, keepdims=True), 1)
    return rewards, before, np.sum(before, axis=2), n, np.minimum(n, k)


def _choose(n: np.ndarray, k: np.ndarray, most: int) -> np.ndarray:
    """The binomial coefficient C(n, k) of integers n >= 0 and k <= most, as a float; 0 for k < 0."""
    product = np.where(k < 0, 0.0, 1.0)
    for t in range(most):
        product = product * np.where(t < k, (n - t) / np.where(t < k, k - t, 1), 1.0)
    return product
