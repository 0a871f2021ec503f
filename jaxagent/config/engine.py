"""Sections of the engine and of what it samples."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Seconds, ZeroToOne, between


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
    """The distribution that is sampled. Log-probs are always of this distribution."""

    temperature: NonNegativeFloat  # 0 = greedy
    top_p: Annotated[float, between(0, 1, without="low")]  # 1 = off
    top_k: NonNegativeInt  # 0 = off
    min_p: ZeroToOne  # 0 = off

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without chance."""
        return self.temperature < LEAST_TEMPERATURE
