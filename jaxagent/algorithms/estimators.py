"""What `rl.advantage` can name: how much better than expected something was, each formula with its constants.

    GroupAdvantage   one number per attempt, compared with the others at its task
    TurnAdvantage    one per turn, from process rewards
    TokenAdvantage   one per action token, along a trajectory; with a critic or without: in gae.py

An advantage of your own extends one of these three, in a module of yours, and is named by its path:
`--config.rl.advantage=my_package.my_module:MyAdvantage`. `estimate.py` does everything around the formulas.
No jax before an entry is called: a config is read without it.
Axis letters: N tasks, G attempts per group, K turns.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np

from jaxagent import contract
from jaxagent.algorithms.advantages import (
    STD_EPSILON,
    alone,
    check_groups,
    group_mean,
    group_mean_std,
    group_std,
    root,
)
from jaxagent.algorithms.gae import (
    GAE,
    AdaptiveGAE,
    BilevelGAE,
    Estimate,
    Return,
    TokenAdvantage,
    TokenPath,
    TurnGAE,
    TurnVTrace,
    VTrace,
)
from jaxagent.algorithms.gae import CriticConfig as CriticConfig  # for classes of a user's own
from jaxagent.config.ranges import NonNegativeFloat, PositiveInt, ZeroToOne

Array = Any  # numpy.ndarray or jax.Array


# -------------------------------------------------------------------- one number per attempt


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is common to advantages that compare the attempts of a group."""

    drop_zero_signal: bool = False  # leave out groups whose rewards are all equal


@dataclasses.dataclass(frozen=True)
class GroupAdvantage(Comparison):
    """One number per attempt: rewards float[N, G] and mask bool[N, G] of those that count -> float[N, G], 0 elsewhere.

    Runs on NumPy.
    """

    multi_trajectory: Literal["full", "divide", "statistics"] = "full"  # an episode of several: see estimate.py

    def __call__(self, rewards: Array, mask: Array) -> Array:
        raise NotImplementedError


class GroupMeanStd(GroupAdvantage):
    """GRPO: "DeepSeekMath" (Shao et al., arXiv 2402.03300), section 4.1.2."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        return group_mean_std(rewards, mask)


class GroupMean(GroupAdvantage):
    """Dr. GRPO: "Understanding R1-Zero-Like Training" (Liu et al., arXiv 2503.20783), section 3.2."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        return group_mean(rewards, mask)


class GroupMeanBatchStd(GroupAdvantage):
    """A = (R - mean(R)) / (std + 1e-6): the mean is the group's, the unbiased std that of all counted rewards at once.

    Easy and hard groups keep their proportions: "Tricks or Traps?" (Liu et al., arXiv 2508.08221), section 4; TRL's
    scale_rewards="batch" has 1e-4 for 1e-6. Of fewer than two counted rewards the scale is 1.
    """

    def __call__(self, rewards: Array, mask: Array) -> Array:
        centred = group_mean(rewards, mask)
        xp = rewards.__array_namespace__()
        rewards, count = xp.where(mask, rewards, 0.0), xp.sum(mask)
        off = xp.where(mask, rewards - xp.sum(rewards) / xp.maximum(count, 1), 0.0)
        std = root(xp.sum(off * off) / xp.maximum(count - 1, 1))
        return centred / xp.where(count < 2, 1.0, std + STD_EPSILON)


class MaxRL(GroupAdvantage):
    """A = (R - mean(R)) / (mean(R) + 1e-6), for rewards from 0 on: the rarer a success, the more it weighs.

    "Maximum Likelihood Reinforcement Learning" (Tajwar et al., 2026), as SkyRL has it: of rewards of 0 and 1 the
    gradient is that of log p(success). A group whose mean is not above 0 has A = 0; so negative rewards say nothing
    of a group, where the formula would turn its signs.
    """

    def __call__(self, rewards: Array, mask: Array) -> Array:
        centred = group_mean(rewards, mask)
        xp = rewards.__array_namespace__()
        rewards, count = xp.where(mask, rewards, 0.0), xp.sum(mask, axis=1, keepdims=True)
        mean = xp.sum(rewards, axis=1, keepdims=True) / xp.maximum(count, 1)
        scale = xp.where(count < 2, 1.0, mean + STD_EPSILON)
        return xp.where(scale > STD_EPSILON, centred / xp.where(scale > STD_EPSILON, scale, 1.0), 0.0)


