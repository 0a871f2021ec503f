"""Advantages along the tokens of a trajectory, listed in `estimators.py`: generalised advantage estimation and V-trace.

Time steps are ACTION tokens, or turns: an observation between two turns is the environment's doing, so the last token
of a turn is followed by the first token of the next, with no step of discount for what lies between. What stands
outside the mask is never read, and has 0. An entry is pure and jittable, and vmapped for batches.
No jax before an entry is called: a config is read without it. Axis letter: T tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, NamedTuple

from jaxagent.algorithms.late import jax, jnp
from jaxagent.algorithms.value_losses import Squared, TwoHot
from jaxagent.config.choice import Choice
from jaxagent.config.model import OptimizerConfig
from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ZeroToOne
from jaxagent.contract import check_arrays

Array = Any  # numpy.ndarray or jax.Array


def check_tokens(mask: jax.Array, *streams: jax.Array) -> None:
    """Refuses with an AssertionError what is not bool[T] and float[T]: other shapes would broadcast."""
    check_arrays(mask, *streams, types=[bool, *[float] * len(streams)], rank=1)


def turn_starts(mask: jax.Array, turns: jax.Array) -> jax.Array:
    """bool[T]: the first action token of each turn. Reversed arguments, reversed result: the last ones."""
    check_arrays(mask, turns, types=[bool, int], rank=1)

    def step(before: jax.Array, token: tuple) -> tuple:
        is_action, turn = token
        return jnp.where(is_action, turn, before), is_action & (turn != before)

    return jax.lax.scan(step, jnp.full((), -1, turns.dtype), (mask, turns))[1]


def gae(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, gamma: float, lam: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """delta_k = r_k + gamma v_{k+1} - v_k;  A_k = delta_k + gamma lam A_{k+1}, over action tokens k, and v_end = 0.

    See "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (Schulman et al.,
    arXiv 1506.02438), eq. 16. Arguments as in `TokenPath`; `lam` may be f32[].

    Returns:
      advantages and returns (advantages + values), f32[T], 0 outside the mask.
    """
    check_tokens(mask, rewards, values)

    def step(carry: tuple, token: tuple) -> tuple:
        next_value, next_advantage = carry
        reward, value, is_action = token
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = (jnp.where(is_action, value, next_value), jnp.where(is_action, advantage, next_advantage))
        return carry, jnp.where(is_action, advantage, 0.0)

    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)
    start = (jnp.zeros((), values.dtype), jnp.zeros((), values.dtype))
    _, advantages = jax.lax.scan(step, start, (rewards, values, mask), reverse=True)
    return advantages, advantages + values


class TokenPath(NamedTuple):
    """One padded trajectory. What stands outside the mask is never read."""

    rewards: Array  # f32[T] for emitting each token: the episode's on the last action, KL in the reward on each
    values: Array  # f32[T] the critic's, of the state each token was sampled in; 0 without a critic
    mask: Array  # bool[T] action tokens
    turns: Array  # i32[T] the turn each belongs to
    log_rho: Array  # f32[T] log p_old - log p_behaviour; 0 where the algorithm does not ask for it


class Estimate(NamedTuple):
    """What an advantage along tokens says of a trajectory; 0 outside the mask."""

    advantages: Array  # f32[T]
    returns: Array  # f32[T] the critic's regression targets
    learnt: Array  # bool[T] where the critic learns them


@dataclasses.dataclass(frozen=True)
class TokenAdvantage:
    """One number per action token. It is static under jit."""

    reads_old: ClassVar[bool] = False  # whether it reads `TokenPath.log_rho`

    def __call__(self, path: TokenPath) -> Estimate:
        raise NotImplementedError


_ADAMW = OptimizerConfig(1e-5, "constant", warmup_steps=15, b2=0.999, weight_decay=0.01, grad_clip=1.0)


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The value function: the policy's model code with a scalar head. Defaults: Search-R1's PPO (arXiv 2503.09516)."""

    loss: Annotated[Any, Choice("jaxagent.algorithms.value_losses:VALUE_LOSSES")] = dataclasses.field(
        default_factory=Squared
    )
    value_coefficient: NonNegativeFloat = 1.0
    warmup_updates: NonNegativeInt = 0  # critic-only updates before the policy moves
    warmup_epochs: PositiveInt = 1  # passes of the critic over each update's data until then; afterwards one
    optimizer: OptimizerConfig = _ADAMW


