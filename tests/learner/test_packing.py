"""Packing: nothing is lost, moved or doubled; shapes never change; mistakes are one clear line."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms.streams import Streams
from jaxagent.config import BatchConfig, ConfigError
from jaxagent.learner.batching import Packer, unpack
from jaxagent.types import TokenKind, Trajectory

STREAMS = ("advantages", "policy_weights", "ce_weights", "reference_logprobs", "old_values")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 12), share=st.sampled_from((0, 1, 3)))
def test_every_target_is_scored_once_where_its_own_sequence_predicts_it(make_trees, make_packer, seed, n, share):
    streams = make_trees(n, seed)
    batches = make_packer(share=share).pack(streams)
    seen = [np.zeros(len(s.trajectory), int) for s in streams]
    for batch in batches:
        for row in range(len(batch.tokens)):
            for r in np.flatnonzero(batch.sequence[row] >= 0):
                s = streams[batch.sequence[row, r]]
                at, head = batch.offset[row, r], batch.head_positions[row, r]
                seen[batch.sequence[row, r]][at] += 1
                assert batch.targets[row, r] == s.trajectory.tokens[at]
                assert batch.positions[row, head] == at - 1
                # What its place may see is the whole context of the target, in order, and nothing else.
                seen_by = _visible(batch, row, head)
                np.testing.assert_array_equal(batch.tokens[row, seen_by], s.trajectory.tokens[:at])
                np.testing.assert_array_equal(batch.positions[row, seen_by], np.arange(at))
                assert set(batch.segments[row, seen_by]) == {batch.segments[row, head]} != {0}
                for name in STREAMS:
                    assert getattr(batch, name)[row, r] == getattr(s, name)[at]
                assert batch.behaviour_logprobs[row, r] == s.trajectory.logprobs[at]
    for counts, s in zip(seen, streams, strict=True):
        np.testing.assert_array_equal(counts, s.targets.astype(int))


def _visible(batch, row, query):
    columns = np.arange(query + 1)
    if batch.ends is not None:
        return columns[query < batch.ends[row, : query + 1]]
    return columns[batch.segments[row, : query + 1] == batch.segments[row, query]]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 12))
def test_padding_weighs_nothing_and_values_find_their_way_back(make_streams, make_packer, seed, n):
    streams = make_streams(n, seed)
    batches = make_packer().pack(streams)
    for batch in batches:
        padding = batch.sequence < 0
        for name in ("policy_weights", "kl_weights", "entropy_weights", "ce_weights", "value_weights"):
            assert not getattr(batch, name)[padding].any()
        assert not batch.tokens[batch.segments == 0].any()
    back = unpack(batches, [batch.advantages for batch in batches], streams)
    for got, s in zip(back, streams, strict=True):
        np.testing.assert_array_equal(got, np.where(s.targets, s.advantages, 0))


def test_shapes_do_not_depend_on_the_data(make_streams, make_packer):
    packer = make_packer(longest_targets=20)
    shapes = {
        tuple(np.shape(leaf) for leaf in dataclasses.asdict(batch).values())
        for seed, n in ((0, 1), (1, 7), (2, 12))
        for batch in [*packer.pack(make_streams(n, seed)), packer.empty()]
    }
    assert len(shapes) == 1


def test_short_sequences_share_rows(make_streams, make_packer):
    (batch,) = make_packer(micro_rows=2, longest_targets=24).pack(make_streams(4, low=5, high=10))
    assert batch.segments.max() >= 2


def test_the_tail_behind_the_last_target_is_cut_and_sequences_without_weight_left_out(make_packer):
    kinds = np.array([0, 0, 1, 2, 2, 2], np.uint8)
    zeros = np.zeros(6, np.int32)
    trajectory = Trajectory(np.arange(1, 7, dtype=np.int32), kinds, zeros.astype(np.float32), zeros, zeros)
    packer = make_packer()
    (batch,) = packer.pack([Streams.of(trajectory), Streams.of(trajectory, policy_weights=kinds == TokenKind.ACTION)])
    assert (batch.segments > 0).sum() == 2 and batch.targets[0, 0] == 3 and batch.sequence[0, 0] == 1
    assert packer.pack([Streams.of(trajectory)]) == []


def test_more_targets_than_planned_are_still_trained(make_streams, make_packer):
    packer = make_packer(longest_targets=2)
    streams = make_streams(3, seed=1)
    assert max(s.targets.sum() for s in streams) > packer.row_targets
    assert sum((b.sequence >= 0).sum() for b in packer.pack(streams)) == sum(s.targets.sum() for s in streams)


def test_mistakes_are_told_in_one_line(make_streams, make_packer):
    with pytest.raises(ConfigError, match=r"batch\.row_tokens is 8"):
        make_packer(row_tokens=8).pack(make_streams(1, low=15, high=16))
    with pytest.raises(ConfigError, match=r"mesh\.data x fsdp x expert \(4\)"):
        make_packer(micro_rows=6, row_shards=4)
    with pytest.raises(ConfigError, match="at least 1"):
        Packer(BatchConfig(0, 1, 1, False), 1)
    with pytest.raises(ValueError, match="first token cannot be a target"):
        (s,) = make_streams(1)
        make_packer().pack([dataclasses.replace(s, ce_weights=np.ones(len(s.trajectory), np.float32))])
