"""Process rewards: what the environment says of single turns, `Episode.turn_rewards`, beside the episode's reward.

`turn_rewards[k]` is the reward of turn k, or of a sub-goal reached in it; the episode's reward comes on top of them, at
the end. Turns are counted over the episode's trajectories, one after the other; missing rewards are 0. NumPy.
Axis letters: K turns, T tokens.
"""

from __future__ import annotations

import numpy as np

from jaxagent.algorithms.streams import action_mask
from jaxagent.types import Episode


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
