"""Sections of the stages beside RL. A run has those of the stages that it names."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

from jaxagent.config.model import RateConfig, RowsConfig
from jaxagent.config.ranges import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ZeroToOne,
    between,
)


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """First steps of the warm start: one short passage, loss on observation tokens too."""

    steps: PositiveInt
    sequences: PositiveInt = 42  # demonstrations per update

    off: ClassVar = {"steps": 0}


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised warm start on demonstrations, ended by accuracy per relation, not by a fixed count."""

    demonstrations: str  # full.jsonl, or a folder with it and curriculum.jsonl; "" = the dataset's own
    max_steps: NonNegativeInt
    batch_sequences: PositiveInt  # demonstrations per update
    optimizer: RateConfig
    batch: RowsConfig
    gate_every: PositiveInt  # steps between two looks at the gate
    gate_family: str  # of kinds: "one_hop" looks at "one_hop/capital", "one_hop/currency", ...
    gate_accuracy: ZeroToOne  # greedy score on training tasks that every kind of the family must reach
    gate_questions: PositiveInt  # tasks per kind
    curriculum: CurriculumConfig | None = None

    moved: ClassVar = {"curriculum_steps": "curriculum.steps", "curriculum_sequences": "curriculum.sequences"}

    @property
    def curriculum_steps(self) -> int:
        """Steps of the curriculum; 0 without one."""
        return self.curriculum.steps if self.curriculum else 0


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Attempts of the current policy at training tasks, logged without training, with rl.sampling."""

    steps: NonNegativeInt
    tasks_per_step: PositiveInt  # of the shuffled training tasks; none comes twice before each came once
    attempts: PositiveInt  # at each of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """What every stage that learns from data has; its batches are `rl.batch`'s."""

    updates: PositiveInt
    examples: PositiveInt  # episodes, demonstrations or pairs per update
    learning_rate: PositiveFloat  # in place of rl.optimizer.learning_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig(OfflineConfig):
    """Supervised fine-tuning on demonstrations, with demonstrations of not using the tool among them."""

    demonstrations: str  # jsonl, as the warm start's; "" = the dataset's full.jsonl
    negatives: str  # jsonl of the same form; "" = none
    negative_frac: Annotated[float, between(0, 1, without="high")]  # of the examples of an update
    aggregation: Literal["token_mean", "sequence_mean"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RFTConfig(OfflineConfig):
    """Rejection-sampling fine-tuning: imitate one's own distinct successes."""

    episodes: str  # file or folder of logged episodes; "" = this run's own
    min_reward: FiniteFloat  # from which an attempt is a success
    per_task: PositiveInt  # successes of one task, at most
    aggregation: Literal["token_mean", "sequence_mean"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig(OfflineConfig):
    """Direct preference optimisation on the best and worst attempts at a task."""

    episodes: str  # as rft.episodes
    pairs_per_task: PositiveInt
    min_gap: NonNegativeFloat  # least difference of a pair's rewards; equal rewards never make one
    beta: PositiveFloat
    length_normalised: bool  # per action token instead of summed
    nll_coefficient: NonNegativeFloat  # of the chosen attempt's NLL per action token; 0 = off


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutcomeModelConfig(OfflineConfig):
    """A model of an episode's outcome: the policy's weights with a scalar head, trained on logged episodes."""

    episodes: str  # as rft.episodes
    loss: Literal["binary", "bradley_terry"]
    min_reward: FiniteFloat  # from which an attempt is a success
    held_out_frac: Annotated[float, between(0, 1, without="both")]  # of the tasks: they measure accuracy and AUC
