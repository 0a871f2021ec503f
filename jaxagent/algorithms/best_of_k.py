"""Advantages when the best of k attempts counts: pass@k, and the largest of k rewards.

Rewards of the n counted attempts of a group -> one advantage per attempt, from ALL subsets of k of them, counted and
not drawn. Functions of arrays, on NumPy or (jitted) JAX. Args of each: rewards float[N, G], mask bool[N, G] of the
attempts that count, k the attempts per subset; fewer than k attempts make one subset. Returns
float[N, G], 0 where masked out. A group planned with ONE attempt is plain REINFORCE, and an attempt that is left alone
has 0, as in `advantages.py`.
Axis letters: N tasks, G samples per group.
"""

from __future__ import annotations

from typing import Any

from jaxagent.algorithms.advantages import STD_EPSILON, alone, check_groups, root

Array = Any  # numpy.ndarray or jax.Array


def max_at_k(rewards: Array, mask: Array, k: int) -> Array:
    """A_i = n / C(n, k) * sum over subsets I with i of max(I) - max(I without i): what i adds to the best of k.

    "Pass@K Policy Optimization" (Walder and Karkhanis, arXiv 2505.15201), eq. 33, its unbiased estimator of lowest
    variance, times n: the paper sums over attempts where a loss here is their mean. With k = 1, A = R.
    """
    xp = rewards.__array_namespace__()
    rewards, before, rank, n, size = _ordered(rewards, mask, k)
    # i adds something to the subsets in which it comes last: over j, the next best, with rank[j] to choose from.
    below = _choose(rank, size - 2, k)
    gaps = xp.where(before, rewards[:, :, None] - rewards[:, None, :], 0.0)
    added = xp.sum(gaps * below[:, None, :], axis=2) * (n / _choose(n, size, k))
    return xp.where(mask & ~alone(mask), xp.where(size < 2, rewards, added), 0.0)


def pass_at_k(rewards: Array, mask: Array, k: int) -> Array:
    """A_i = (E[max(I) | i in I] - E[max(I)]) / (std of max(I) + 1e-6), over all subsets I of k attempts.

    "Pass@k Training" (Chen et al., arXiv 2508.10751): GRPO whose samples are subsets and whose reward is their best,
    an attempt having the mean over its subsets. For rewards 0 and 1 this is the paper's closed form: with m wrong
    attempts and p = 1 - C(m, k) / C(n, k), right ones have (1 - p) / sqrt(p (1 - p)) and wrong ones
    (1 - p - C(m - 1, k - 1) / C(n - 1, k - 1)) / sqrt(p (1 - p)). Any other reward may be used too.
    """
    xp = rewards.__array_namespace__()
    rewards, before, rank, n, size = _ordered(rewards, mask, k)
    best = xp.where(mask, _choose(rank, size - 1, k) / _choose(n, size, k), 0.0)  # share of subsets it is the best of
    over = rewards - xp.sum(best * rewards, axis=1, keepdims=True)
    std = root(xp.sum(best * over * over, axis=1, keepdims=True))
    # Of the subsets with i: those in which i itself comes last, and those in which some j after it does.
    own = _choose(rank, size - 1, k) * over
    other = _choose(xp.maximum(rank - 1, 0), size - 2, k) * over
    later = xp.sum(xp.where(before, other[:, :, None], 0.0), axis=1)
    with_i = (own + later) / _choose(n - 1, size - 1, k)
    counted = xp.sum(mask, axis=1, keepdims=True)
    return xp.where(mask & ~alone(mask), xp.where(counted < 2, rewards, with_i / (std + STD_EPSILON)), 0.0)


def _ordered(rewards: Array, mask: Array, k: int) -> tuple[Array, Array, Array, Array, Array]:
    """Rewards with 0 where masked; whether j comes before i, [N, i, j]; ranks [N, G]; n and size of subsets, [N, 1].

    Equal rewards are ordered by index: no sum above depends on it.
    """
    check_groups(rewards, mask)
    xp = rewards.__array_namespace__()
    rewards = xp.where(mask, rewards, 0.0)
    index = xp.arange(rewards.shape[1])
    one, other = rewards[:, :, None], rewards[:, None, :]
    before = (other < one) | ((other == one) & (index[None, :] < index[:, None]))
    before = before & mask[:, :, None] & mask[:, None, :]
    n = xp.maximum(xp.sum(mask, axis=1, keepdims=True), 1)
    return rewards, before, xp.sum(before, axis=2), n, xp.minimum(n, k)


def _choose(n: Array, k: Array, most: int) -> Array:
    """The binomial coefficient C(n, k) of integers n >= 0 and k <= most, as a float; 0 for k < 0."""
    xp = n.__array_namespace__()
    product = xp.where(k < 0, 0.0, 1.0)
    for t in range(most):
        product = product * xp.where(t < k, (n - t) / xp.where(t < k, k - t, 1), 1.0)
    return product
