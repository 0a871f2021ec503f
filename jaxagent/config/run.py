"""The root of the schema: the whole truth of one run, with its engine and its RL stage, which every run has.

A `Choice` is one entry of the dict that it names, with that entry's own constants. A section `| None` is off where it
is None. Defaults are published values, which `--config.rl.echo=on` or `--config.rl.objective=sapo` take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from jaxagent.config.choice import Choice
from jaxagent.config.env import DataConfig, EnvConfig, RoleConfig, Seed
from jaxagent.config.errors import Removed
from jaxagent.config.fleet import FleetConfig
from jaxagent.config.model import BatchConfig, EngineConfig, MeshConfig, ModelConfig, OptimizerConfig, TokenizerConfig
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
from jaxagent.config.stages import (
    DPOConfig,
    OutcomeModelConfig,
    RFTConfig,
    SampleConfig,
    SFTConfig,
    WarmStartConfig,
)

# What `Config.stages` can name; loop.py says how each is done.
Stage = Literal["warm_start", "sample", "sft", "rft", "dpo", "outcome_model", "opd", "rl"]
Tracker = Literal["wandb", "mlflow", "trackio", "tensorboard", "none"]
STAGE_SECTIONS = ("warm_start", "sample", "sft", "rft", "dpo", "outcome_model", "opd")  # "rl" is a section of every run
ADVANTAGES = Choice("jaxagent.algorithms.estimators:ADVANTAGES")
OBJECTIVES = Choice("jaxagent.algorithms.objectives:OBJECTIVES")
CORRECTIONS = Choice("jaxagent.algorithms.corrections:CORRECTIONS")
AGGREGATIONS = Choice("jaxagent.algorithms.aggregate:AGGREGATIONS")
DENOMINATORS = Choice("jaxagent.algorithms.echo:DENOMINATORS")
TEACHERS = Choice("jaxagent.algorithms.teachers:TEACHERS", otherwise="folder:path")
TEACHER_LOSSES = Choice("jaxagent.algorithms.teachers:LOSSES")
CURRICULA = Choice("jaxagent.data.curriculum:CURRICULA")
GROUP_REWARDS = Choice("jaxagent.algorithms.group_rewards:GROUP_REWARDS")
BRANCHINGS = Choice("jaxagent.algorithms.branching:BRANCHINGS")


# Below it sampling is greedy: logits divided by less lie further apart than f32 can tell, and their differences are
# rounding errors of many nats.
LEAST_TEMPERATURE = 1e-6


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """The distribution that is sampled. Log-probs are always of this distribution.

    Only requests truncate it: the policy and the roles of a config draw from the whole vocabulary, which the trainer
    scores.
    """

    temperature: NonNegativeFloat  # 0 = greedy
    top_p: float = dataclasses.field(default=1.0, metadata={"config": False})  # 1 = off
    top_k: int = dataclasses.field(default=0, metadata={"config": False})  # 0 = off
    min_p: float = dataclasses.field(default=0.0, metadata={"config": False})  # 0 = off

    removed: ClassVar = {
        name: Removed("every token of the vocabulary can be drawn, because the trainer scores them all", off)
        for name, off in {"top_p": 1.0, "top_k": 0, "min_p": 0.0}.items()
    }

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without chance."""
        return self.temperature < LEAST_TEMPERATURE


