"""Advantage estimation where the environment's step is a turn, and V-trace for samples of another policy.

In: rewards, values, action mask and turn number of each token of one trajectory. Out: advantages and returns, 0 outside
the mask. What stands outside the mask in the inputs is never read. Axis letter: T tokens. vmap for batches.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxagent.algorithms.gae import check_tokens


def turn_starts(mask: jax.Array, turns: jax.Array) -> jax.Array:
    """bool[T]: the first action token of each turn. Reversed arguments, reversed result: the last ones."""
    check_tokens(mask)
    chex.assert_equal_shape([mask, turns])
    chex.assert_type(turns, int)

    def step(before: jax.Array, token: tuple) -> tuple:
        is_action, turn = token
        return jnp.where(is_action, turn, before), is_action & (turn != before)

    return jax.lax.scan(step, jnp.full((), -1, turns.dtype), (mask, turns))[1]


def turn_gae(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, turns: jax.Array, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """GAE whose time step is a turn: delta_k = R_k + gamma V_{k+1} - V_k, A_k = delta_k + gamma lam A_{k+1}.

    `turn_vtrace` of samples that are the policy's own; arguments and results are described there.
    """
    return turn_vtrace(rewards, values, mask, turns, jnp.zeros_like(rewards), gamma, lam)


def turn_vtrace(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    turns: jax.Array,
    log_rho: jax.Array,
    gamma: float,
    lam: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """V-trace (see `vtrace`) whose time step is a turn, for a critic of turns.

    R_k is the sum of the turn's token rewards, V_k the value of the state in which its first token was sampled, and
    rho_k the product of its tokens' ratios: the turn's own. Every token of the turn has A_k; the critic learns at
    first tokens alone, where its value was read.

    Args:
      rewards, values: f32[T].
      mask: bool[T] action tokens.
      turns: i32[T] turn numbers, not negative.
      log_rho: f32[T].
      gamma, lam: per turn.

    Returns:
      advantages f32[T], returns f32[T] (V_k + e_k) and bool[T] where they are a target for the critic: first tokens.
    """
    check_tokens(mask, rewards, values, log_rho)
    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)
    log_rho = jnp.where(mask, log_rho, 0.0)
    starts = turn_starts(mask, turns)

    def back(carry: tuple, token: tuple) -> tuple:
        collected, collected_rho, next_value, next_error = carry
        reward, value, log_ratio, start = token
        collected, collected_rho = collected + reward, collected_rho + log_ratio
        weight = jnp.exp(jnp.minimum(collected_rho, 0.0))
        error = weight * (collected + gamma * next_value - value) + gamma * lam * weight * next_error
        advantage = weight * (collected + gamma * (next_value + lam * next_error) - value)
        before = (collected, collected_rho, next_value, next_error)
        new = (jnp.zeros_like(collected), jnp.zeros_like(collected_rho), value, error)
        carry = jax.tree.map(lambda a, b: jnp.where(start, a, b), new, before)
        return carry, (jnp.where(start, advantage, 0.0), jnp.where(start, value + error, 0.0))

    def spread(current: jax.Array, token: tuple) -> tuple:
        advantage, start, is_action = token
        current = jnp.where(start, advantage, current)
        return current, jnp.where(is_action, current, 0.0)

    zero = jnp.zeros((), values.dtype)
    _, (at_starts, returns) = jax.lax.scan(back, (zero,) * 4, (rewards, values, log_rho, starts), reverse=True)
    _, advantages = jax.lax.scan(spread, zero, (at_starts, starts, mask))
    return advantages, returns, starts


def bilevel_gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    turns: jax.Array,
    gamma: float,
    lam: float,
    turn_gamma: float,
) -> tuple[jax.Array, jax.Array]:
    """GAE over turns at their last tokens, then over tokens inside each turn, with the turn's return as its reward.

    Between last tokens e_k: A_k = r_k + turn_gamma V(e_{k+1}) - V(e_k) + turn_gamma lam A_{k+1}. At e_k itself the
    token's advantage is A_k; inside the turn it is the ordinary recursion with gamma and lam, started from A_k.
    VAGEN's bi-level GAE, an extension in RAGEN's released code (arXiv 2504.20073) that its configs leave off. There a
    turn ends where the reward is not 0, so that turns without reward melt into the next; here turns are the
    environment's.

    Args:
      rewards, values, mask, turns, gamma, lam: as `turn_gae`; gamma is per token.
      turn_gamma: discount per turn.

    Returns:
      advantages and returns (advantages + values), f32[T].
    """
    check_tokens(mask, rewards, values)
    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)
    ends = turn_starts(mask[::-1], turns[::-1])[::-1]

    def step(carry: tuple, token: tuple) -> tuple:
        turn_value, turn_advantage, next_value, next_advantage = carry
        reward, value, is_action, end = token
        high = reward + turn_gamma * turn_value - value + turn_gamma * lam * turn_advantage
        low = reward + gamma * next_value - value + gamma * lam * next_advantage
        advantage = jnp.where(end, high, low)
        new = (jnp.where(end, value, turn_value), jnp.where(end, high, turn_advantage), value, advantage)
        return jax.tree.map(lambda a, b: jnp.where(is_action, a, b), new, carry), jnp.where(is_action, advantage, 0.0)

    zero = jnp.zeros((), values.dtype)
    _, advantages = jax.lax.scan(step, (zero,) * 4, (rewards, values, mask, ends), reverse=True)
    return advantages, advantages + values


def vtrace(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, log_rho: jax.Array, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
    """Off-policy returns, with rho_bar = min(1, rho) and c = lam min(1, rho), rho = p_old / p_behaviour of each token.

        delta_t = rho_bar_t (r_t + gamma V_{t+1} - V_t);   e_t = delta_t + gamma c_t e_{t+1};   return_t = V_t + e_t
        A_t = rho_bar_t (r_t + gamma (V_{t+1} + lam e_{t+1}) - V_t)

    "IMPALA" (Espeholt et al., arXiv 1802.01561), eq. 1; A with lambda as in rlax. On-policy this is GAE. Tokens that
    are no actions pass everything through.

    Args:
      rewards, values, mask, gamma, lam: as `gae.gae`.
      log_rho: f32[T].

    Returns:
      advantages and returns, f32[T].
    """
    check_tokens(mask, rewards, values, log_rho)
    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)
    rho = jnp.exp(jnp.minimum(jnp.where(mask, log_rho, 0.0), 0.0))

    def step(carry: tuple, token: tuple) -> tuple:
        next_value, next_error = carry
        reward, value, is_action, weight = token
        error = weight * (reward + gamma * next_value - value) + gamma * lam * weight * next_error
        advantage = weight * (reward + gamma * (next_value + lam * next_error) - value)
        carry = jax.tree.map(lambda a, b: jnp.where(is_action, a, b), (value, error), carry)
        return carry, (jnp.where(is_action, advantage, 0.0), jnp.where(is_action, value + error, 0.0))

    zero = jnp.zeros((), values.dtype)
    return jax.lax.scan(step, (zero, zero), (rewards, values, mask, rho), reverse=True)[1]
