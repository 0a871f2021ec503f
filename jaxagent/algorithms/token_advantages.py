"""Advantages of single tokens, from rewards, and a critic's values, along one trajectory.

Every function takes a `TokenPath` and the config of the critic and gives an `Estimate`; its line in `TOKEN_ADVANTAGES`
is the name that `rl.advantage` may have. Pure and jittable; vmapped over padded trajectories by `estimates`.
Axis letter: T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.algorithms.gae import gae
from jaxagent.algorithms.turn_gae import bilevel_gae, turn_gae, turn_vtrace, vtrace
from jaxagent.config import CriticConfig, RLConfig


class TokenPath(NamedTuple):
    """One padded trajectory. What stands outside the mask is never read."""

    rewards: jax.Array  # f32[T] for emitting each token: the episode's on the last action, KL in the reward on each
    values: jax.Array  # f32[T] the critic's, of the state each token was sampled in; 0 without a critic
    mask: jax.Array  # bool[T] action tokens
    turns: jax.Array  # i32[T] the turn each belongs to
    log_rho: jax.Array  # f32[T] log p_old - log p_behaviour; 0 where the algorithm does not ask for it


class Estimate(NamedTuple):
    """What an advantage function says of a trajectory; 0 outside the mask."""

    advantages: jax.Array  # f32[T]
    returns: jax.Array  # f32[T] the critic's regression targets
    learnt: jax.Array  # bool[T] where the critic learns them


def token_gae(path: TokenPath, critic: CriticConfig) -> Estimate:
    """GAE over action tokens (`gae.gae`)."""
    return Estimate(*gae(path.rewards, path.values, path.mask, critic.gamma, critic.lam), path.mask)


def discounted_return(path: TokenPath, critic: CriticConfig) -> Estimate:
    """A_t = sum over action tokens k >= t of gamma^(k - t) r_k: no critic. GAE with values 0 and lambda 1.

    "REINFORCE++" (Hu et al., arXiv 2501.03262), eq. 6, whitened afterwards by `rl.whiten_advantages`.
    """
    return Estimate(*gae(path.rewards, jnp.zeros_like(path.values), path.mask, critic.gamma, 1.0), path.mask)


def adaptive_gae(path: TokenPath, critic: CriticConfig) -> Estimate:
    """GAE with lambda = 1 - 1 / (alpha * action tokens) for the policy and another lambda for the critic's targets.

    "VAPO" (Yue et al., arXiv 2504.05118), section 4.2: alpha 0.05, the critic's lambda 1. Below 1 / alpha
    tokens the formula is negative; lambda is 0 there.
    """
    length = jnp.maximum(jnp.sum(path.mask), 1)
    lam = jnp.maximum(1.0 - 1.0 / (critic.adaptive_alpha * length), 0.0)
    advantages, _ = gae(path.rewards, path.values, path.mask, critic.gamma, lam)
    _, returns = gae(path.rewards, path.values, path.mask, critic.gamma, critic.returns_lam)
    return Estimate(advantages, returns, path.mask)


def over_turns(path: TokenPath, critic: CriticConfig) -> Estimate:
    """GAE whose step is a turn (`turn_gae.turn_gae`)."""
    return Estimate(*turn_gae(path.rewards, path.values, path.mask, path.turns, critic.turn_gamma, critic.lam))


def bilevel(path: TokenPath, critic: CriticConfig) -> Estimate:
    """GAE over turns, then over the tokens of each (`turn_gae.bilevel_gae`)."""
    estimate = bilevel_gae(*path[:4], critic.gamma, critic.lam, critic.turn_gamma)
    return Estimate(*estimate, path.mask)


def off_policy(path: TokenPath, critic: CriticConfig) -> Estimate:
    """V-trace (`turn_gae.vtrace`)."""
    return Estimate(*vtrace(*path[:3], path.log_rho, critic.gamma, critic.lam), path.mask)


def off_policy_turns(path: TokenPath, critic: CriticConfig) -> Estimate:
    """V-trace whose step is a turn (`turn_gae.turn_vtrace`)."""
    return Estimate(*turn_vtrace(*path, critic.turn_gamma, critic.lam))


TOKEN_ADVANTAGES: dict[str, Callable[[TokenPath, CriticConfig], Estimate]] = {
    "gae": token_gae,
    "gae_adaptive": adaptive_gae,
    "gae_turns": over_turns,
    "gae_bilevel": bilevel,
    "vtrace": off_policy,
    "vtrace_turns": off_policy_turns,
    "return": discounted_return,
}

WITHOUT_CRITIC = ("return",)  # all others read values
WITH_OLD = ("vtrace", "vtrace_turns")  # read log_rho


def warm_up(rl: RLConfig) -> None:
    """Compiles what the advantage runs on the device."""
    if rl.advantage in TOKEN_ADVANTAGES:
        zero = np.zeros(1, np.float32)
        estimates([TokenPath(zero, zero, np.zeros(1, bool), np.zeros(1, np.int32), zero)], rl)


_DTYPES = TokenPath(np.float32, np.float32, bool, np.int32, np.float32)
_ROWS = 64  # trajectories per call: a static shape, so that nothing compiles twice


@functools.partial(jax.jit, static_argnames=("name", "critic"))
def _estimate_rows(rows: TokenPath, name: str, critic: CriticConfig) -> Estimate:
    return jax.vmap(lambda path: TOKEN_ADVANTAGES[name](path, critic))(rows)


def estimates(paths: list[TokenPath], rl: RLConfig) -> list[Estimate]:
    """Estimates of ragged trajectories, f32[T] each."""
    # One row more than a packed row: the last token of a trajectory is a target, never an input.
    width = rl.batch.row_tokens + 1
    out = []
    for start in range(0, len(paths), _ROWS):
        block = paths[start : start + _ROWS]
        padded = TokenPath(*(np.zeros((_ROWS, width), dtype) for dtype in _DTYPES))
        for row, path in enumerate(block):
            chex.assert_equal_shape(list(path))
            for target, stream in zip(padded, path, strict=True):
                used = min(len(stream), width)  # the tail behind the last action may be longer than a row
                target[row, :used] = stream[:used]
        with jax.transfer_guard("disallow"):
            rows = jax.device_get(_estimate_rows(jax.device_put(padded), name=rl.advantage, critic=rl.critic))
        for row, path in enumerate(block):
            full = [np.zeros(len(path.mask), np.float32) for _ in rows]
            used = min(len(path.mask), width)
            for target, row_of in zip(full, rows, strict=True):
                target[:used] = row_of[row, :used]
            out.append(Estimate(*full))
    return out
