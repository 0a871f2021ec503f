"""What advantages that compare attempts are made of: rewards of the G attempts at a task -> one number per attempt.

Functions of arrays, on NumPy or (jitted) JAX. Args of each: rewards float[N, G], and mask bool[N, G] of the attempts
that count: an attempt that failed for reasons outside the policy changes no statistic. Returns float[N, G], 0 where
masked out. A group planned with ONE attempt (G = 1) has nothing to compare with: its baseline is 0 and its scale 1
(plain REINFORCE, as verl has it). An attempt that is left alone because the others of its group failed has A = 0: its
reward says nothing of how it compares.
Axis letters: N tasks, G samples per group. No jax before a function is called: a config is read without it.
"""

from __future__ import annotations

from typing import Any

Array = Any  # numpy.ndarray or jax.Array

STD_EPSILON = 1e-6  # added to the standard deviation, as published implementations do
WHITEN_EPSILON = 1e-8  # added to the variance, as verl does


def check_groups(rewards: Array, mask: Array) -> None:
    """Refuses with an AssertionError what is not float[N, G] and bool[N, G]: other shapes would broadcast."""
    import chex  # loads jax, which a config is read without

    chex.assert_rank([rewards, mask], 2)
    chex.assert_equal_shape([rewards, mask])
    chex.assert_type([rewards, mask], [float, bool])


def alone(mask: Array) -> Array:
    """bool[N, 1]: groups planned with several attempts of which at most one counts. Args: mask as above."""
    import chex

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
    import chex

    chex.assert_equal_shape([values, mask])
    chex.assert_type([values, mask], [float, bool])
    xp = values.__array_namespace__()
    values = xp.where(mask, values, 0.0)
    count = xp.sum(mask)
    centred = xp.where(mask, values - xp.sum(values) / xp.maximum(count, 1), 0.0)
    variance = xp.sum(centred * centred) / xp.maximum(count - 1, 1)
    return centred / xp.sqrt(variance + WHITEN_EPSILON)


def root(x: Array) -> Array:
    """The square root, whose gradient at 0 is 0 and not infinite: float[...] -> float[...]."""
    xp = x.__array_namespace__()
    return xp.where(x > 0, xp.sqrt(xp.where(x > 0, x, 1.0)), 0.0)


def group_mean(rewards: Array, mask: Array) -> Array:
    """A = R - mean(R)."""
    check_groups(rewards, mask)
    xp = rewards.__array_namespace__()
    rewards = xp.where(mask, rewards, 0.0)
    count = xp.sum(mask, axis=1, keepdims=True)
    mean = xp.where(count < 2, 0.0, xp.sum(rewards, axis=1, keepdims=True) / xp.maximum(count, 1))
    return xp.where(mask & ~alone(mask), rewards - mean, 0.0)


def group_std(rewards: Array, mask: Array) -> Array:
    """float[N, 1]: the unbiased standard deviation (divided by G - 1) plus 1e-6; 1 for a group of one."""
    xp = rewards.__array_namespace__()
    centred = group_mean(rewards, mask)
    count = xp.sum(mask, axis=1, keepdims=True)
    variance = xp.sum(centred * centred, axis=1, keepdims=True) / xp.maximum(count - 1, 1)
    return xp.where(count < 2, 1.0, root(variance) + STD_EPSILON)


def group_mean_std(rewards: Array, mask: Array) -> Array:
    """A = (R - mean(R)) / (std(R) + 1e-6)."""
    return group_mean(rewards, mask) / group_std(rewards, mask)
