"""What `rl.advantage` can name: how much better than expected something was, each formula with its constants.

    GroupAdvantage   one number per attempt, compared with the others at its task
    TurnAdvantage    one per turn, from process rewards; from forks, with rl.branching: in branches.py
    TokenAdvantage   one per action token, along a trajectory; with a critic or without: in gae.py

An advantage of your own extends one of these three, in a module of yours, and is named by its path:
`--config.rl.advantage=my_package.my_module:MyAdvantage`. `estimate.py` does everything around the formulas.
No jax before an entry is called: a config is read without it.
Axis letters: N tasks, G attempts per group, K turns.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from jaxagent.algorithms.advantages import GroupAdvantage as GroupAdvantage
from jaxagent.algorithms.advantages import (
    GroupMean,
    GroupMeanBatchStd,
    GroupMeanStd,
    LeaveOneOut,
    LeaveOneOutStd,
    MaxAtK,
    MaxRL,
    NoBaseline,
    NoReward,
    PassAtK,
    TurnAdvantage,
    alone,
    group_mean_std,
)
from jaxagent.algorithms.agent_q import BranchPairs
from jaxagent.algorithms.branches import TreeRL, TreeValues, VinePPO
from jaxagent.algorithms.gae import (
    GAE,
    AdaptiveGAE,
    BilevelGAE,
    MixedTurns,
    Return,
    TurnGAE,
    TurnVTrace,
    VTrace,
)

# For classes of a user's own.
from jaxagent.algorithms.gae import CriticConfig as CriticConfig
from jaxagent.algorithms.gae import Estimate as Estimate
from jaxagent.algorithms.gae import TokenAdvantage as TokenAdvantage
from jaxagent.algorithms.gae import TokenPath as TokenPath
from jaxagent.config.ranges import NonNegativeFloat, ZeroToOne
from jaxagent.contract import check_arrays


class TurnMeanStd(TurnAdvantage):
    """A_k = sum over turns j >= k of (r_j - mean) / (std + 1e-6): mean and unbiased std over ALL turns of the group.

    GRPO with process supervision: "DeepSeekMath" (Shao et al., arXiv 2402.03300), section 4.1.3; a step is a turn. A
    group planned with one attempt keeps its reward where that has one turn in all.
    """

    def __call__(self, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
        _check_turns(rewards, mask)
        flat = (rewards.shape[0], rewards.shape[1] * rewards.shape[2])
        normal = np.reshape(group_mean_std(np.reshape(rewards, flat), np.reshape(mask, flat)), rewards.shape)
        if rewards.shape[1] == 1:
            normal = np.where(np.sum(mask, axis=2, keepdims=True) < 2, np.where(mask, rewards, 0.0), normal)
        compared = mask & ~alone(np.logical_or.reduce(mask, axis=2))[:, :, None]
        return np.where(compared, np.flip(np.cumsum(np.flip(normal, 2), axis=2), 2), 0.0)


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

    def __call__(self, rewards: np.ndarray, mask: np.ndarray, states: np.ndarray) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        _check_turns(rewards, mask, states)
        rewards, attempts = np.where(mask, rewards, 0.0), np.logical_or.reduce(mask, axis=2)
        returns, steps = rewards.copy(), np.zeros_like(rewards)
        for k in range(rewards.shape[2] - 2, -1, -1):
            returns[:, :, k] += self.gamma * returns[:, :, k + 1]
        for n in range(len(rewards)):
            for state in np.unique(states[n][mask[n]]):
                same = mask[n] & (states[n] == state)
                if same.sum() > 1:
                    steps[n][same] = group_mean_std(returns[n][same][None], np.ones((1, same.sum()), bool))[0]
        of_episodes = group_mean_std(rewards.sum(axis=2), attempts)[:, :, None]
        return np.where(mask & ~alone(attempts)[:, :, None], of_episodes + self.step_weight * steps, 0.0)


def _check_turns(*arrays: np.ndarray) -> None:
    check_arrays(*arrays, types=[float, bool, int][: len(arrays)], rank=3)


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
    "vine_ppo": VinePPO,
    "tree": TreeValues,
    "tree_rl": TreeRL,
    "branch_pairs": BranchPairs,
    "gae": GAE,
    "gae_adaptive": AdaptiveGAE,
    "gae_turns": TurnGAE,
    "gae_bilevel": BilevelGAE,
    "mixed_turns": MixedTurns,
    "vtrace": VTrace,
    "vtrace_turns": TurnVTrace,
    "return": Return,
}