@dataclasses.dataclass(frozen=True)
class KLConfig:
    """KL to a reference policy."""

    coefficient: PositiveFloat = 0.04  # DeepSeekMath, arXiv 2402.03300, section 4.2
    estimator: Literal["k1", "k2", "k3", "k3+", "abs"] = "k3"  # of algorithms/policy_loss.py
    # advantage: token by token, after baselines. objective: the objective itself compares with the reference.
    where: Literal["loss", "reward", "advantage", "objective"] = "loss"
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
    """Dynamic sampling: rounds of new tasks until enough groups have signal. See rollout/groups.py."""

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

    per_step: PositiveInt  # attempts replayed per step at most; turns, where these are chosen one by one
    turns: bool = False  # whether a turn is chosen by its own probability, and not the attempt by that of all its turns
    times: NonNegativeFloat = 0.0  # replayed at most, in multiples of what the step has sampled; 0 = no such bound
    capacity: PositiveInt = 512  # attempts kept
    # policy: with rl.correction, and advantages from groups. reference: with an objective that reads the reference.
    use: Literal["nll", "policy", "reference"] = "nll"
    coefficient: PositiveFloat = 0.1
    min_reward: FiniteFloat = 1.0  # from which an attempt is a success
    low: ZeroToOne = 0.5  # exclusive bound of exp(mean log-prob per token); WebRL, arXiv 2411.02337
    high: ZeroToOne = 0.95  # inclusive bound; WebRL


@dataclasses.dataclass(frozen=True)
class PhasesConfig:
    """Failed tasks of a phase beget tasks of the next one. See rollout/phases.py."""

    steps: PositiveInt  # RL steps of a phase
    tasks: PositiveInt = 500  # new tasks of a phase at most
    success_reward: FiniteFloat = 1.0  # from which an attempt has not failed
    low: ZeroToOne = 0.05  # of the values of tasks that are kept; WebRL, arXiv 2411.02337
    high: ZeroToOne = 0.75  # WebRL


@dataclasses.dataclass(frozen=True)
class TemperatureConfig:
    """How the sampling temperature goes on from rl.sampling.temperature, step by step. Evaluation keeps that one."""

    final: Annotated[float, at_least(LEAST_TEMPERATURE)]  # in the last step
    schedule: Literal["linear", "cosine"] = "linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How tokens find their experts while a mixture is trained."""

    # Whether updates send a token to the experts to which the engine sent it; auto: where numerics are fast.
    replay: Literal["auto", "always", "never"] = "auto"
    balance_loss: NonNegativeFloat = 0.0  # coefficient, on the load of experts; 0 = none
    bias_rate: NonNegativeFloat = 0.0  # per update, of biases that choose experts, towards even loads; 0 = fixed


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """The reinforcement-learning stage. `algorithms/checks.py` says which choices go together."""

    steps: NonNegativeInt  # each plays groups of attempts and trains on them
    tasks_per_step: PositiveInt  # groups
    group_size: PositiveInt  # attempts at one task
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
    phases: PhasesConfig | None = None  # None: the tasks of the data alone
    replay: ReplayConfig | None = None
    branching: Annotated[Any, BRANCHINGS] | None = None  # which attempts go on from turns of others; None: none
    routing: RoutingConfig | None = None  # of a mixture of experts; None: as by default, `routes`

    @property
    def routes(self) -> RoutingConfig:
        """The section `routing`, by default where there is none."""
        return self.routing or RoutingConfig()

    @property
    def critic(self) -> Any:
        """The `estimators.CriticConfig` of an advantage that reads values; None where it reads none."""
        return getattr(self.advantage, "critic", None)

    def kl_in(self, where: str) -> KLConfig | None:
        """The KL section where it is "loss", "reward", "advantage" or "objective" that it is in; else None."""
        return self.kl if self.kl is not None and self.kl.where == where else None

    @property
    def reads_old(self) -> bool:
        """Whether the learner scores the samples before its first update, since a choice reads those log-probs."""
        return any(getattr(choice, "reads_old", False) for choice in (self.advantage, self.correction))

    @property
    def rescores(self) -> bool:
        """Whether stale tokens are scored again at some steps, under the version that sampled them."""
        return self.staleness > 0 and self.rescore_every > 0