class LeaveOneOut(GroupAdvantage):
    """A = R - mean of the OTHERS' R = G / (G - 1) * (R - mean(R)).

    RLOO: "Back to Basics" (Ahmadian et al., arXiv 2402.14740), eq. 7 (after Kool et al., 2019).
    """

    def __call__(self, rewards: Array, mask: Array) -> Array:
        xp = rewards.__array_namespace__()
        count = xp.sum(mask, axis=1, keepdims=True)
        return group_mean(rewards, mask) * xp.where(count < 2, 1.0, count / xp.maximum(count - 1, 1))


class LeaveOneOutStd(LeaveOneOut):
    """A = (R - mean of the others' R) / (std(R) + 1e-6): one unbiased std, of the whole group.

    Polar's bridge to the trainer (NVIDIA-NeMo/ProRL-Agent-Server): leave-one-out and group scale together.
    """

    def __call__(self, rewards: Array, mask: Array) -> Array:
        return super().__call__(rewards, mask) / group_std(rewards, mask)


class NoBaseline(GroupAdvantage):
    """A = R (Williams, "Simple statistical gradient-following algorithms", 1992)."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        check_groups(rewards, mask)
        return rewards.__array_namespace__().where(mask & ~alone(mask), rewards, 0.0)


class NoReward(GroupAdvantage):
    """A = 0: the reward is measured and not trained on, as in distillation alone."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        check_groups(rewards, mask)
        return rewards.__array_namespace__().zeros_like(rewards)


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

    def __call__(self, rewards: Array, mask: Array) -> Array:
        xp = rewards.__array_namespace__()
        rewards, before, rank, n, size = _ordered(rewards, mask, self.k)
        # i adds something to the subsets in which it comes last: over j, the next best, with rank[j] to choose from.
        below = _choose(rank, size - 2, self.k)
        gaps = xp.where(before, rewards[:, :, None] - rewards[:, None, :], 0.0)
        added = xp.sum(gaps * below[:, None, :], axis=2) * (n / _choose(n, size, self.k))
        return xp.where(mask & ~alone(mask), xp.where(size < 2, rewards, added), 0.0)


class PassAtK(BestOfK):
    """A_i = (E[max(I) | i in I] - E[max(I)]) / (std of max(I) + 1e-6), over all subsets I of k attempts.

    "Pass@k Training" (Chen et al., arXiv 2508.10751): GRPO whose samples are subsets and whose reward is their best,
    an attempt having the mean over its subsets. For rewards 0 and 1 this is the paper's closed form: with m wrong
    attempts and p = 1 - C(m, k) / C(n, k), right ones have (1 - p) / sqrt(p (1 - p)) and wrong ones
    (1 - p - C(m - 1, k - 1) / C(n - 1, k - 1)) / sqrt(p (1 - p)). Any other reward may be used too.
    """

    def __call__(self, rewards: Array, mask: Array) -> Array:
        xp = rewards.__array_namespace__()
        rewards, before, rank, n, size = _ordered(rewards, mask, self.k)
        last = _choose(rank, size - 1, self.k)
        best = xp.where(mask, last / _choose(n, size, self.k), 0.0)  # share of subsets it is the best of
        over = rewards - xp.sum(best * rewards, axis=1, keepdims=True)
        std = root(xp.sum(best * over * over, axis=1, keepdims=True))
        # Of the subsets with i: those in which i itself comes last, and those in which some j after it does.
        other = _choose(xp.maximum(rank - 1, 0), size - 2, self.k) * over
        later = xp.sum(xp.where(before, other[:, :, None], 0.0), axis=1)
        with_i = (last * over + later) / _choose(n - 1, size - 1, self.k)
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


# -------------------------------------------------------------------- one number per turn


@dataclasses.dataclass(frozen=True)
class TurnAdvantage(Comparison):
    """One number per turn: rewards float[N, G, K] and mask bool[N, G, K] -> float[N, G, K], 0 where masked out.

    The episode's reward is in its last turn's. One that reads states is called with them too, i64[N, G, K]: turns of a
    group with equal numbers began in one state.
    """

    reads_states: ClassVar[bool] = False

    def __call__(self, rewards: Array, mask: Array) -> Array:
        raise NotImplementedError


