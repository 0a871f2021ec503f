"""The root of the schema: the whole truth of one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from jaxagent.config.choice import Choice
from jaxagent.config.data import DataConfig, Seed
from jaxagent.config.engine import EngineConfig
from jaxagent.config.env import EnvConfig
from jaxagent.config.fleet import FleetConfig
from jaxagent.config.model import MeshConfig, ModelConfig, TokenizerConfig
from jaxagent.config.ranges import NonNegativeInt, PositiveInt
from jaxagent.config.rl import RLConfig
from jaxagent.config.roles import RoleConfig
from jaxagent.config.stages import (
    DPOConfig,
    OPDConfig,
    OutcomeModelConfig,
    RFTConfig,
    SampleConfig,
    SFTConfig,
    WarmStartConfig,
)

# What `Config.stages` can name; loop.py says how each is done.
Stage = Literal["warm_start", "sample", "sft", "rft", "dpo", "outcome_model", "opd", "rl"]
STAGE_SECTIONS = ("warm_start", "sample", "sft", "rft", "dpo", "outcome_model", "opd")  # "rl" is a section of every run


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
    log_episodes: bool  # RL and greedy evaluation episodes too, token by token, to episodes/*.jsonl of the workdir

    @property
    def takes_other_rounding(self) -> bool:
        """Whether a machine whose programs round otherwise goes on with an exact run."""
        return self.resume is not None and self.resume.numerics == "accept"

    @property
    def concurrent_episodes(self) -> int:
        """Episodes that are played at once."""
        return self.env.concurrent_episodes or self.engine.slots
