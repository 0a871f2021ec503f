"""Rows in which sequences that begin alike share their beginning: a tree per row, depth first.

In: the sequences of one update, as `batching.Packer` cuts them. Out: rows as `batching` packs them without sharing, but
a token that several sequences have in common is stored once. In depth-first order all tokens that may see a token
follow it directly, so one number per token is enough: the column behind its last descendant (`Batch.ends`).
A query at column q sees the key at column k if k <= q < ends[k]. Targets are never shared: each sequence has its own,
several may be predicted at one column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import chex
import numpy as np

Element = dict[str, np.ndarray]  # one sequence: "tokens" [n], and per target "head_positions", "targets", ... [r]


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How a packer shares the beginnings of sequences. It is part of the shapes of its batches."""

    multiple: int  # beginnings are shared in multiples of so many tokens; 1 shares all of them
    longest: int  # tokens of the longest sequence; where an update holds a longer one, this doubles for it


@dataclasses.dataclass
class _Row:
    """The sequences of a row while it is filled, by their index in sorted order."""

    members: list[int]
    tokens: int
    targets: int
    common: int  # tokens that the sequence now looked at has in common with the row's last member


def shared_rows(elements: Sequence[Element], row_tokens: int, row_targets: int, multiple: int) -> list[Element]:
    """Packs sequences into rows, each where it adds the fewest tokens.

    Args:
      elements: sequences that fit a row, at least one.
      row_tokens, row_targets: what a row holds.
      multiple: of `Sharing`.

    Returns:
      Rows of arrays [row_tokens] ("tokens", "positions", "segments", "ends") and [row_targets] (all others).
    """
    # As big-endian bytes tokens sort like lists of numbers. Sorted, a sequence has most in common with the one before.
    elements = sorted(elements, key=lambda element: element["tokens"].astype(">u4").tobytes())
    rows: list[_Row] = []
    for i, element in enumerate(elements):
        common = common_prefix(elements[i - 1]["tokens"], element["tokens"]) // multiple * multiple if i else 0
        for row in rows:
            row.common = min(row.common, common)
        length, targets = len(element["tokens"]), len(element["targets"])
        fitting = [
            row for row in rows
            if row.tokens + length - row.common <= row_tokens and row.targets + targets <= row_targets
        ]  # fmt: skip
        if fitting:
            row = max(fitting, key=lambda row: row.common)  # the first of several
        else:
            rows.append(row := _Row([], 0, 0, 0))
        row.members.append(i)
        row.tokens += length - row.common
        row.targets += targets
        row.common = length
    return [_lay_out([elements[i] for i in row.members], row_tokens, row_targets, multiple) for row in rows]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    chex.assert_rank([a, b], 1)
    chex.assert_type([a, b], int)
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _lay_out(members: list[Element], row_tokens: int, row_targets: int, multiple: int) -> Element:
    """One row of members in sorted order."""
    tokens, positions, segments = np.zeros((3, row_tokens), np.int32)
    ends = np.full(row_tokens, row_tokens, np.int32)  # padding sees padding
    used, tree = 0, 0
    path = np.zeros(0, np.int64)  # the columns of the last member's tokens
    targets = []
    for before, member in zip([None, *members], members, strict=False):
        own = member["tokens"]
        common = 0 if before is None else common_prefix(before["tokens"], own) // multiple * multiple
        ends[path[common:]] = used  # nothing that follows may see them
        new = np.arange(used, used + len(own) - common)
        tree += common == 0
        tokens[new], positions[new], segments[new] = own[common:], np.arange(common, len(own)), tree
        path, used = np.concatenate([path[:common], new]), used + len(new)
        targets.append(member | {"head_positions": path[member["head_positions"]]})
    ends[path] = used
    columns = {name: padded(np.concatenate([m[name] for m in targets]), row_targets, -1 if name == "sequence" else 0)
              for name in targets[0] if name != "tokens"}  # fmt: skip
    return columns | {"tokens": tokens, "positions": positions, "segments": segments, "ends": ends}


def padded(values: np.ndarray, width: int, padding: int) -> np.ndarray:
    """The values, and `padding` up to a width."""
    out = np.full(width, padding, values.dtype)
    out[: len(values)] = values
    return out
