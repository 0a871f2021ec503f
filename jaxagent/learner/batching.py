"""Packing: sequences of one optimiser update -> micro-batches of static shape.

In: `Streams` (ragged, NumPy). Out: `Batch`es of [micro_rows, row_tokens] with [micro_rows, row_targets] targets.
Several short sequences share a row under different segment ids (grain's first-fit packing, over two capacities at
once: tokens and targets); rows and targets that are missing are padding of weight 0, so shapes never change.
A row holds the tokens a target is predicted FROM: everything behind a sequence's last target is cut off.

With `batch.share_prefix` sequences of a row store their common beginning once: a row is a tree, depth first, so all
tokens that may see a token follow it directly, and one number per token is enough, the column behind its last
descendant (`Batch.ends`). A query at column q sees the key at column k if k <= q < ends[k]. Targets are never shared:
each sequence has its own, and several may be predicted at one column.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import chex
import grain
import numpy as np
from grain import experimental as grain_experimental

from jaxagent.algorithms.streams import Streams
from jaxagent.config import BatchConfig, ConfigError
from jaxagent.learner.state import FLOATS, PER_TARGET, STREAMS, Batch


class Packer:
    """Packs the sequences of optimiser updates into rows of one shape.

    `row_targets` (R) is fixed when the packer is made, so that a run compiles once. A sequence with more targets than
    that is still trained: R doubles for the update that holds it (and a new shape compiles).
    """

    def __init__(
        self,
        config: BatchConfig,
        longest_targets: int,
        row_shards: int = 1,
        sharing: Sharing | None = None,
        context: int = 1,
        reads: Sequence[str] = (),
        experts: np.ndarray | None = None,
    ):
        """Fixes the shapes. Raises ConfigError for rows that cannot be split evenly, or sizes that are not positive.

        Args:
          config: row length, rows per micro-batch, multiple of R.
          longest_targets: most targets one sequence can have (from the config's turn limits). Where nearly every token
            is a target (ECHO, SFT on observations) give `row_tokens`, or targets run out before a row is full.
          row_shards: devices over which rows are split (`MeshConfig.row_shards`).
          sharing: the common beginning of sequences is stored once per row; None = every sequence is stored whole.
          context: devices over which the targets of a row are split, and its tokens (models/context.py).
          reads: what of `policy_loss.READABLE` the objective wants beside the streams.
          experts: those of one token that nobody recorded, where updates replay recorded ones; None: they replay none.
        """
        if config.row_tokens < 1 or config.micro_rows < 1 or config.targets_multiple < 1:
            raise ConfigError("batch.row_tokens, micro_rows and targets_multiple must be at least 1.")
        if config.micro_rows % row_shards:
            raise ConfigError(
                f"batch.micro_rows ({config.micro_rows}) must be a multiple of mesh.data x fsdp x expert "
                f"({row_shards})."
            )
        self.row_tokens = config.row_tokens
        self.micro_rows = config.micro_rows
        self.sharing, self.reads, self.experts = sharing, reads, experts
        # A quarter of the row, so that several short sequences fit beside each other before targets run out; more where
        # the prompts that fill most of a row stand there once.
        least_targets = max(longest_targets, 3 * config.row_tokens // 4 if sharing else config.row_tokens // 4)
        multiple = math.lcm(config.targets_multiple, context)
        self.row_targets = min(-(-least_targets // multiple) * multiple, config.row_tokens)

    def pack(self, streams: Sequence[Streams], step: int = 0) -> list[Batch]:
        """Micro-batches of one optimiser update of an RL step.

        Sequences without any weight are left out. Order: longest first (first-fit decreasing); the loss is a sum, so
        order has no meaning beyond rounding. `Batch.sequence` indexes `streams`.

        Raises:
          ConfigError: a sequence that needs more than `row_tokens` tokens.
          ValueError: a target at position 0, which nothing predicts.
        """
        elements = [element for i, s in enumerate(streams) if (element := self._element(i, s, step)) is not None]
        if not elements:
            return []
        elements.sort(key=lambda element: -len(element["tokens"]))
        row_targets = self.row_targets
        while row_targets < max(len(element["targets"]) for element in elements):
            row_targets = min(2 * row_targets, self.row_tokens)
        longest = self.sharing.longest if self.sharing else 0
        if self.sharing:
            rows = shared_rows(elements, self.row_tokens, row_targets, self.sharing.multiple)
            while longest < max(len(element["tokens"]) for element in elements):
                longest *= 2
        else:
            rows = list(_pack_rows(elements, self.row_tokens, row_targets))
        return [
            self._stack(rows[start : start + self.micro_rows], row_targets, longest)
            for start in range(0, len(rows), self.micro_rows)
        ]

    def empty(self) -> Batch:
        """A micro-batch of padding only: what `warm_up` compiles with."""
        return self._stack([], self.row_targets, self.sharing.longest if self.sharing else 0)

    def _element(self, index: int, streams: Streams, step: int) -> dict[str, np.ndarray] | None:
        (at,) = np.nonzero(streams.targets)
        if not len(at):
            return None
        if at[0] == 0:
            raise ValueError(f"sequence {index}: the first token cannot be a target")
        length = int(at[-1])
        if length > self.row_tokens:
            raise ConfigError(
                f"A trajectory needs {length} tokens of one packed row, batch.row_tokens is {self.row_tokens}."
            )
        trajectory = streams.trajectory
        versions = trajectory.policy_versions[at]
        facts = {"rewards": np.full(len(at), streams.reward), "ages": np.where(versions < 0, 0, step - versions)}
        facts["turns"] = trajectory.turns[at]
        facts = {name: facts[name] for name in self.reads}
        if self.experts is not None:
            recorded = trajectory.experts
            facts["experts"] = np.tile(self.experts, (length, 1)) if recorded is None else recorded[:length]
        return (
            facts
            | {
                "tokens": np.asarray(trajectory.tokens[:length], np.int32),
                "head_positions": (at - 1).astype(np.int32),
                "targets": np.asarray(trajectory.tokens[at], np.int32),
                "sequence": np.full(len(at), index, np.int32),
                "offset": at.astype(np.int32),
                "behaviour_logprobs": np.asarray(trajectory.logprobs[at], np.float32),
            }
            | {name: getattr(streams, name)[at] for name in STREAMS}
        )

    def _stack(self, rows: list[dict[str, np.ndarray]], row_targets: int, longest: int) -> Batch:
        paddings: dict[str, Any] = dict.fromkeys((*PER_TARGET, *self.reads, "tokens", "positions", "segments"), 0)
        paddings |= {"sequence": -1} | ({"ends": 0} if self.sharing else {})
        paddings |= {} if self.experts is None else {"experts": self.experts[0]}

        def stack(name: str) -> np.ndarray:
            dtype = np.float32 if name in (*FLOATS, *self.reads) else np.int32
            padding = np.asarray(paddings[name], None if name == "experts" else dtype)
            width = row_targets if name in (*PER_TARGET, *self.reads) else self.row_tokens
            out = np.tile(padding, (self.micro_rows, width, *[1] * padding.ndim))
            for place, row in zip(out, rows, strict=False):
                place[: len(row[name])] = row[name]
            return out

        return Batch(**{name: stack(name) for name in paddings}, longest=longest)


def unpack(batches: Sequence[Batch], values: Sequence[np.ndarray], streams: Sequence[Streams]) -> list[np.ndarray]:
    """Scatters values [B, R, ...] of each of the batches that `Packer.pack(streams)` gave back to its sequences.

    [T, ...] per sequence, 0 where the token was no target.
    """
    shape, dtype = (values[0].shape[2:], values[0].dtype) if len(values) else ((), np.float32)
    out = [np.zeros((len(s.trajectory), *shape), dtype) for s in streams]
    for batch, value in zip(batches, values, strict=True):
        chex.assert_equal_shape_prefix([value, batch.sequence], 2)
        real = batch.sequence >= 0
        for i, offset, v in zip(batch.sequence[real], batch.offset[real], np.asarray(value)[real], strict=True):
            out[i][offset] = v
    return out


def _pack_rows(elements: list[dict[str, np.ndarray]], row_tokens: int, row_targets: int):
    """Rows of whole sequences: yields dicts of arrays, of which those per target end with the last sequence's."""
    # grain lays out tokens and says which sequences a row has: of a dozen columns each would cost it as much again.
    slim = [{"tokens": e["tokens"], "member": np.full(len(e["targets"]), i)} for i, e in enumerate(elements)]
    source = grain.MapDataset.source(slim).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # everything is in memory already
    )
    packed = grain_experimental.FirstFitPackIterDataset(
        source,
        length_struct={"tokens": row_tokens, "member": row_targets},
        num_packing_bins=len(elements),
        shuffle_bins=False,
    )
    for row in packed:
        places = row["member"][row["member_segment_ids"] > 0]
        members = [elements[i] for i in dict.fromkeys(places.tolist())]  # in their order in the row
        starts = np.cumsum([0, *(len(member["tokens"]) for member in members)])
        # A sequence's targets are predicted where its tokens lie in the row.
        moved = [m | {"head_positions": m["head_positions"] + at} for m, at in zip(members, starts, strict=False)]
        laid_out = row["tokens"], row["tokens_positions"], row["tokens_segment_ids"]
        yield _joined(moved) | dict(zip(("tokens", "positions", "segments"), laid_out, strict=True))


