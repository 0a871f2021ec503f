"""What the engine benchmark asks of its contenders; no timing."""

import numpy as np
import pytest

from benchmarks import peers, train_vs_torch, workloads


def lengths(episodes):
    return [[(len(turn.given), turn.sampled) for turn in episode] for episode in episodes]


def test_ragged_lengths_stay_within_their_bounds():
    episodes = workloads.ragged(0, 64, 128, 4096)
    assert {len(e) for e in episodes} == set(range(2, 9))
    assert all(e[0].given.shape == (128,) for e in episodes)
    assert all(20 <= len(t.given) <= 200 for e in episodes for t in e[1:])
    assert all(4 <= t.sampled <= 128 for e in episodes for t in e)
    assert all(t.given.min() >= 1 and t.given.max() < 4096 for e in episodes for t in e)  # 0 is padding


def test_turn_lengths_have_a_heavy_tail():
    sampled = [t.sampled for e in workloads.ragged(0, 64, 128, 4096) for t in e]
    assert np.median(sampled) < 0.75 * np.mean(sampled)
    assert max(sampled) == 128


def test_a_repetition_is_the_same_work_on_new_text():
    first, second = (workloads.ragged(r, 8, 32, 4096) for r in (0, 1))
    assert lengths(first) == lengths(second)
    assert lengths(first) == lengths(workloads.ragged(0, 8, 32, 4096))
    assert not np.array_equal(first[0][0].given, second[0][0].given)
    np.testing.assert_array_equal(first[0][0].given, workloads.ragged(0, 8, 32, 4096)[0][0].given)


def test_static_totals():
    episodes = workloads.static(0, 4, 16, 8, 100)
    assert workloads.sampled_tokens(episodes) == 32
    assert workloads.lengths(episodes) == [24] * 4


def test_rounds_give_every_turn_its_tokens_and_the_context_before_it():
    episodes = workloads.ragged(0, 6, 32, 100)
    contexts = []

    def generate(batch, new):
        contexts.extend(batch)
        return [np.full(new, 7, np.int32) for _ in batch]

    peers.rounds(generate, episodes, batches=2)
    assert len(contexts) == sum(map(len, episodes))
    expected = sorted(
        sum(len(t.given) + t.sampled for t in e[:n]) + len(e[n].given) for e in episodes for n in range(len(e))
    )
    assert sorted(map(len, contexts)) == expected


def test_left_padding():
    ids, mask = peers.left_pad([np.array([5]), np.array([1, 2, 3])])
    assert ids.tolist() == [[0, 0, 5], [1, 2, 3]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_train_batches_hold_every_next_token_once():
    text = workloads.prompts(0, 6, 9, 100)
    parts = train_vs_torch.batches(text, 4)
    assert [part.tokens.shape for part in parts] == [(4, 8), (2, 8)]
    np.testing.assert_array_equal(np.concatenate([part.targets for part in parts]), text[:, 1:])
    assert sum(part.ce_weights.sum() for part in parts) == pytest.approx(1.0)
    assert not any(part.policy_weights.any() or part.nll_weights.any() for part in parts)
