"""Group-relative advantages: rewards of the G attempts at a task -> one advantage per attempt.

Functions of arrays, on NumPy or (jitted) JAX. A mask marks the attempts that count: an attempt that failed for
reasons outside the policy changes no statistic. Axis letters: N tasks, G samples per group.
"""

from __future__ import annotations

from typing import Any

Array = Any  # numpy.ndarray or jax.Array

_STD_EPSILON = 1e-6  # added to the standard deviation, as published implementations do


def group_advantages(rewards: Array, mask: Array, divide_by_std: bool) -> Array:
    """A = R - mean(R), or (R - mean(R)) / (std(R) + 1e-6) with the unbiased standard deviation.

    See "DeepSeekMath" (Shao et al., arXiv 2402.03300), section 4.1.2, for the first GRPO, with std, and "Understanding
    R1-Zero-Like Training" (Liu et al., arXiv 2503.20783) for Dr. GRPO, without. A group of ONE attempt has mean 0 and
    std 1 (plain REINFORCE), as there is nothing to compare with.

    Args:
      rewards: float[N, G].
      mask: bool[N, G], attempts that count.
      divide_by_std: GRPO (True) or Dr. GRPO (False).

    Returns:
      float[N, G], 0 where masked out.
    """
    xp = rewards.__array_namespace__()
    rewards = xp.where(mask, rewards, 0.0)
    count = xp.sum(mask, axis=1, keepdims=True)
    alone = count < 2
    mean = xp.where(alone, 0.0, xp.sum(rewards, axis=1, keepdims=True) / xp.maximum(count, 1))
    centred = xp.where(mask, rewards - mean, 0.0)
    if not divide_by_std:
        return centred
    variance = xp.sum(centred * centred, axis=1, keepdims=True) / xp.maximum(count - 1, 1)
    return centred / xp.where(alone, 1.0, xp.sqrt(variance) + _STD_EPSILON)


def zero_signal(rewards: Array, mask: Array) -> Array:
    """bool[N]: groups without any learning signal: all counted rewards equal (or none). Args as above.

    A group of one counted attempt is such a group when others of it failed; a group that was planned with one
    attempt (G = 1) is not.
    """
    xp = rewards.__array_namespace__()
    if rewards.shape[1] == 1:
        return ~mask[:, 0]
    low = xp.min(xp.where(mask, rewards, xp.inf), axis=1)
    high = xp.max(xp.where(mask, rewards, -xp.inf), axis=1)
    return ~(high > low)


def whiten(values: Array, mask: Array) -> Array:
    """Mean 0 and (unbiased) variance 1 over the masked elements: float[...], bool[...] -> float[...], 0 elsewhere."""
    xp = values.__array_namespace__()
    values = xp.where(mask, values, 0.0)
    count = xp.sum(mask)
    centred = xp.where(mask, values - xp.sum(values) / xp.maximum(count, 1), 0.0)
    variance = xp.sum(centred * centred) / xp.maximum(count - 1, 1)
    return centred / xp.sqrt(variance + 1e-8)
