"""Sections of the RL stage: the algorithm, and how its episodes are collected."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxagent.config.data import CurriculumConfig
from jaxagent.config.engine import LEAST_TEMPERATURE, SamplingConfig
from jaxagent.config.learner import BatchConfig, OptimizerConfig
from jaxagent.config.ranges import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    ZeroToOne,
    at_least,
    between,
    more_than,
)


@dataclasses.dataclass(frozen=True)
class KLConfig:
    """KL to a reference policy."""

    coefficient: NonNegativeFloat  # 0 = no reference is kept
    estimator: str  # of algorithms/kl.py
    where: Literal["loss", "reward", "advantage"]  # advantage: token by token, after baselines
    refresh_every: NonNegativeInt  # RL steps between two copies of the policy into the reference; 0 = it stays frozen


@dataclasses.dataclass(frozen=True)
class CorrectionConfig:
    """Importance weights for samples of another policy than the learner's: other numerics, or older weights."""

    name: str  # of algorithms/corrections.py; "none" = the ratio is taken to the recorded log-probs
    level: str  # whose ratio a token has: its own, its sequence's product or geometric mean
    low: ZeroToOne  # a ratio of 1, on-policy, always counts in full
    high: Annotated[float, at_least(1)]
    veto: ZeroToOne  # a trajectory with a token whose ratio is below counts 0; 0 = none
    normalise: bool  # divide the weights by their mean over the rollout batch
    opsm_delta: NonNegativeFloat  # read by "opsm": drift of a sequence, nats per token, from which bad ones are masked


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The value function: the policy's model code with a scalar head. Read when rl.advantage has a critic."""

    gamma: ZeroToOne
    lam: ZeroToOne
    returns_lam: ZeroToOne  # read by "gae_adaptive": lambda of the critic's targets
    adaptive_alpha: PositiveFloat  # read by "gae_adaptive": lambda = 1 - 1 / (alpha * action tokens)
    turn_gamma: ZeroToOne  # read by "gae_turns" and "gae_bilevel": discount per turn
    loss: Literal["squared", "hl_gauss", "two_hot"]  # the latter two: a head of `bins` logits, cross-entropy
    bins: Annotated[int, at_least(2)]  # read by "hl_gauss" and "two_hot", as the next two: values from `low` to `high`
    low: FiniteFloat
    high: FiniteFloat
    sigma: PositiveFloat  # read by "hl_gauss": standard deviation of the target, in bin widths; published 0.75
    value_clip: NonNegativeFloat  # read by "squared", in units of reward; 0 = off
    value_coefficient: NonNegativeFloat
    warmup_updates: NonNegativeInt  # critic-only updates before the policy moves
    warmup_epochs: PositiveInt  # passes of the critic over each update's data until then; afterwards one
    optimizer: OptimizerConfig


@dataclasses.dataclass(frozen=True)
class EchoConfig:
    """ECHO: cross-entropy on observation tokens from the same forward pass."""

    coefficient: NonNegativeFloat  # 0 = off; published: 0.05
    schedule: Literal["constant", "linear_decay", "step_decay"]
    targets: Literal["env_only", "full_observation", "warning_only", "warning_plus_env"]
    denominator: Literal["full_observation", "targets", "token_mean", "constant", "constant_sum"]
    max_tokens: NonNegativeInt  # 0 = no cap per sequence


@dataclasses.dataclass(frozen=True)
class PositiveNLLConfig:
    """Negative log-likelihood of the policy's own good attempts."""

    coefficient: NonNegativeFloat  # 0 = off; VAPO: 0.1
    min_reward: FiniteFloat  # from which an attempt is good


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """On-policy distillation: a teacher judges every token that the policy samples. See algorithms/distill.py."""

    coefficient: NonNegativeFloat  # of the teacher's term, beside the reward's; 0 = off
    teacher: str  # a Hugging Face folder (a run's exported policy), or the http:// address of an engine.serve
    loss: Literal["sampled", "reverse_kl", "forward_kl", "jsd"]  # sampled: an advantage; others: of distributions
    support: Literal["vocabulary", "student", "teacher", "union"]  # not read by "sampled"; student: its top-k tokens
    top_k: PositiveInt  # read unless the support is the vocabulary
    jsd_beta: Annotated[float, between(0, 1, without="both")]  # read by "jsd": the teacher's share of the mixture
    timeout_s: Seconds  # http: of one request
    retries: NonNegativeInt  # http: of one request, after the first attempt
    request_tokens: PositiveInt  # http: tokens of one request, at most (one trajectory may be longer)


