"""Cutting waiting prefills into calls of fixed shapes: nothing here knows a device, everything is NumPy.

Spans (tokens to cache, where they start, which slots want them) -> rounds of `PrefillCall`s whose shapes are all in
the table of buckets. A span longer than the largest bucket is prefilled in chunks, one per round, since a chunk attends
to those before it. Within a round spans of similar length share a call.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens that several slots (a group with one prompt) or one slot (a continued turn) need in their cache."""

    tokens: np.ndarray  # i32[n], n >= 1
    start: int  # index of tokens[0] in the sequence; what stands before is cached in slots[0]
    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    """Arguments of one `prefill` and of the `insert`s of its result."""

    tokens: np.ndarray  # i32[b,C]
    start: np.ndarray  # i32[b]
    slot: np.ndarray  # i32[b] where the earlier tokens are cached
    fresh: bool  # every start is 0
    inserts: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]  # (row, slot, start), i32[b] each
    used_tokens: int  # tokens that are not padding


def plan(
    spans: Sequence[Span], lengths: Sequence[int], rows: Sequence[int], no_slot: int
) -> Iterator[list[PrefillCall]]:
    """Yields rounds of calls; a round must be inserted before the next is computed.

    Args:
      spans: what to cache, in any order; their slots are all different.
      lengths: the buckets of C, ascending.
      rows: the buckets of b, ascending.
      no_slot: slot number that `insert` drops (S), for padding.
    """
    done = 0
    while todo := [s for s in spans if len(s.tokens) > done]:
        buckets: dict[tuple[int, bool], list[Span]] = {}
        for span in todo:
            chunk = Span(span.tokens[done : done + lengths[-1]], span.start + done, span.slots)
            bucket = lengths[bisect.bisect_left(lengths, len(chunk.tokens))]
            buckets.setdefault((bucket, chunk.start == 0), []).append(chunk)
        calls = []
        for (length, fresh), chunks in sorted(buckets.items(), key=lambda item: item[0]):
            for part in _split(chunks, rows):
                calls.append(_call(part, length, fresh, next(r for r in rows if r >= len(part)), no_slot))
        yield calls
        done += lengths[-1]


def _split(chunks: list[Span], rows: Sequence[int]) -> Iterator[list[Span]]:
    """Parts of at most the largest row bucket; a part is padded only when it is smaller than the smallest bucket."""
    while chunks:
        size = next((r for r in reversed(rows) if r <= len(chunks)), len(chunks))
        yield chunks[:size]
        chunks = chunks[size:]


def _call(chunks: list[Span], length: int, fresh: bool, rows: int, no_slot: int) -> PrefillCall:
    tokens = np.zeros((rows, length), np.int32)
    start = np.zeros(rows, np.int32)
    slot = np.zeros(rows, np.int32)
    for r, chunk in enumerate(chunks):
        tokens[r, : len(chunk.tokens)] = chunk.tokens
        start[r] = chunk.start
        slot[r] = chunk.slots[0]
    row_of = np.array([r for r, chunk in enumerate(chunks) for _ in chunk.slots], np.int32)
    slot_of = np.array([s for chunk in chunks for s in chunk.slots], np.int32)
    inserts = []
    for i in range(0, len(row_of), rows):
        row, target = row_of[i : i + rows], slot_of[i : i + rows]
        padding = (0, rows - len(row))
        row, target = np.pad(row, padding), np.pad(target, padding, constant_values=no_slot)
        inserts.append((row, target, start[row]))
    return PrefillCall(tokens, start, slot, fresh, tuple(inserts), sum(len(c.tokens) for c in chunks))
