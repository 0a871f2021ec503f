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


def lay_out(
    spans: Sequence[Span], shards: int, slots_per_shard: int, tiles: int, tile_rows: int, share: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """One call for all spans: each shard's rows one after another, in the order of the spans.

    Args:
      spans: at most tiles * tile_rows tokens per shard, each counted up to whole `share`s.
      shards: over which slots are split, in order.
      slots_per_shard: S / shards.
      tiles: n.
      tile_rows: N / shards, a multiple of `share`.
      share: rows in a row that belong to one sequence.

    Returns:
      tokens and positions i32[n,N]; i32[n,N / share] the slots, in the shard of the rows that share one, -1 for
      padding; and how many tiles hold rows.
    """
    shape = (shards, tiles * tile_rows)
    tokens, positions, slot = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    filled = [0] * shards
    for span in spans:
        shard, local = divmod(span.slot, slots_per_shard)
        count = len(span.tokens)
        own = np.minimum(np.arange(padded(count, share)), count - 1)  # what fills up repeats the last row
        at = slice(filled[shard], filled[shard] + len(own))
        tokens[shard, at] = span.tokens[own]
        positions[shard, at] = span.start + own
        slot[shard, at] = local
        filled[shard] = at.stop
    rows = (tokens, positions, slot[:, ::share])
    tokens, positions, slot = (x.reshape(shards, tiles, -1).swapaxes(0, 1).reshape(tiles, -1) for x in rows)
    return tokens, positions, slot, -(-max(filled) // tile_rows)


def padded(count: int, multiple: int) -> int:
    """The next whole multiple."""
    return -(-count // multiple) * multiple


def choose_lanes(
    active: np.ndarray, lengths: np.ndarray, shards: int, tile_sizes: Sequence[int]
) -> tuple[np.ndarray, int]:
    """Which slots are decoded together: the longest sequences side by side, so that few rows wait for one.

    Args:
      active: bool[S].
      lengths: [S] of the slots' sequences.
      shards: over which slots are split, in order.
      tile_sizes: rows of a shard's tile, ascending; the last divides S / shards.

    Returns:
      lanes i32[n, shards * rows], slots counted in their shard, each at most once: one tile of the smallest size that
      holds all active ones, or as many of the largest as there are slots; and how many of the tiles hold active ones.
    """
    active, lengths = active.reshape(shards, -1), lengths.reshape(shards, -1)
    most = int(active.sum(axis=1).max())
    rows = next((size for size in tile_sizes if size >= most), tile_sizes[-1])
    order = np.argsort(np.where(active, -lengths.astype(np.int64), 1), axis=1, kind="stable").astype(np.int32)
    count = 1 if rows < tile_sizes[-1] else order.shape[1] // rows
    lanes = order[:, : count * rows].reshape(shards, count, rows).swapaxes(0, 1).reshape(count, shards * rows)
    return lanes, -(-most // rows)
