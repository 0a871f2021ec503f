"""The RL stage: which algorithm it runs, and how its episodes are collected.

A `Choice` is one entry of the dict that it names, with that entry's own constants. A section `| None` is off where it
is None. Defaults are published values, which `--config.rl.echo=on` or `--config.rl.objective=sapo` take.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxagent.config.choice import Choice
from jaxagent.config.engine import LEAST_TEMPERATURE, SamplingConfig
from jaxagent.config.learner import BatchConfig, OptimizerConfig
from jaxagent.config.ranges import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ZeroToOne,
    at_least,
    between,
)

ADVANTAGES = Choice("jaxagent.algorithms.estimators:ADVANTAGES")
OBJECTIVES = Choice("jaxagent.algorithms.objectives:OBJECTIVES")
CORRECTIONS = Choice("jaxagent.algorithms.corrections:CORRECTIONS")
AGGREGATIONS = Choice("jaxagent.algorithms.aggregate:AGGREGATIONS")
DENOMINATORS = Choice("jaxagent.algorithms.echo:DENOMINATORS")
TEACHERS = Choice("jaxagent.algorithms.teachers:TEACHERS", otherwise="folder:path")
TEACHER_LOSSES = Choice("jaxagent.algorithms.teachers:LOSSES")
CURRICULA = Choice("jaxagent.data.curriculum:CURRICULA")
GROUP_REWARDS = Choice("jaxagent.algorithms.group_rewards:GROUP_REWARDS")


@dataclasses.dataclass(frozen=True)
class KLConfig:
    """KL to a reference policy."""

    coefficient: PositiveFloat = 0.04  # DeepSeekMath, arXiv 2402.03300, section 4.2
    estimator: Literal["k1", "k2", "k3", "k3+", "abs"] = "k3"  # of algorithms/kl.py
    where: Literal["loss", "reward", "advantage"] = "loss"  # advantage: token by token, after baselines
    refresh_every: NonNegativeInt = 0  # RL steps between two copies of the policy into the reference; 0 = it is frozen


@dataclasses.dataclass(frozen=True)
class EchoConfig:
    """ECHO (arXiv 2605.24517): cross-entropy on observation tokens from the same forward pass."""

    coefficient: PositiveFloat = 0.05
    schedule: Literal["constant", "linear_decay", "step_decay"] = "constant"
    targets: Literal["env_only", "full_observation", "warning_only", "warning_plus_env"] = "env_only"
    denominator: Annotated[Any, DENOMINATORS] = dataclasses.field(
        default_factory=lambda: DENOMINATORS.make("full_observation")
    )  # what a sequence's targets are divided by
    max_tokens: NonNegativeInt = 0  # the first so many targets of a sequence; 0 = all


@dataclasses.dataclass(frozen=True)
class PositiveNLLConfig:
    """Negative log-likelihood of the policy's own good attempts (VAPO, arXiv 2504.05118, section 4.3)."""

    coefficient: PositiveFloat = 0.1
    min_reward: FiniteFloat = 1.0  # from which an attempt is good


@dataclasses.dataclass(frozen=True)
class ShapingConfig:
    """ToolOrchestra's: rewards of attempts that were cut off, and advantages of good ones."""

    truncated_factor: ZeroToOne = 0.1  # of the reward of an attempt that ran out of tokens (stop_properly_penalty)
    correct_boost: NonNegativeFloat = 0.1  # added to the advantage of a good attempt (correct_sample_advantage_boost)
    min_reward: FiniteFloat = 1.0  # from which an attempt is good


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """On-policy distillation: a teacher judges every token that the policy samples. See algorithms/distill.py."""

    teacher: Annotated[Any, TEACHERS]  # a model folder (a run's exported policy), or a server
    coefficient: PositiveFloat = 1.0  # of the teacher's term, beside the reward's
    loss: Annotated[Any, TEACHER_LOSSES] = dataclasses.field(
        default_factory=lambda: TEACHER_LOSSES.make("sampled")
    )  # sampled: an advantage; the others compare distributions

    @property
    def in_advantage(self) -> bool:
        """Whether the teacher's judgement of the sampled tokens is added to the advantage."""
        return self.loss.support is None

    @property
    def top_k(self) -> int:
        """How many tokens a top-k support has; 0 where the loss reads none or the whole vocabulary."""
        return getattr(self.loss.support, "top_k", 0)


@dataclasses.dataclass(frozen=True)
class EntropyControlConfig:
    """Steers the entropy to a target by rl.entropy_coefficient, which is then where the coefficient starts.

    "Skywork Open Reasoner 1" (arXiv 2505.22312), section 3.2.5; the step and the maximum are its released code's.
    """

    target: PositiveFloat = 0.2  # nats per action token
    step: PositiveFloat = 1e-4  # by which the coefficient rises (entropy below target) or falls per RL step
    maximum: PositiveFloat = 5e-3  # of the coefficient; the minimum is 0


