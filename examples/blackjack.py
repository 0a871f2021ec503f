"""Gymnasium's Blackjack with rewards from 0 to 1, for `config.env.make=examples.blackjack:make`.

An attempt that breaks off, because its tokens run out, has earned nothing: 0. Where a lost game costs 1, breaking off
pays better than playing, and a policy learns just that. So a loss earns 0 here, a draw a half, and a win 1.
"""

import gymnasium
from gymnasium.wrappers import TransformReward


def make(**arguments: bool) -> gymnasium.Env:
    """The environment; `arguments` are gymnasium's: natural, sab."""
    return TransformReward(gymnasium.make("Blackjack-v1", **arguments), lambda reward: (min(reward, 1.0) + 1) / 2)
