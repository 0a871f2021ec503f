"""Process rewards: what the environment says of single turns, `Episode.turn_rewards`, beside the episode's reward.

`turn_rewards[k]` is the reward of turn k, or of a sub-goal reached in it; the episode's reward comes on top of them, at
the end. Turns are counted over the episode's trajectories, one after the other; missing rewards are 0. NumPy, but for
the pure function at the end.
Axis letters: N tasks, G samples per group, K turns, T tokens.
"""

from __future__ import annotations

from typing import Any

import chex
import numpy as np

from jaxagent.algorithms.advantages import alone, group_mean_std
from jaxagent.algorithms.streams import action_mask
from jaxagent.types import Episode

Array = Any  # numpy.ndarray or jax.Array


def by_turn(episode: Episode) -> tuple[list[np.ndarray], np.ndarray]:
    """The episode's turns that have a token the policy is trained on, numbered 0 to K - 1, and their process rewards.

    Returns:
      i64[T] of each trajectory with an action token: the turn of each action token, -1 elsewhere; and f64[K]. A reward
      of a turn without such a token is the turn's before it, also at the end of a trajectory and in one that has none:
      every turn counts of which a token is there, whatever its kind.
    """
    numbers, start = [], 0
    for trajectory in episode.trajectories:
        mask = action_mask(trajectory) > 0
        if mask.any():
            numbers.append(np.where(mask, start + trajectory.turns.astype(np.int64), -1))
        start += int(trajectory.turns.max(initial=-1)) + 1
    if not numbers:
        return [], np.zeros(0)
    live = np.unique(np.concatenate(numbers))
    live = live[live >= 0]
    rewards = np.zeros(len(live))
    at = np.searchsorted(live, np.arange(len(episode.turn_rewards)), side="right") - 1
    np.add.at(rewards, np.maximum(at, 0), episode.turn_rewards)
    return [np.where(number < 0, -1, np.searchsorted(live, number)) for number in numbers], rewards


def token_rewards(episode: Episode) -> list[np.ndarray]:
    """f64[T] of each trajectory with an action token: every turn's process reward on the turn's last action token."""
    indices, rewards = by_turn(episode)
    out = []
    for index in indices:
        at = np.flatnonzero(index >= 0)[::-1]
        turns, first = np.unique(index[at], return_index=True)  # first from behind
        out.append(np.zeros(len(index)))
        out[-1][at[first]] = rewards[turns]
    return out


def states(episode: Episode) -> list[bytes]:
    """The state in which each turn of `by_turn` began: the tokens that the policy was shown since it last spoke.

    Of a trajectory's first turn that is all before it. Two turns of a group began in the same state where these are
    equal, which is what GiGPO calls an anchor state: an environment must show all that matters, and no more, each turn.
    """
    out: list[bytes] = []
    for trajectory in episode.trajectories:
        at = np.flatnonzero(action_mask(trajectory))
        _, first = np.unique(trajectory.turns[at], return_index=True)
        for index in first:
            before = at[index - 1] + 1 if index else 0
            out.append(trajectory.tokens[before : at[index]].tobytes())
    return out


def group_in_group(
    rewards: np.ndarray, mask: np.ndarray, states: np.ndarray, gamma: float, weight: float
) -> np.ndarray:
    """A_k = A_attempt + weight * A_state, each (x - mean) / (unbiased std + 1e-6), on NumPy.

    "Group-in-Group Policy Optimization" (Feng et al., arXiv 2505.10978), eqs. 3 to 8. Of the attempt, x is the sum of
    its rewards among the group's attempts; of the state, x = sum over turns j >= k of gamma^(j - k) r_j among the turns
    of the group that began in the same state, where one alone has 0.

    Args:
      rewards, mask: as `turn_mean_std`.
      states: int[N, G, K], equal where turns of a group began in the same state.
      gamma, weight: constants of `estimators.GiGPO`.
    """
    chex.assert_rank([rewards, mask, states], 3)
    chex.assert_equal_shape([rewards, mask, states])
    chex.assert_type([rewards, mask, states], [float, bool, int])
    rewards, counted = np.where(mask, rewards, 0.0), mask.any(axis=2)
    returns, steps = rewards.copy(), np.zeros_like(rewards)
    for k in range(rewards.shape[2] - 2, -1, -1):
        returns[:, :, k] += gamma * returns[:, :, k + 1]
    for n in range(len(rewards)):
        for state in np.unique(states[n][mask[n]]):
            same = mask[n] & (states[n] == state)
            if same.sum() > 1:
                steps[n][same] = group_mean_std(returns[n][same][None], np.ones((1, same.sum()), bool))[0]
    whole = group_mean_std(rewards.sum(axis=2), counted)[:, :, None]
    return np.where(mask & ~alone(counted)[:, :, None], whole + weight * steps, 0.0)


def turn_mean_std(rewards: Array, mask: Array) -> Array:
    """A_k = sum over turns j >= k of (r_j - mean) / (std + 1e-6): mean and unbiased std over ALL turns of the group.

    GRPO with process supervision: "DeepSeekMath" (Shao et al., arXiv 2402.03300), section 4.1.3; a step is a turn.

    Args:
      rewards: float[N, G, K], the episode's reward in its last turn's.
      mask: bool[N, G, K], turns of attempts that count.

    Returns:
      float[N, G, K], 0 where masked out. As in `advantages.py` a group planned with one attempt keeps its reward where
      that has one turn in all, and an attempt that is left alone has 0 in all its turns.
    """
    chex.assert_rank([rewards, mask], 3)
    chex.assert_equal_shape([rewards, mask])
    chex.assert_type([rewards, mask], [float, bool])
    xp = rewards.__array_namespace__()
    flat = (rewards.shape[0], rewards.shape[1] * rewards.shape[2])
    normal = xp.reshape(group_mean_std(xp.reshape(rewards, flat), xp.reshape(mask, flat)), rewards.shape)
    if rewards.shape[1] == 1:
        normal = xp.where(xp.sum(mask, axis=2, keepdims=True) < 2, xp.where(mask, rewards, 0.0), normal)
    compared = mask & ~alone(xp.any(mask, axis=2))[:, :, None]
    return xp.where(compared, xp.flip(xp.cumsum(xp.flip(normal, 2), axis=2), 2), 0.0)