@dataclasses.dataclass(frozen=True)
class EntropyControlConfig:
    """Steers the entropy to a target by rl.entropy_coefficient, which is then where the coefficient starts."""

    target: NonNegativeFloat  # nats per action token; 0 = off, the coefficient is constant
    step: PositiveFloat  # by which the coefficient rises (entropy below target) or falls per RL step
    maximum: PositiveFloat  # of the coefficient; the minimum is 0


@dataclasses.dataclass(frozen=True)
class RefillConfig:
    """Dynamic sampling: rounds of new tasks until enough groups have signal. See rollout/selection.py."""

    max_rounds: PositiveInt  # rounds per step at most; 1 = off: all groups are used, with signal or without
    tasks_per_round: NonNegativeInt  # 0 = as many as are missing


@dataclasses.dataclass(frozen=True)
class OversampleConfig:
    """More attempts than needed, stopped early. Off while both are 0; on, which attempts are used depends on timing."""

    extra_tasks: NonNegativeInt  # tasks started beyond those wanted; the step goes on when enough groups are complete
    extra_attempts: NonNegativeInt  # attempts started per task beyond group_size
    min_group: Annotated[int, at_least(2)]  # finished attempts from which a group that was cut short is used


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Past successes, replayed while their probability under the policy lies in a window. See rollout/replay.py."""

    per_step: NonNegativeInt  # attempts replayed per step at most; 0 = off
    capacity: PositiveInt  # attempts kept
    use: Literal["nll", "policy"]  # policy: with rl.correction, and advantages from groups
    coefficient: NonNegativeFloat
    min_reward: FiniteFloat  # from which an attempt is a success
    low: ZeroToOne  # exclusive bound of exp(mean log-prob per token); WebRL: 0.5
    high: ZeroToOne  # inclusive bound; WebRL: 0.95


@dataclasses.dataclass(frozen=True)
class TemperatureConfig:
    """How the sampling temperature goes on from rl.sampling.temperature, step by step. Evaluation keeps that one."""

    schedule: Literal["constant", "linear", "cosine"]
    final: Annotated[float, at_least(LEAST_TEMPERATURE)]  # in the last step


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """The reinforcement-learning stage. `algorithms.checks` knows which choices go together."""

    steps: NonNegativeInt
    tasks_per_step: PositiveInt
    group_size: PositiveInt
    staleness: NonNegativeInt  # steps by which the rollouts' weights lag behind; 0 = on-policy (see loop.Served)
    updates_per_step: PositiveInt  # optimiser updates (mini-batches) per rollout batch and epoch
    epochs: PositiveInt
    advantage: str  # of algorithms/advantages.py, best_of_k.py, process.py (from groups), token_advantages.py
    best_of: PositiveInt  # read by "max_at_k" and "pass_at_k": k
    multi_trajectory: Literal["full", "divide", "statistics"]  # an episode of several: see algorithms/estimate.py
    whiten_advantages: bool  # to mean 0 and variance 1 over the rollout batch's action tokens
    objective: str  # of algorithms/policy_loss.py
    clip_low: ZeroToOne  # the importance ratio's range is [1 - clip_low, 1 + clip_high]
    clip_high: NonNegativeFloat
    clip_dual: Annotated[float, more_than(1)]  # read by "dual_clip": cap of a ratio whose advantage is negative
    tau_positive: PositiveFloat  # read by "sapo": how fast the gate closes where the advantage is positive
    tau_negative: PositiveFloat  # and elsewhere
    correction: CorrectionConfig
    aggregation: str  # of algorithms/aggregate.py
    aggregation_constant: PositiveFloat  # tokens; Dr.GRPO's divisor
    drop_zero_signal: bool  # leave out groups whose rewards are all equal; read by advantages from groups
    entropy_coefficient: NonNegativeFloat
    entropy_control: EntropyControlConfig
    z_coefficient: NonNegativeFloat  # of (log Z)^2 of the sampled distribution's logits, on action tokens; 0 = off
    sampling: SamplingConfig
    temperature: TemperatureConfig
    refill: RefillConfig
    keep_groups_frac: Annotated[float, between(0, 1, without="low")]  # StarPO-S: the part of largest std; 1 = all
    oversample: OversampleConfig
    curriculum: CurriculumConfig
    replay: ReplayConfig
    tool_epsilon: ZeroToOne  # chance per turn that it begins with a random tool call, not trained; 0 = never
    optimizer: OptimizerConfig
    batch: BatchConfig
    kl: KLConfig
    critic: CriticConfig
    echo: EchoConfig
    positive_nll: PositiveNLLConfig
    distill: DistillConfig
