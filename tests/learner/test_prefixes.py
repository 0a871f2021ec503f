"""What sequences begin with alike is computed once: fewer tokens, the same loss, gradients and exact log-probs."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms.streams import Streams
from jaxagent.learner.batching import common_prefix
from jaxagent.learner.forward import policy_forward
from jaxagent.learner.score import policy_scorer
from jaxagent.models import trees
from jaxagent.models.exact import Tiling
from tests.learner.test_update import SIDES, assert_trees_close, critic_of, total_loss_and_gradient

PAGE = 4


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 16))
def test_a_row_holds_every_beginning_once_and_targets_see_what_came_before_them(make_trees, make_packer, seed, n):
    streams = make_trees(n, seed)
    for batch in make_packer(share=1).pack(streams):
        for row, mine in enumerate(batch.sequence):
            paths = set()
            for i in set(mine[mine >= 0]):
                kept = np.flatnonzero(streams[i].targets)[-1]
                tokens = streams[i].trajectory.tokens[:kept].tolist()
                paths |= {tuple(tokens[: k + 1]) for k in range(kept)}
            assert np.count_nonzero(batch.segments[row]) == len(paths)
            column = np.arange(len(batch.tokens[row]))
            for i, head, at in zip(mine, batch.head_positions[row], batch.offset[row], strict=True):
                if i >= 0:  # a target is predicted from its own sequence's tokens, and from no sibling's
                    seen = batch.tokens[row][(column <= head) & (head < batch.ends[row])]
                    np.testing.assert_array_equal(seen, streams[i].trajectory.tokens[:at])


def test_a_group_fits_one_row_and_a_sequence_alone_is_packed_as_ever(make_streams, make_packer):
    group = make_streams(8, low=15, high=16)
    for i, s in enumerate(group):
        s.trajectory.tokens[:12] = group[0].trajectory.tokens[:12]
        s.trajectory.tokens[12] = i  # apart from here on
    group = [Streams.of(s.trajectory, policy_weights=np.arange(15) >= 12) for s in group]
    (shared,) = make_packer(row_tokens=28, micro_rows=1, longest_targets=120, share=1).pack(group)
    assert np.count_nonzero(shared.segments) == 12 + 8 * 2 == 28  # the last token of each is a target only
    whole = make_packer(row_tokens=28, micro_rows=8).pack(group)
    assert sum(np.count_nonzero(b.segments) for b in whole) == 8 * 14
    (alone,), (as_ever,) = (make_packer(share=share, longest_targets=20).pack(group[:1]) for share in (1, 0))
    for name in ("tokens", "positions", "segments", "head_positions", "targets", "sequence", "policy_weights"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(as_ever, name), name)


def test_beginnings_are_shared_in_whole_pages(make_trees, make_packer):
    streams = make_trees(12, seed=3, low=16, high=24)
    tokens = {share: sum(np.count_nonzero(b.segments) for b in make_packer(60, share=share).pack(streams))
              for share in (0, 1, PAGE)}  # fmt: skip
    assert tokens[1] < tokens[PAGE] < tokens[0]
    for batch in make_packer(60, share=PAGE).pack(streams):
        starts = np.flatnonzero(np.diff(batch.positions[batch.segments > 0], prepend=-2) != 1)
        assert not (batch.positions[batch.segments > 0][starts] % PAGE).any()


def test_common_prefix():
    a = np.array([1, 2, 3])
    assert [common_prefix(a, np.array(b, int)) for b in ([], [2], [1, 3], [1, 2, 3], [1, 2, 3, 4])] == [0, 0, 1, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_loss_and_gradient_are_those_of_whole_sequences(
    spec, make_params, make_packer, make_trees, make_mesh, monkeypatch, side
):
    """Deep trees, with policy, KL, entropy, cross-entropy and value targets; on one device, the first also on eight.

    What eight devices do with the sums of the others is tested in test_update.py.
    """
    monkeypatch.setattr(trees, "QUERY_BLOCK", 8)  # of rows of 40 tokens: the last blocks gather the keys of their path
    streams = make_trees(14, seed=5)
    whole = make_packer(row_tokens=40, longest_targets=40).pack(streams)
    shared = make_packer(row_tokens=40, longest_targets=40, row_shards=4, share=1).pack(streams)
    assert sum(np.count_nonzero(b.segments) for b in shared) < 0.8 * sum(np.count_nonzero(b.segments) for b in whole)

    def graded(mesh, batches):
        params = make_params(mesh)
        return total_loss_and_gradient(spec, side, critic_of(params) if side == "critic" else params, batches, mesh)

    loss, grads = graded(make_mesh(), whole)
    for mesh in (make_mesh(), make_mesh(2, 2, 2))[: 2 if side == "policy" else 1]:
        shared_loss, shared_grads = graded(mesh, shared)
        np.testing.assert_allclose(shared_loss, loss, rtol=1e-5)
        assert_trees_close(shared_grads, grads, 1e-5)
    if side != "policy":
        return
    # The mask does this: who sees a neighbour's tokens has another loss.
    nosy = [dataclasses.replace(b, ends=np.full_like(b.ends, b.ends.shape[1])) for b in shared]
    wrong, _ = graded(make_mesh(), nosy)
    assert abs(wrong - loss) > 1e-4 * abs(loss)


@pytest.mark.parametrize("shape", [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_exact_logprobs_are_the_same_bits(spec, make_params, make_packer, make_trees, make_mesh, shape):
    mesh = make_mesh(*shape)
    params, streams = make_params(mesh), make_trees(14, seed=5)
    forward = policy_forward(spec, Tiling(tile_rows=16, page_tokens=PAGE, cache_dtype="float32"))
    scores = []
    for share in (0, PAGE):
        packer = make_packer(row_tokens=40, longest_targets=40, row_shards=4, share=share)
        found, _ = policy_scorer(forward, 0.7, packer, mesh)(params, [s.trajectory for s in streams])
        scores.append(np.concatenate(found).view(np.int32))
    np.testing.assert_array_equal(*scores)


def test_without_sharing_nothing_is_compiled_for_it(make_streams, make_packer):
    (batch, *_) = make_packer().pack(make_streams(3))
    assert batch.ends is None and make_packer().empty().ends is None


def test_shapes_do_not_depend_on_the_data(make_trees, make_packer):
    packer = make_packer(share=1, longest_targets=20)  # made for sequences of up to 12 tokens
    batches = [packer.empty(), *(b for seed in (0, 1, 2) for b in packer.pack(make_trees(4 + 3 * seed, seed, high=12)))]
    assert len({jax.tree.structure(b) for b in batches}) == 1
    assert len({tuple(np.shape(leaf) for leaf in jax.tree.leaves(b)) for b in batches}) == 1
    (longer, *_) = packer.pack(make_trees(4, low=18))
    assert longer.longest == 24
