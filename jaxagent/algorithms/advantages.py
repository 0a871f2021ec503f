"""Group-relative advantages: rewards of the G attempts at a task -> one advantage per attempt.

Functions of arrays, on NumPy or (jitted) JAX, listed at the end under the names that `rl.advantage` may have. Args of
each: rewards float[N, G], and mask bool[N, G] of the attempts that count: an attempt that failed for reasons outside
the policy changes no statistic. Returns float[N, G], 0 where masked out. A group planned with ONE attempt (G = 1) has
nothing to compare with: its baseline is 0 and its scale 1 (plain REINFORCE, as verl has it). An attempt that is left
alone because the others of its group failed has A = 0: its reward says nothing of how it compares.
Axis letters: N tasks, G samples per group.
"""

from __future__ import annotations

from typing import Any

import chex

Array = Any  # numpy.ndarray or jax.Array

STD_EPSILON = 1e-6  # added to the standard deviation, as published implementations do
WHITEN_EPSILON = 1e-8  # added to the variance, as verl does


def check_groups(rewards: Array, mask: Array) -> None:
    """Refuses with an AssertionError what is not float[N, G] and bool[N, G]: other shapes would broadcast."""
    chex.assert_rank([rewards, mask], 2)
    chex.assert_equal_shape([rewards, mask])
    chex.assert_type([rewards, mask], [float, bool])


def group_mean_std(rewards: Array, mask: Array) -> Array:
    """A = (R - mean(R)) / (std(R) + 1e-6) with the unbiased standard deviation (divided by G - 1).

    GRPO: "DeepSeekMath" (Shao et al., arXiv 2402.03300), section 4.1.2.
    """
    return group_mean(rewards, mask) / _scale(rewards, mask)


def group_mean(rewards: Array, mask: Array) -> Array:
    """A = R - mean(R).

    Dr. GRPO: "Understanding R1-Zero-Like Training" (Liu et al., arXiv 2503.20783), section 3.2.
    """
    check_groups(rewards, mask)
    xp = rewards.__array_namespace__()
    rewards = xp.where(mask, rewards, 0.0)
    count = xp.sum(mask, axis=1, keepdims=True)
    mean = xp.where(count < 2, 0.0, xp.sum(rewards, axis=1, keepdims=True) / xp.maximum(count, 1))
    return xp.where(mask & ~alone(mask), rewards - mean, 0.0)


def group_mean_batch_std(rewards: Array, mask: Array) -> Array:
    """A = (R - mean(R)) / (std + 1e-6): the mean is the group's, the unbiased std that of all counted rewards at once.

    Easy and hard groups keep their proportions: "Tricks or Traps?" (Liu et al., arXiv 2508.08221), section 4; TRL's
    scale_rewards="batch" has 1e-4 for 1e-6. Of fewer than two counted rewards the scale is 1.
    """
    centred = group_mean(rewards, mask)
    xp = rewards.__array_namespace__()
    rewards, count = xp.where(mask, rewards, 0.0), xp.sum(mask)
    off = xp.where(mask, rewards - xp.sum(rewards) / xp.maximum(count, 1), 0.0)
    std = root(xp.sum(off * off) / xp.maximum(count - 1, 1))
    return centred / xp.where(count < 2, 1.0, std + STD_EPSILON)


def group_mean_by_mean(rewards: Array, mask: Array) -> Array:
    """A = (R - mean(R)) / (mean(R) + 1e-6), for rewards from 0 on: the rarer a success, the more it weighs.

    MaxRL: "Maximum Likelihood Reinforcement Learning" (Tajwar et al., 2026), as SkyRL has it: of rewards of 0 and 1
    the gradient is that of log p(success). A group whose mean is not above 0 has A = 0; so negative rewards say nothing
    of a group, where the formula would turn its signs.
    """
    centred = group_mean(rewards, mask)
    xp = rewards.__array_namespace__()
    rewards, count = xp.where(mask, rewards, 0.0), xp.sum(mask, axis=1, keepdims=True)
    mean = xp.sum(rewards, axis=1, keepdims=True) / xp.maximum(count, 1)
    scale = xp.where(count < 2, 1.0, mean + STD_EPSILON)
    return xp.where(scale > STD_EPSILON, centred / xp.where(scale > STD_EPSILON, scale, 1.0), 0.0)