class TurnMeanStd(TurnAdvantage):
    """A_k = sum over turns j >= k of (r_j - mean) / (std + 1e-6): mean and unbiased std over ALL turns of the group.

    GRPO with process supervision: "DeepSeekMath" (Shao et al., arXiv 2402.03300), section 4.1.3; a step is a turn. A
    group planned with one attempt keeps its reward where that has one turn in all.
    """

    def __call__(self, rewards: Array, mask: Array) -> Array:
        _check_turns(rewards, mask)
        xp = rewards.__array_namespace__()
        flat = (rewards.shape[0], rewards.shape[1] * rewards.shape[2])
        normal = xp.reshape(group_mean_std(xp.reshape(rewards, flat), xp.reshape(mask, flat)), rewards.shape)
        if rewards.shape[1] == 1:
            normal = xp.where(xp.sum(mask, axis=2, keepdims=True) < 2, xp.where(mask, rewards, 0.0), normal)
        compared = mask & ~alone(xp.any(mask, axis=2))[:, :, None]
        return xp.where(compared, xp.flip(xp.cumsum(xp.flip(normal, 2), axis=2), 2), 0.0)


@dataclasses.dataclass(frozen=True)
class GiGPO(TurnAdvantage):
    """A_k = A_attempt + step_weight * A_state, each (x - mean) / (unbiased std + 1e-6), on NumPy.

    "Group-in-Group Policy Optimization" (Feng et al., arXiv 2505.10978), eqs. 3 to 8. Of the attempt, x is the sum of
    its rewards among the group's attempts; of the state, x = sum over turns j >= k of gamma^(j - k) r_j among the turns
    of the group that began in the same state, where one alone has 0.
    """

    reads_states: ClassVar[bool] = True
    gamma: ZeroToOne = 0.95  # discount per turn of the return that follows a turn
    step_weight: NonNegativeFloat = 1.0  # of the turn's part

    def __call__(self, rewards: Array, mask: Array, states: Array) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        _check_turns(rewards, mask, states)
        rewards, counted = np.where(mask, rewards, 0.0), mask.any(axis=2)
        returns, steps = rewards.copy(), np.zeros_like(rewards)
        for k in range(rewards.shape[2] - 2, -1, -1):
            returns[:, :, k] += self.gamma * returns[:, :, k + 1]
        for n in range(len(rewards)):
            for state in np.unique(states[n][mask[n]]):
                same = mask[n] & (states[n] == state)
                if same.sum() > 1:
                    steps[n][same] = group_mean_std(returns[n][same][None], np.ones((1, same.sum()), bool))[0]
        whole = group_mean_std(rewards.sum(axis=2), counted)[:, :, None]
        return np.where(mask & ~alone(counted)[:, :, None], whole + self.step_weight * steps, 0.0)


def _check_turns(*arrays: Array) -> None:
    import chex

    chex.assert_rank(arrays, 3)
    chex.assert_equal_shape(arrays)
    chex.assert_type(arrays, [float, bool, int][: len(arrays)])


# -------------------------------------------------------------------- all of them


def compared(
    advantage: Comparison, rewards: np.ndarray, mask: np.ndarray, read: np.ndarray, *states: Any
) -> np.ndarray:
    """What an advantage that compares attempts says of them: float as `rewards`, finite where bool `read`.

    `states`: those of turns, for one that reads them.
    """
    axes = "one number per attempt, [N, G]" if rewards.ndim == 2 else "one number per turn, [N, G, K]"
    wanted = contract.Array("advantages", axes, rewards.shape)
    return contract.numbers(advantage, contract.call(advantage, rewards, mask, *states), wanted, read, of=[rewards])


def estimated(advantage: TokenAdvantage, path: TokenPath) -> Estimate:
    """What an advantage along tokens says of one trajectory: three arrays [T]."""
    kinds = {"advantages": "f", "returns": "f", "learnt tokens": "bf"}
    wanted = [contract.Array(name, "one number per token, [T]", path.mask.shape, kinds[name]) for name in kinds]
    return Estimate(*contract.arrays(advantage, contract.call(advantage, path), *wanted))


ADVANTAGES: dict[str, type] = {
    "group_mean_std": GroupMeanStd,
    "group_mean": GroupMean,
    "group_mean_batch_std": GroupMeanBatchStd,
    "maxrl": MaxRL,
    "leave_one_out": LeaveOneOut,
    "leave_one_out_std": LeaveOneOutStd,
    "no_baseline": NoBaseline,
    "no_reward": NoReward,
    "max_at_k": MaxAtK,
    "pass_at_k": PassAtK,
    "turn_mean_std": TurnMeanStd,
    "gigpo": GiGPO,
    "gae": GAE,
    "gae_adaptive": AdaptiveGAE,
    "gae_turns": TurnGAE,
    "gae_bilevel": BilevelGAE,
    "vtrace": VTrace,
    "vtrace_turns": TurnVTrace,
    "return": Return,
}
