"""Sections of the engine and of what it samples."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from jaxagent.config.errors import Removed
from jaxagent.config.ranges import NonNegativeFloat, PositiveInt, Seconds


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The generation engine."""

    slots: PositiveInt  # turns that generate at once
    steps_per_dispatch: PositiveInt  # K: tokens per slot between two looks of the host
    prefill_tokens: PositiveInt  # cached between two dispatches, at most: long prompts do not stall those who generate
    pages: PositiveInt  # of the key/value cache
    page_tokens: PositiveInt  # per page; part of the numerics: the trainer's exact log-probs go page by page too
    tile_rows: PositiveInt  # rows computed together; part of the numerics likewise
    kv_on_update: Literal["keep", "recompute"]  # what sessions in progress have cached when weights change
    cache_dtype: Literal["float32", "bfloat16"]
    request_timeout_s: Seconds
    stop_states: PositiveInt = 128  # of all stop strings in use at once; a string has about one per character


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
