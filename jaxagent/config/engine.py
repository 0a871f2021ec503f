"""The section of the engine, and the sizes that suit a platform where a config leaves them open (0)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxagent.config.ranges import NonNegativeInt, PositiveInt, Seconds

_MOST_TILE_ROWS = 256  # of a GPU's
_SHARED_ROWS = 16  # tiles are whole multiples: so many rows of prefill may read the pages of one sequence together


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The generation engine. "0 = by platform": a run takes `suitable_sizes`, and its config.json says which."""

    slots: PositiveInt  # turns that generate at once
    steps_per_dispatch: NonNegativeInt  # K: tokens per slot between two looks of the host; 0 = by platform
    prefill_tokens: NonNegativeInt  # cached between two dispatches, at most: others generate on; 0 = by platform
    pages: PositiveInt  # of the key/value cache
    page_tokens: NonNegativeInt  # per page; part of the numerics: exact scoring goes page by page; 0 = by platform
    tile_rows: NonNegativeInt  # rows computed together; part of the numerics likewise; 0 = by platform
    kv_on_update: Literal["keep", "recompute"]  # what sessions in progress have cached when weights change
    cache_dtype: Literal["float32", "bfloat16"]
    request_timeout_s: Seconds
    # States of fixed size, where a model has recurrent blocks: one for each sequence in progress, the others for
    # prefixes that can be reused; None = two per slot.
    memories: PositiveInt | None = None
    stop_states: PositiveInt = 128  # of all stop strings in use at once; a string has about one per character

    @property
    def memory_count(self) -> int:
        """Memories of a model that keeps any."""
        return self.memories or 2 * self.slots

    def for_platform(self, platform: str, shards: int) -> EngineConfig:
        """With `suitable_sizes` where fields are 0; the mesh splits the slots over `shards`."""
        suitable = suitable_sizes(platform, -(-self.slots // shards))
        return dataclasses.replace(self, **{name: getattr(self, name) or size for name, size in suitable.items()})


def suitable_sizes(platform: str, slots: int) -> dict[str, int]:
    """What suits a platform, by field of `EngineConfig`.

    A GPU reads all weights and launches all kernels once per tile and step, so one tile holds all slots: up to 256,
    where products begin to take as long as reading their weights, and 128 at least, since prefill goes through the
    same tiles. A TPU's kernels want pages of 128 tokens.

    Args:
      platform: as jax calls it.
      slots: of one shard of the mesh.
    """
    if platform not in ("gpu", "cuda", "tpu"):
        return {"tile_rows": 64, "page_tokens": 64, "steps_per_dispatch": 4, "prefill_tokens": 4096}
    tile, pages = 128, 128 if platform == "tpu" else 64
    if platform != "tpu":
        tiles = -(-slots // _MOST_TILE_ROWS)
        tile = max(tile, -(-slots // (tiles * _SHARED_ROWS)) * _SHARED_ROWS)
    return {"tile_rows": tile, "page_tokens": pages, "steps_per_dispatch": 16, "prefill_tokens": 16_384}
