"""Laying the rows of waiting prefills out in tiles: nothing here knows a device, everything is NumPy.

Axis letters: n tiles, N rows of a tile over all shards; each shard has an equal part of every tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens of one sequence to be cached."""

    tokens: np.ndarray  # i32[m], m >= 1
    start: int  # index of tokens[0] in the sequence; what stands before is cached, or comes in an earlier span
    slot: int  # whose sequence, counted over all shards


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    """Arguments of one `functions.prefill`."""

    tokens: np.ndarray  # i32[n,N]
    positions: np.ndarray  # i32[n,N]
    slot: np.ndarray  # i32[n,N] in the row's shard; -1 = padding
    tiles: int  # that hold rows
    used_tokens: int  # rows that are not padding


def lay_out(spans: Sequence[Span], shards: int, slots_per_shard: int, tiles: int, tile_rows: int) -> PrefillCall:
    """One call for all spans: each shard's rows one after another, in the order of the spans.

    Args:
      spans: at most tiles * tile_rows tokens per shard.
      shards: over which slots are split, in order.
      slots_per_shard: S / shards.
      tiles: n.
      tile_rows: N / shards.
    """
    shape = (shards, tiles * tile_rows)
    tokens, positions, slot = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    filled = [0] * shards
    for span in spans:
        shard, local = divmod(span.slot, slots_per_shard)
        at = slice(filled[shard], filled[shard] + len(span.tokens))
        tokens[shard, at] = span.tokens
        positions[shard, at] = np.arange(span.start, span.start + len(span.tokens))
        slot[shard, at] = local
        filled[shard] = at.stop
    by_tile = [x.reshape(shards, tiles, tile_rows).swapaxes(0, 1).reshape(tiles, -1) for x in (tokens, positions, slot)]
    return PrefillCall(*by_tile, tiles=-(-max(filled) // tile_rows), used_tokens=sum(filled))
