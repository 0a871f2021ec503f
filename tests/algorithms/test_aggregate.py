"""Aggregation: a plain double loop over ragged sequences in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms.aggregate import AGGREGATIONS, Constant, RolloutMean, TokenMean, normalise
from jaxagent.algorithms.streams import Streams


def weights(mask, mode, constant):
    """Of padded sequences, bool[n, T] -> float[n, T]."""
    aggregation = Constant(constant) if mode == "constant" else AGGREGATIONS[mode]()
    return mask * aggregation(mask.sum(axis=1))[:, None]


def reference_mean(losses: list[list[float]], mode: str, constant: float) -> float:
    """The definition, on sequences from which masked tokens were dropped."""
    losses = [sequence for sequence in losses if sequence]
    if not losses:
        return 0.0
    if mode == "token_mean":
        return sum(map(sum, losses)) / sum(map(len, losses))
    if mode in ("sequence_mean", "rollout_mean"):
        return sum(sum(s) / len(s) for s in losses) / len(losses)
    return sum(sum(s) / constant for s in losses) / len(losses)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(AGGREGATIONS)))
def test_mask_equals_dropping_the_tokens(data, mode):
    n, t = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    mask, losses = rng.random((n, t)) < 0.5, rng.normal(size=(n, t))
    dropped = [list(row[keep]) for row, keep in zip(losses, mask, strict=True)]
    total = np.sum(weights(mask, mode, 3.0) * losses)
    np.testing.assert_allclose(total, reference_mean(dropped, mode, 3.0), rtol=1e-10, atol=1e-12)


def test_normalise_scales_each_stream_over_its_own_tokens(make_trajectory):
    one = Streams.of(make_trajectory("paaa"), policy_weights=[0, 1, 1, 1], entropy_weights=[0, 0.5, 0, 0])
    two = Streams.of(make_trajectory("pa"), policy_weights=[0, 1])
    first, second = normalise([one, two], ["policy_weights", "entropy_weights"], TokenMean())
    np.testing.assert_allclose(first.policy_weights, [0, 0.25, 0.25, 0.25])
    np.testing.assert_allclose(second.policy_weights, [0, 0.25])
    np.testing.assert_allclose(first.entropy_weights, [0, 0.5, 0, 0])
    assert not second.entropy_weights.any()


def test_sequences_of_no_episode_are_each_one_of_their_own(make_trajectory):
    trajectory = make_trajectory("paa")
    three = [Streams.of(trajectory, episode=e, policy_weights=[0, 1, 1]) for e in (-1, -1, 5)]
    scaled = normalise(three, ["policy_weights"], RolloutMean())
    np.testing.assert_allclose([s.policy_weights.sum() for s in scaled], [1 / 3] * 3, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_rollout_mean_is_a_mean_of_means_of_means(seed, n):
    rng = np.random.default_rng(seed)
    episodes, counts = rng.integers(0, 4, n), rng.integers(0, 4, n)
    losses = [rng.normal(size=c) for c in counts]
    means = {}
    for e, loss in zip(episodes, losses, strict=True):
        if len(loss):
            means.setdefault(e, []).append(loss.mean())
    expected = np.mean([np.mean(m) for m in means.values()]) if means else 0.0
    scales = RolloutMean()(counts, episodes)
    np.testing.assert_allclose(sum(s * x.sum() for s, x in zip(scales, losses, strict=True)), expected, atol=1e-12)


def test_a_stream_of_another_length_is_an_error(make_trajectory):
    with pytest.raises(ValueError, match="stream 'advantages' has shape"):
        Streams.of(make_trajectory("pa"), advantages=[1.0])