@dataclasses.dataclass(frozen=True)
class ZLossConfig:
    """(log Z)^2 of the sampled distribution's logits, on action tokens (PaLM, arXiv 2204.02311, section 5)."""

    coefficient: PositiveFloat = 1e-4


@dataclasses.dataclass(frozen=True)
class RefillConfig:
    """Dynamic sampling: rounds of new tasks until enough groups have signal. See rollout/selection.py."""

    max_rounds: Annotated[int, at_least(2)] = 10  # rounds per step at most; DAPO's recipe
    tasks_per_round: NonNegativeInt = 0  # 0 = as many as are missing


@dataclasses.dataclass(frozen=True)
class OversampleConfig:
    """More attempts than needed, stopped early: which of them are used depends on timing."""

    extra_tasks: NonNegativeInt = 0  # begun beyond those wanted; the step goes on when enough groups are complete
    extra_attempts: NonNegativeInt = 0  # begun per task beyond group_size
    min_group: Annotated[int, at_least(2)] = 2  # finished attempts from which a group that was cut short is used


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Past successes, replayed while their probability under the policy lies in a window. See rollout/replay.py."""

    per_step: PositiveInt  # attempts replayed per step at most
    capacity: PositiveInt = 512  # attempts kept
    use: Literal["nll", "policy"] = "nll"  # policy: with rl.correction, and advantages from groups
    coefficient: PositiveFloat = 0.1
    min_reward: FiniteFloat = 1.0  # from which an attempt is a success
    low: ZeroToOne = 0.5  # exclusive bound of exp(mean log-prob per token); WebRL, arXiv 2411.02337
    high: ZeroToOne = 0.95  # inclusive bound; WebRL


@dataclasses.dataclass(frozen=True)
class TemperatureConfig:
    """How the sampling temperature goes on from rl.sampling.temperature, step by step. Evaluation keeps that one."""

    final: Annotated[float, at_least(LEAST_TEMPERATURE)]  # in the last step
    schedule: Literal["linear", "cosine"] = "linear"


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """The reinforcement-learning stage. `algorithms/checks.py` says which choices go together."""

    steps: NonNegativeInt
    tasks_per_step: PositiveInt
    group_size: PositiveInt
    staleness: NonNegativeInt  # steps by which the rollouts' weights lag behind (runs/seams.py); 0 = on-policy
    rescore_every: NonNegativeInt  # with staleness: every so many steps its logprob_gap (runs/lag.py); 0 = never
    updates_per_step: PositiveInt  # optimiser updates (mini-batches) per rollout batch and epoch
    epochs: PositiveInt
    advantage: Annotated[Any, ADVANTAGES]  # how much better than expected an attempt, a turn or a token was
    whiten_advantages: bool  # to mean 0 and variance 1 over the rollout batch's action tokens
    objective: Annotated[Any, OBJECTIVES]  # how an advantage moves the policy
    aggregation: Annotated[Any, AGGREGATIONS]  # how the losses of an update's tokens become one number
    entropy_coefficient: NonNegativeFloat
    sampling: SamplingConfig
    keep_groups_frac: Annotated[float, between(0, 1, without="low")]  # StarPO-S: the part of largest std; 1 = all
    tool_epsilon: ZeroToOne  # chance per turn that it begins with a random tool call, not trained; 0 = never
    optimizer: OptimizerConfig
    batch: BatchConfig
    mask_truncated: bool = False  # attempts out of tokens: in their group's statistics, in no term of policy and critic
    correction: Annotated[Any, CORRECTIONS] | None = None  # for samples of other numerics or older weights
    kl: KLConfig | None = None
    entropy_control: EntropyControlConfig | None = None
    z_loss: ZLossConfig | None = None
    group_reward: Annotated[Any, GROUP_REWARDS] | None = None  # in place of the environment's; None: the environment's
    shaping: ShapingConfig | None = None
    echo: EchoConfig | None = None
    positive_nll: PositiveNLLConfig | None = None
    distill: DistillConfig | None = None
    temperature: TemperatureConfig | None = None  # None: constant
    refill: RefillConfig | None = None  # None: all groups are used, with signal or without
    oversample: OversampleConfig | None = None
    curriculum: Annotated[Any, CURRICULA] | None = None  # which tasks come next; None: whole shuffled epochs
    replay: ReplayConfig | None = None

    @property
    def critic(self) -> Any:
        """The `estimators.CriticConfig` of an advantage that reads values; None where it reads none."""
        return getattr(self.advantage, "critic", None)

    def kl_in(self, where: str) -> KLConfig | None:
        """The KL section where it is "loss", "reward" or "advantage" that it is in; else None."""
        return self.kl if self.kl is not None and self.kl.where == where else None

    @property
    def reads_old(self) -> bool:
        """Whether the learner scores the samples before its first update, since a choice reads those log-probs."""
        return any(getattr(choice, "reads_old", False) for choice in (self.advantage, self.correction))

    @property
    def rescores(self) -> bool:
        """Whether stale tokens are scored again at some steps, under the version that sampled them."""
        return self.staleness > 0 and self.rescore_every > 0
