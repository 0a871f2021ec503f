"""Sections of the optimiser and of batches, which every stage that trains has."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from jaxagent.config.errors import Removed
from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, between


@dataclasses.dataclass(frozen=True)
class RateConfig:
    """A learning rate and how it goes on. All else of the warm start's AdamW is `rl.optimizer`'s."""

    learning_rate: NonNegativeFloat  # the highest of the schedule
    schedule: Literal["constant", "cosine", "linear", "wsd"]  # wsd: constant, linear over the last fifth
    warmup_steps: NonNegativeInt

    removed: ClassVar = {
        name: Removed(f"it is rl.optimizer.{name}", like=f"rl.optimizer.{name}")
        for name in ("b2", "weight_decay", "grad_clip")
    } | {"b1": Removed("it is 0.9", 0.9), "eps": Removed("it is 1e-8", 1e-8)}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(RateConfig):
    """AdamW on f32 masters, with b1 = 0.9 and eps = 1e-8 (`learner/update.py`)."""

    b2: Annotated[float, between(0, 1, without="high")]
    weight_decay: NonNegativeFloat
    grad_clip: NonNegativeFloat  # of the global norm; 0 = off

    removed: ClassVar = {
        "b1": Removed("it is 0.9, as in every published recipe", 0.9),
        "eps": Removed("it is 1e-8, as in every published recipe", 1e-8),
    }


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """How sequences become packed rows."""

    row_tokens: PositiveInt  # T: tokens of one packed row
    micro_rows: PositiveInt  # rows per micro-batch over all devices
    share_prefix: bool  # what sequences of an update begin with alike is computed once per row

    removed: ClassVar = {
        "targets_multiple": Removed("it is rl.batch.targets_multiple", like="rl.batch.targets_multiple")
    }


@dataclasses.dataclass(frozen=True)
class BatchConfig(RowsConfig):
    """How trajectories become device arrays."""

    targets_multiple: PositiveInt  # log-prob positions per row are padded to a multiple of this

    removed: ClassVar = {}


def completed(part: RateConfig | RowsConfig, full: Any) -> Any:
    """A section of the class of `full`, with the fields of `part` and all else as `full` has it."""
    return type(full)(**dataclasses.asdict(full) | dataclasses.asdict(part))