def leave_one_out(rewards: Array, mask: Array) -> Array:
    """A = R - mean of the OTHERS' R = G / (G - 1) * (R - mean(R)).

    RLOO: "Back to Basics" (Ahmadian et al., arXiv 2402.14740), eq. 7 (after Kool et al., 2019).
    """
    check_groups(rewards, mask)
    xp = rewards.__array_namespace__()
    count = xp.sum(mask, axis=1, keepdims=True)
    return group_mean(rewards, mask) * xp.where(count < 2, 1.0, count / xp.maximum(count - 1, 1))


def leave_one_out_std(rewards: Array, mask: Array) -> Array:
    """A = (R - mean of the others' R) / (std(R) + 1e-6): one unbiased std, of the whole group.

    Polar's bridge to the trainer (NVIDIA-NeMo/ProRL-Agent-Server): leave-one-out and group scale together.
    """
    return leave_one_out(rewards, mask) / _scale(rewards, mask)


def no_baseline(rewards: Array, mask: Array) -> Array:
    """A = R (Williams, "Simple statistical gradient-following algorithms", 1992)."""
    check_groups(rewards, mask)
    xp = rewards.__array_namespace__()
    return xp.where(mask & ~alone(mask), rewards, 0.0)


def no_reward(rewards: Array, mask: Array) -> Array:
    """A = 0: the reward is measured and not trained on, as in distillation alone."""
    check_groups(rewards, mask)
    xp = rewards.__array_namespace__()
    return xp.zeros_like(xp.where(mask, rewards, 0.0))


def alone(mask: Array) -> Array:
    """bool[N, 1]: groups planned with several attempts of which at most one counts. Args: mask as above."""
    chex.assert_rank(mask, 2)
    chex.assert_type(mask, bool)
    xp = mask.__array_namespace__()
    return (xp.sum(mask, axis=1, keepdims=True) < 2) & (mask.shape[1] > 1)


def zero_signal(rewards: Array, mask: Array) -> Array:
    """bool[N]: groups without any learning signal: all counted rewards equal (or none). Args as above.

    A group of one counted attempt is such a group when others of it failed; a group that was planned with one
    attempt (G = 1) is not.
    """
    check_groups(rewards, mask)
    xp = rewards.__array_namespace__()
    if rewards.shape[1] == 1:
        return ~mask[:, 0]
    low = xp.min(xp.where(mask, rewards, xp.inf), axis=1)
    high = xp.max(xp.where(mask, rewards, -xp.inf), axis=1)
    return ~(high > low)


def whiten(values: Array, mask: Array) -> Array:
    """Mean 0 and (unbiased) variance 1 over the masked elements: float[...], bool[...] -> float[...], 0 elsewhere.

    Fewer than two of them, or equal ones, become 0.
    """
    chex.assert_equal_shape([values, mask])
    chex.assert_type([values, mask], [float, bool])
    xp = values.__array_namespace__()
    values = xp.where(mask, values, 0.0)
    count = xp.sum(mask)
    centred = xp.where(mask, values - xp.sum(values) / xp.maximum(count, 1), 0.0)
    variance = xp.sum(centred * centred) / xp.maximum(count - 1, 1)
    return centred / xp.sqrt(variance + WHITEN_EPSILON)


def _scale(rewards: Array, mask: Array) -> Array:
    """float[N, 1]: unbiased standard deviation plus epsilon; 1 for a group of one."""
    xp = rewards.__array_namespace__()
    centred = group_mean(rewards, mask)
    count = xp.sum(mask, axis=1, keepdims=True)
    variance = xp.sum(centred * centred, axis=1, keepdims=True) / xp.maximum(count - 1, 1)
    return xp.where(count < 2, 1.0, root(variance) + STD_EPSILON)


def root(x: Array) -> Array:
    """The square root, whose gradient at 0 is 0 and not infinite: float[...] -> float[...]."""
    xp = x.__array_namespace__()
    return xp.where(x > 0, xp.sqrt(xp.where(x > 0, x, 1.0)), 0.0)
