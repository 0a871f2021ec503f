"""Advantages of single tokens, from rewards, and a critic's values, along one trajectory.

Every function takes a `Path` and the config of the critic and gives an `Estimate`; its line in `TOKEN_ADVANTAGES` is
the name that `rl.advantage` may have. Pure and jittable; vmapped over trajectories by `estimate.py`.
Axis letter: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.algorithms.gae import gae
from jaxagent.config import CriticConfig


class Path(NamedTuple):
    """One padded trajectory. What stands outside the mask is never read."""

    rewards: jax.Array  # f32[T] for emitting each token: the episode's on the last action, KL in the reward on each
    values: jax.Array  # f32[T] the critic's, of the state each token was sampled in; 0 without a critic
    mask: jax.Array  # bool[T] action tokens


class Estimate(NamedTuple):
    """What an advantage function says of a trajectory; 0 outside the mask."""

    advantages: jax.Array  # f32[T]
    returns: jax.Array  # f32[T] the critic's regression targets


def token_gae(path: Path, critic: CriticConfig) -> Estimate:
    """GAE over action tokens (`gae.gae`)."""
    return Estimate(*gae(path.rewards, path.values, path.mask, critic.gamma, critic.lam))


def discounted_return(path: Path, critic: CriticConfig) -> Estimate:
    """A_t = sum over action tokens k >= t of gamma^(k - t) r_k: no critic. GAE with values 0 and lambda 1.

    "REINFORCE++" (Hu et al., arXiv 2501.03262), eq. 6, whitened afterwards by `rl.whiten_advantages`.
    """
    return Estimate(*gae(path.rewards, jnp.zeros_like(path.values), path.mask, critic.gamma, 1.0))


TOKEN_ADVANTAGES: dict[str, Callable[[Path, CriticConfig], Estimate]] = {
    "gae": token_gae,
    "return": discounted_return,
}

WITHOUT_CRITIC = ("return",)  # all others read values