# One sequence: "tokens" [n], "experts" [n, W] where they are replayed, and per target "head_positions", ... [r].
Element = dict[str, np.ndarray]


def _joined(members: Sequence[Element]) -> Element:
    """What the members have, one behind the other."""
    return {name: np.concatenate([member[name] for member in members]) for name in members[0]}


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
    """Packs sequences that fit a row into rows, each where it adds the fewest tokens; `multiple` is of `Sharing`.

    Arrays of a row are [row_tokens] ("tokens", "positions", "segments", "ends"), or as long as the members' together.
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
    return [_lay_out([elements[i] for i in row.members], row_tokens, multiple) for row in rows]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    chex.assert_rank([a, b], 1)
    chex.assert_type([a, b], int)
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _lay_out(members: list[Element], row_tokens: int, multiple: int) -> Element:
    """One row of members in sorted order. Of tokens that several share, the first one's experts count.

    The engine has computed these once, too, and its prefix tree has given them to all.
    """
    tokens, positions, segments = np.zeros((3, row_tokens), np.int32)
    ends = np.full(row_tokens, row_tokens, np.int32)  # padding sees padding
    length, tree = 0, 0
    path = np.zeros(0, np.int64)  # the columns of the last member's tokens
    moved = []
    for before, member in zip([None, *members], members, strict=False):
        own = member["tokens"]
        common = 0 if before is None else common_prefix(before["tokens"], own) // multiple * multiple
        ends[path[common:]] = length  # nothing that follows may see them
        new = np.arange(length, length + len(own) - common)
        tree += common == 0
        tokens[new], positions[new], segments[new] = own[common:], np.arange(common, len(own)), tree
        path, length = np.concatenate([path[:common], new]), length + len(new)
        own_experts = {name: member[name][common:] for name in ("experts",) if name in member}
        moved.append(member | own_experts | {"head_positions": path[member["head_positions"]]})
    ends[path] = length
    return _joined(moved) | {"tokens": tokens, "positions": positions, "segments": segments, "ends": ends}
