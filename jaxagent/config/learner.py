"""Sections of the optimiser and of batches, which every stage that trains has."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, between


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW on f32 masters."""

    learning_rate: NonNegativeFloat
    schedule: Literal["constant", "cosine", "linear", "wsd"]  # wsd: constant, linear over the last fifth
    warmup_steps: NonNegativeInt
    b1: Annotated[float, between(0, 1, without="high")]
    b2: Annotated[float, between(0, 1, without="high")]
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    grad_clip: NonNegativeFloat  # of the global norm; 0 = off


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """How trajectories become device arrays."""

    row_tokens: PositiveInt  # T: tokens of one packed row
    micro_rows: PositiveInt  # rows per micro-batch over all devices
    targets_multiple: PositiveInt  # log-prob positions per row are padded to a multiple of this
    share_prefix: bool  # what sequences of an update begin with alike is computed once per row
