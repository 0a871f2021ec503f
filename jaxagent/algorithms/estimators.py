"""What `rl.advantage` can name: how much better than expected something was, each with its constants.

    GroupAdvantage   one number per attempt, compared with the others at its task       advantages.py, best_of_k.py
    TurnAdvantage    one per turn, from process rewards                                 process.py
    TokenAdvantage   one per action token, along a trajectory; with a critic or without gae.py, turn_gae.py

An advantage of your own extends one of these three, in a module of yours, and is named by its path:
`--config.rl.advantage=my_package.my_module:MyAdvantage`. `estimate.py` does everything around the formulas.
No jax before an entry is called: a config is read without it.
Axis letters: N tasks, G attempts per group, K turns, T tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from jaxagent import contract
from jaxagent.algorithms.value_losses import Squared
from jaxagent.config.choice import Choice
from jaxagent.config.learner import OptimizerConfig
from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ZeroToOne

Array = Any  # numpy.ndarray or jax.Array


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is common to advantages that compare the attempts of a group."""

    drop_zero_signal: bool = False  # leave out groups whose rewards are all equal


@dataclasses.dataclass(frozen=True)
class GroupAdvantage(Comparison):
    """One number per attempt: rewards float[N, G] and mask bool[N, G] of those that count -> float[N, G], 0 elsewhere.

    Runs on NumPy. What a group of one attempt and an attempt left alone have: `advantages.py`.
    """

    multi_trajectory: Literal["full", "divide", "statistics"] = "full"  # an episode of several: see estimate.py

    def __call__(self, rewards: Array, mask: Array) -> Array:
        raise NotImplementedError


class GroupMeanStd(GroupAdvantage):
    """GRPO (arXiv 2402.03300): the group's mean is taken off, and the rest divided by its standard deviation."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        from jaxagent.algorithms.advantages import group_mean_std

        return group_mean_std(rewards, mask)


class GroupMean(GroupAdvantage):
    """Dr. GRPO (arXiv 2503.20783): the group's mean is taken off."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        from jaxagent.algorithms.advantages import group_mean

        return group_mean(rewards, mask)


class GroupMeanBatchStd(GroupAdvantage):
    """Batch scaling (arXiv 2508.08221): the group's mean is taken off, and the rest divided by the batch's std."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        from jaxagent.algorithms.advantages import group_mean_batch_std

        return group_mean_batch_std(rewards, mask)


class MaxRL(GroupAdvantage):
    """MaxRL (Tajwar et al., 2026): the group's mean is taken off, and the rest divided by it."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        from jaxagent.algorithms.advantages import group_mean_by_mean

        return group_mean_by_mean(rewards, mask)


class LeaveOneOut(GroupAdvantage):
    """RLOO (arXiv 2402.14740): the mean of the others is taken off."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        from jaxagent.algorithms.advantages import leave_one_out

        return leave_one_out(rewards, mask)


class LeaveOneOutStd(GroupAdvantage):
    """Polar: as RLOO, divided by the group's standard deviation."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        from jaxagent.algorithms.advantages import leave_one_out_std

        return leave_one_out_std(rewards, mask)


class NoBaseline(GroupAdvantage):
    """The reward itself (Williams, 1992)."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        from jaxagent.algorithms.advantages import no_baseline

        return no_baseline(rewards, mask)


class NoReward(GroupAdvantage):
    """0: the reward is measured and not trained on."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        from jaxagent.algorithms.advantages import no_reward

        return no_reward(rewards, mask)


@dataclasses.dataclass(frozen=True)
class BestOfK(GroupAdvantage):
    """The best of k attempts counts."""

    k: PositiveInt = 4  # attempts per subset, at most rl.group_size


class MaxAtK(BestOfK):
    """Pass@K Policy Optimization (arXiv 2505.15201): what an attempt adds to the best of k."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        from jaxagent.algorithms.best_of_k import max_at_k

        return max_at_k(rewards, mask, self.k)


class PassAtK(BestOfK):
    """Pass@k Training (arXiv 2508.10751): GRPO whose samples are subsets of k attempts."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        from jaxagent.algorithms.best_of_k import pass_at_k

        return pass_at_k(rewards, mask, self.k)


@dataclasses.dataclass(frozen=True)
class TurnAdvantage(Comparison):
    """One number per turn: rewards float[N, G, K] and mask bool[N, G, K] -> float[N, G, K], 0 where masked out.

    One that reads states is called with them too, i64[N, G, K]: turns of a group with equal numbers began in one state.
    """

    reads_states: ClassVar[bool] = False

    def __call__(self, rewards: Array, mask: Array) -> Array:
        raise NotImplementedError