@dataclasses.dataclass(frozen=True)
class Return(TokenAdvantage):
    """A_t = sum over action tokens k >= t of gamma^(k - t) r_k: no critic. GAE with values 0 and lambda 1.

    "REINFORCE++" (Hu et al., arXiv 2501.03262), eq. 6, whitened afterwards by `rl.whiten_advantages`.
    """

    gamma: ZeroToOne = 1.0  # discount per action token

    def __call__(self, path: TokenPath) -> Estimate:
        return Estimate(*gae(path.rewards, jnp.zeros_like(path.rewards), path.mask, self.gamma, 1.0), path.mask)


@dataclasses.dataclass(frozen=True)
class GAE(TokenAdvantage):
    """Generalised advantage estimation over action tokens (`gae`)."""

    gamma: ZeroToOne = 1.0  # discount per action token
    lam: ZeroToOne = 1.0
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)

    def __call__(self, path: TokenPath) -> Estimate:
        return Estimate(*gae(path.rewards, path.values, path.mask, self.gamma, self.lam), path.mask)


@dataclasses.dataclass(frozen=True)
class AdaptiveGAE(TokenAdvantage):
    """GAE with lambda = 1 - 1 / (alpha * action tokens) for the policy and another lambda for the critic's targets.

    "VAPO" (Yue et al., arXiv 2504.05118), section 4.2. Below 1 / alpha tokens the formula is negative: lambda is 0.
    """

    gamma: ZeroToOne = 1.0  # discount per action token
    alpha: PositiveFloat = 0.05
    returns_lam: ZeroToOne = 1.0  # lambda of the critic's targets
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)

    def __call__(self, path: TokenPath) -> Estimate:
        length = jnp.maximum(jnp.sum(path.mask), 1)
        lam = jnp.maximum(1.0 - 1.0 / (self.alpha * length), 0.0)
        advantages, _ = gae(path.rewards, path.values, path.mask, self.gamma, lam)
        _, returns = gae(path.rewards, path.values, path.mask, self.gamma, self.returns_lam)
        return Estimate(advantages, returns, path.mask)


class VTrace(GAE):
    """Off-policy returns, with rho_bar = min(1, rho) and c = lam min(1, rho), rho = p_old / p_behaviour of each token.

        delta_t = rho_bar_t (r_t + gamma V_{t+1} - V_t);   e_t = delta_t + gamma c_t e_{t+1};   return_t = V_t + e_t
        A_t = rho_bar_t (r_t + gamma (V_{t+1} + lam e_{t+1}) - V_t)

    "IMPALA" (Espeholt et al., arXiv 1802.01561), eq. 1; A with lambda as in rlax. On-policy this is GAE.
    """

    reads_old: ClassVar[bool] = True

    def __call__(self, path: TokenPath) -> Estimate:
        gamma, lam, inside = self.gamma, self.lam, _inside(path)
        rho = jnp.exp(jnp.minimum(inside.log_rho, 0.0))

        def step(carry: tuple, token: tuple) -> tuple:
            next_value, next_error = carry
            reward, value, is_action, weight = token
            error = weight * (reward + gamma * next_value - value) + gamma * lam * weight * next_error
            advantage = weight * (reward + gamma * (next_value + lam * next_error) - value)
            carry = jax.tree.map(lambda a, b: jnp.where(is_action, a, b), (value, error), carry)
            return carry, (jnp.where(is_action, advantage, 0.0), jnp.where(is_action, value + error, 0.0))

        zero, tokens = jnp.zeros((), inside.values.dtype), (inside.rewards, inside.values, path.mask, rho)
        _, (advantages, returns) = jax.lax.scan(step, (zero, zero), tokens, reverse=True)
        return Estimate(advantages, returns, path.mask)


@dataclasses.dataclass(frozen=True)
class TurnVTrace(GAE):
    """V-trace whose time step is a turn, for a critic of turns.

    R_k is the sum of the turn's token rewards, V_k the value of the state in which its first token was sampled, and
    rho_k the product of its tokens' ratios: the turn's own. Every token of the turn has A_k; the critic learns
    V_k + e_k at first tokens alone, where its value was read.
    """

    reads_old: ClassVar[bool] = True
    gamma: ZeroToOne = 1.0  # discount per turn

    def __call__(self, path: TokenPath) -> Estimate:
        gamma, lam, inside = self.gamma, self.lam, _inside(path)
        starts = turn_starts(path.mask, path.turns)

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

        zero, tokens = jnp.zeros((), inside.values.dtype), (inside.rewards, inside.values, inside.log_rho, starts)
        _, (at_starts, returns) = jax.lax.scan(back, (zero,) * 4, tokens, reverse=True)
        _, advantages = jax.lax.scan(spread, zero, (at_starts, starts, path.mask))
        return Estimate(advantages, returns, starts)