@dataclasses.dataclass(frozen=True)
class OPDConfig:
    """The stage "opd", on-policy distillation: `rl` with a teacher in place of its reward."""

    steps: NonNegativeInt
    learning_rate: PositiveFloat  # in place of rl.optimizer.learning_rate: exact divergences bear more than rewards
    distill: DistillConfig | None = None  # the stage's teacher, in place of rl.distill


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation."""

    every: NonNegativeInt  # RL steps; 0 = only before and after
    sampled: bool  # also with rl.sampling, beside greedy


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Bundles of state, optimiser, task position, RNG, config and metrics position."""

    every: NonNegativeInt  # steps; 0 = only at stage ends, on SIGTERM and on Ctrl-C
    keep: PositiveInt
    # Which RL steps jaxagent.replay can make again: all (RL's first bundle and every step's episodes are kept), those
    # that kept bundles reach, or none.
    replay: Literal["all", "newest", "none"] = "newest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodesConfig:
    """Which episodes a run keeps whole, token by token. Those that stages learn from are kept in any case."""

    keep: Literal["all", "newest", "sampled", "none"] = "all"
    megabytes: PositiveInt = 1000  # with "newest": of each log, before its oldest part goes
    fraction: ZeroToOne = 0.1  # with "sampled": of groups; those with a failed attempt are kept in any case
    learn: bool = False  # stages that learn from data learn from RL's episodes, too


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """What a run takes that goes on from a bundle."""

    # With exact numerics, whether a machine whose programs round otherwise is refused, or its bits are taken and told.
    numerics: Literal["same", "accept"] = "same"

    off: ClassVar = {"numerics": "same"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The whole truth of one run. The sections of stages that it does not have are None."""

    workdir: str  # everything that the run writes; the same command goes on with it
    seed: Seed  # of the whole run
    numerics: Literal["exact", "fast"]  # exact: the trainer's log-probs are the engine's, bit for bit
    mesh: MeshConfig
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    env: Annotated[EnvConfig, Choice("jaxagent.envs:ENVIRONMENTS")]  # what the policy acts in
    engine: EngineConfig
    # Who speaks in an episode beside the policy, by the names that the environment knows: see docs/roles.md.
    roles: Mapping[str, Annotated[RoleConfig, Choice("jaxagent.roles:ROLES")]] = dataclasses.field(default_factory=dict)
    stages: tuple[Stage, ...]  # what a run does, in order, each at most once
    warm_start: WarmStartConfig | None = None
    sample: SampleConfig | None = None
    sft: SFTConfig | None = None
    rft: RFTConfig | None = None
    dpo: DPOConfig | None = None
    outcome_model: OutcomeModelConfig | None = None
    opd: OPDConfig | None = None
    rl: RLConfig
    fleet: FleetConfig | None = None  # many processes; None: one, in which rollouts and updates take turns
    eval: EvalConfig
    checkpoint: CheckpointConfig
    resume: ResumeConfig | None = None
    episodes: EpisodesConfig | None = None  # None: all are kept, and stages learn from none of RL's
    track: tuple[Tracker, ...] | None = None  # who is told of the run beside metrics.jsonl; None: tensorboard

    moved: ClassVar = {"log_episodes": "episodes.learn"}

    @property
    def kept_episodes(self) -> EpisodesConfig:
        """The section `episodes`, by default where there is none."""
        return self.episodes or EpisodesConfig()

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `track`, each once; TensorBoard's where it is left open."""
        chosen = ("tensorboard",) if self.track is None else self.track
        return tuple(name for name in dict.fromkeys(chosen) if name != "none")

    @property
    def takes_other_rounding(self) -> bool:
        """Whether a machine whose programs round otherwise goes on with an exact run."""
        return self.resume is not None and self.resume.numerics == "accept"

    def for_platform(self, platform: str) -> Config:
        """With sizes of the engine that suit `platform` ("cpu", "gpu", "tpu") where they are 0."""
        shards = self.mesh.devices // self.mesh.tensor
        engine = self.engine.for_platform(platform, shards)
        return dataclasses.replace(self, engine=engine)

    @property
    def concurrent_episodes(self) -> int:
        """Episodes that are played at once."""
        return self.env.concurrent_episodes or self.engine.slots