class TurnMeanStd(TurnAdvantage):
    """GRPO with process supervision (arXiv 2402.03300, section 4.1.3); a step is a turn."""

    def __call__(self, rewards: Array, mask: Array) -> Array:
        from jaxagent.algorithms.process import turn_mean_std

        return turn_mean_std(rewards, mask)


@dataclasses.dataclass(frozen=True)
class GiGPO(TurnAdvantage):
    """Group-in-group (arXiv 2505.10978): the attempt among the group's, and the turn among those from its state."""

    reads_states: ClassVar[bool] = True
    gamma: ZeroToOne = 0.95  # discount per turn of the return that follows a turn
    step_weight: NonNegativeFloat = 1.0  # of the turn's part

    def __call__(self, rewards: Array, mask: Array, states: Array) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        from jaxagent.algorithms.process import group_in_group

        return group_in_group(rewards, mask, states, self.gamma, self.step_weight)


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
    """One number per action token. Pure and jittable; vmapped over trajectories, and static under jit."""

    reads_old: ClassVar[bool] = False  # whether it reads `TokenPath.log_rho`

    def __call__(self, path: TokenPath) -> Estimate:
        raise NotImplementedError


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


_ADAMW = OptimizerConfig(
    1e-5, "constant", warmup_steps=15, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01, grad_clip=1.0
)


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
        import jax.numpy as jnp

        from jaxagent.algorithms.gae import gae

        return Estimate(*gae(path.rewards, jnp.zeros_like(path.values), path.mask, self.gamma, 1.0), path.mask)


@dataclasses.dataclass(frozen=True)
class GAE(TokenAdvantage):
    """Generalised advantage estimation over action tokens (`gae.gae`)."""

    gamma: ZeroToOne = 1.0  # discount per action token
    lam: ZeroToOne = 1.0
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)

    def __call__(self, path: TokenPath) -> Estimate:
        from jaxagent.algorithms.gae import gae

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
        import jax.numpy as jnp

        from jaxagent.algorithms.gae import gae

        length = jnp.maximum(jnp.sum(path.mask), 1)
        lam = jnp.maximum(1.0 - 1.0 / (self.alpha * length), 0.0)
        advantages, _ = gae(path.rewards, path.values, path.mask, self.gamma, lam)
        _, returns = gae(path.rewards, path.values, path.mask, self.gamma, self.returns_lam)
        return Estimate(advantages, returns, path.mask)


@dataclasses.dataclass(frozen=True)
class TurnGAE(TokenAdvantage):
    """GAE whose step is a turn (`turn_gae.turn_gae`)."""

    gamma: ZeroToOne = 1.0  # discount per turn
    lam: ZeroToOne = 1.0
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)

    def __call__(self, path: TokenPath) -> Estimate:
        from jaxagent.algorithms.turn_gae import turn_gae

        return Estimate(*turn_gae(*path[:4], self.gamma, self.lam))


@dataclasses.dataclass(frozen=True)
class BilevelGAE(TokenAdvantage):
    """GAE over turns, then over the tokens of each (`turn_gae.bilevel_gae`)."""

    gamma: ZeroToOne = 1.0  # discount per action token
    lam: ZeroToOne = 1.0
    turn_gamma: ZeroToOne = 1.0  # discount per turn
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)

    def __call__(self, path: TokenPath) -> Estimate:
        from jaxagent.algorithms.turn_gae import bilevel_gae

        return Estimate(*bilevel_gae(*path[:4], self.gamma, self.lam, self.turn_gamma), path.mask)


@dataclasses.dataclass(frozen=True)
class VTrace(TokenAdvantage):
    """IMPALA's V-trace (arXiv 1802.01561) over tokens (`turn_gae.vtrace`): importance weights of its own."""

    reads_old: ClassVar[bool] = True
    gamma: ZeroToOne = 1.0  # discount per action token
    lam: ZeroToOne = 1.0
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)

    def __call__(self, path: TokenPath) -> Estimate:
        from jaxagent.algorithms.turn_gae import vtrace

        return Estimate(*vtrace(*path[:3], path.log_rho, self.gamma, self.lam), path.mask)


@dataclasses.dataclass(frozen=True)
class TurnVTrace(TokenAdvantage):
    """V-trace whose step is a turn (`turn_gae.turn_vtrace`)."""

    reads_old: ClassVar[bool] = True
    gamma: ZeroToOne = 1.0  # discount per turn
    lam: ZeroToOne = 1.0
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)

    def __call__(self, path: TokenPath) -> Estimate:
        from jaxagent.algorithms.turn_gae import turn_vtrace

        return Estimate(*turn_vtrace(*path, self.gamma, self.lam))


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