class TurnGAE(TurnVTrace):
    """GAE whose time step is a turn: delta_k = R_k + gamma V_{k+1} - V_k, A_k = delta_k + gamma lam A_{k+1}.

    `TurnVTrace` of samples that are the policy's own.
    """

    reads_old = False

    def __call__(self, path: TokenPath) -> Estimate:
        return super().__call__(path._replace(log_rho=jnp.zeros_like(path.log_rho)))


@dataclasses.dataclass(frozen=True)
class MixedTurns(TokenAdvantage):
    """A_k = mix (R_k + V_{k+1} - V_k) + (1 - mix) (R_k + R_{k+1} + ... - V_k), over turns as in `TurnGAE`.

    One step ahead by the critic, mixed with what came of it: "WebRL" (Qi et al., arXiv 2411.02337), section 3.2. The
    critic learns the return; there it is a classifier of success, `two_hot` with bins=2, low=-0.5 and high=1.5.
    """

    mix: ZeroToOne = 0.5
    critic: CriticConfig = dataclasses.field(
        default_factory=lambda: CriticConfig(loss=TwoHot(bins=2, low=-0.5, high=1.5))
    )

    def __call__(self, path: TokenPath) -> Estimate:
        ahead, whole = (TurnGAE(gamma=1.0, lam=lam, critic=self.critic)(path) for lam in (0.0, 1.0))
        return whole._replace(advantages=self.mix * ahead.advantages + (1.0 - self.mix) * whole.advantages)


@dataclasses.dataclass(frozen=True)
class BilevelGAE(TokenAdvantage):
    """GAE over turns at their last tokens, then over tokens inside each turn, with the turn's return as its reward.

    Between last tokens e_k: A_k = r_k + turn_gamma V(e_{k+1}) - V(e_k) + turn_gamma lam A_{k+1}. At e_k itself the
    token's advantage is A_k; inside the turn it is the ordinary recursion with gamma and lam, started from A_k.
    VAGEN's bi-level GAE, an extension in RAGEN's released code (arXiv 2504.20073) that its configs leave off. There a
    turn ends where the reward is not 0, so that turns without reward melt into the next; here turns are the
    environment's.
    """

    gamma: ZeroToOne = 1.0  # discount per action token
    lam: ZeroToOne = 1.0
    turn_gamma: ZeroToOne = 1.0  # discount per turn
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)

    def __call__(self, path: TokenPath) -> Estimate:
        gamma, lam, turn_gamma, inside = self.gamma, self.lam, self.turn_gamma, _inside(path)
        ends = turn_starts(path.mask[::-1], path.turns[::-1])[::-1]

        def step(carry: tuple, token: tuple) -> tuple:
            turn_value, turn_advantage, next_value, next_advantage = carry
            reward, value, is_action, end = token
            high = reward + turn_gamma * turn_value - value + turn_gamma * lam * turn_advantage
            low = reward + gamma * next_value - value + gamma * lam * next_advantage
            advantage = jnp.where(end, high, low)
            new = (jnp.where(end, value, turn_value), jnp.where(end, high, turn_advantage), value, advantage)
            carry = jax.tree.map(lambda a, b: jnp.where(is_action, a, b), new, carry)
            return carry, jnp.where(is_action, advantage, 0.0)

        zero, tokens = jnp.zeros((), inside.values.dtype), (inside.rewards, inside.values, path.mask, ends)
        _, advantages = jax.lax.scan(step, (zero,) * 4, tokens, reverse=True)
        return Estimate(advantages, advantages + inside.values, path.mask)


def _inside(path: TokenPath) -> TokenPath:
    """The path, checked, with 0 outside the mask."""
    check_tokens(path.mask, path.rewards, path.values, path.log_rho)
    rewards, values, log_rho = (jnp.where(path.mask, x, 0.0) for x in (path.rewards, path.values, path.log_rho))
    return TokenPath(rewards, values, path.mask, path.turns, log_rho)
