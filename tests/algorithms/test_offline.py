"""Learning from logged episodes: pairs, DPO's streams by hand and against its gradient, successes, outcome models."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.algorithms import outcome, supervised
from jaxagent.algorithms.streams import action_mask
from jaxagent.types import Group, StopReason


def numbered(group: Group, task: str = "t") -> Group:
    """The same group with tokens that tell its attempts apart."""
    episodes = []
    for i, episode in enumerate(group.episodes):
        moved = [dataclasses.replace(t, tokens=t.tokens + 100 * i) for t in episode.trajectories]
        episodes.append(dataclasses.replace(episode, trajectories=moved, task=dataclasses.replace(group.task, id=task)))
    return Group(episodes[0].task, episodes)


def test_distinct_attempts(make_group):
    """Of two with the same tokens the first; none that failed or sampled nothing."""
    same = make_group(("pa", 1.0), ("pa", 0.0), ("pao", 0.5), ("pp", 0.0), ("paa", 1.0, StopReason.TIMEOUT))
    assert [e.sample for e in supervised.distinct(same.episodes)] == [0, 2]
    assert [e.sample for e in supervised.distinct(numbered(same).episodes)] == [0, 1, 2]


def test_pairs_join_the_best_with_the_worst(make_group):
    group = numbered(make_group(("pa", 0.2), ("pa", 1.0), ("pa", 0.0), ("pa", 0.6), ("pa", 0.6)))
    chosen = lambda **k: [(p.chosen.sample, p.rejected.sample) for p in supervised.pairs([group], **k)]  # noqa: E731
    # By reward: 1 (1.0), 3 and 4 (0.6), 0 (0.2), 2 (0.0); attempt 4 is the middle and stays alone.
    assert chosen(per_task=9, min_gap=0.0) == [(1, 2), (3, 0)]
    assert chosen(per_task=1, min_gap=0.0) == [(1, 2)]
    assert chosen(per_task=9, min_gap=0.5) == [(1, 2)]
    assert chosen(per_task=9, min_gap=1.0) == [(1, 2)]  # as large as the least gap is large enough


def test_pairs_leave_out_failures_copies_and_equal_rewards(make_group):
    failed = numbered(make_group(("pa", 1.0), ("pa", 0.0, StopReason.TIMEOUT)))
    equal = numbered(make_group(("pa", 1.0), ("pa", 1.0)))
    copies = make_group(("pa", 1.0), ("pa", 0.0))  # the same tokens
    silent = numbered(make_group(("pa", 1.0), ("pp", 0.0)))
    assert supervised.pairs([failed, equal, copies, silent], per_task=5, min_gap=0.0) == []


def test_dpo_by_hand(make_group):
    """beta 0.5; D(chosen) = 0.4 over two actions, D(rejected) = -0.6 over one: m = 0.5 and sigmoid(-m) = 0.377541."""
    pair = supervised.Pair(*make_group(("paoa", 1.0), ("pao", 0.0)).episodes)
    logprobs = [np.array([9, -1, 9, -2]), np.array([9, -3, 9])]  # observations hold what must not count
    reference = [np.array([0, -1.2, -7, -2.2]), np.array([0, -2.4, -7])]
    streams, metrics = supervised.dpo_streams([pair], logprobs, reference, 0.5, False, 0.0)
    np.testing.assert_allclose(streams[0].nll_weights, [0, 0.18877, 0, 0.18877], rtol=1e-4)
    np.testing.assert_allclose(streams[1].nll_weights, [0, -0.18877, 0], rtol=1e-4)
    assert metrics["dpo/margin"] == pytest.approx(0.5) and metrics["dpo/accuracy"] == 1.0
    assert metrics["dpo/loss"] == pytest.approx(np.log1p(np.exp(-0.5)))
    assert metrics["dpo/nll"] == pytest.approx(1.5)  # (1 + 2) / 2
    # Per token: D = 0.2 and -0.6, m = 0.4, sigmoid(-m) = 0.401312; and the NLL term adds 0.3 / 2 per chosen token.
    streams, _ = supervised.dpo_streams([pair], logprobs, reference, 0.5, True, 0.3)
    np.testing.assert_allclose(streams[0].nll_weights, [0, 0.100328 + 0.15, 0, 0.100328 + 0.15], rtol=1e-4)
    np.testing.assert_allclose(streams[1].nll_weights, [0, -0.200656, 0], rtol=1e-4)


def problem(make_group, seed=0):
    """Ragged pairs, one with an episode of two trajectories; log-probs of a softmax policy theta[T, V], as matrices."""
    groups = [make_group(("paoaa", 1.0), ("ppaooa", 0.0)), make_group(("paa poa", 1.0), ("paaaaa", 0.0)),
              make_group(("pwa", 1.0), ("paoao paa", 0.0))]  # fmt: skip
    pairs = [supervised.Pair(*numbered(group).episodes) for group in groups]
    rng = np.random.default_rng(seed)
    sequences = [t for pair in pairs for t in pair.trajectories]
    theta = rng.normal(size=(8, 13))
    tokens = [t.tokens % 13 for t in sequences]
    reference = [rng.normal(-2, 1, len(t)) for t in sequences]
    masks = [action_mask(t).astype(np.float64) for t in sequences]
    sides = []  # trajectories of each pair's chosen and rejected episode
    at = itertools.count()
    for pair in pairs:
        sides.append([[next(at) for _ in e.trajectories] for e in (pair.chosen, pair.rejected)])
    return pairs, theta, tokens, reference, masks, sides


@pytest.mark.slow
@pytest.mark.parametrize("normalised", [False, True])
def test_the_weighted_nll_has_the_gradient_of_dpo(make_group, normalised):
    """The formula of the paper, differentiated as it stands, against the gradient of sum(-weight * log p)."""
    pairs, theta, tokens, reference, masks, sides = problem(make_group)
    beta, alpha = 0.7, 0.25

    def logprobs(theta):
        table = jax.nn.log_softmax(theta)
        return [table[np.arange(len(t)), t] for t in tokens]

    def direct(theta):
        lp, loss = logprobs(theta), 0.0
        for chosen, rejected in sides:
            n = [sum(masks[i].sum() for i in side) for side in (chosen, rejected)]
            d = [sum(jnp.sum(masks[i] * (lp[i] - reference[i])) for i in side)
                 for side in (chosen, rejected)]  # fmt: skip
            if normalised:
                d = [x / k for x, k in zip(d, n, strict=True)]
            nll = -sum(jnp.sum(masks[i] * lp[i]) for i in chosen) / n[0]
            loss = loss - jax.nn.log_sigmoid(beta * (d[0] - d[1])) + alpha * nll
        return loss / len(sides)

    with jax.enable_x64(True):
        here = [np.asarray(x) for x in jax.jit(
            lambda th: [jax.nn.log_softmax(th)[jnp.arange(len(t)), t] for t in tokens])(theta)]  # fmt: skip
        streams, metrics = supervised.dpo_streams(pairs, here, reference, beta, normalised, alpha)

        def weighted(theta):
            table = jax.nn.log_softmax(theta)
            return -sum(jnp.sum(s.nll_weights.astype(np.float64) * table[np.arange(len(t)), t])
                        for s, t in zip(streams, tokens, strict=True))  # fmt: skip

        ours = jax.grad(weighted)(theta)
        value, want = jax.value_and_grad(direct)(theta)
    np.testing.assert_allclose(ours, want, rtol=2e-6, atol=1e-8)  # the weights are float32
    assert np.abs(want).max() > 0.01
    assert metrics["dpo/loss"] + alpha * metrics["dpo/nll"] == pytest.approx(float(value), rel=1e-6)


def test_where_the_policy_is_its_reference_every_margin_is_0_and_no_pair_is_won(make_group):
    pair = supervised.Pair(*numbered(make_group(("pa", 1.0), ("pa", 0.0))).episodes)
    streams, metrics = supervised.dpo_streams(
        [pair], [np.array([0, -3.0])] * 2, [np.array([0, -3.0])] * 2, 0.5, False, 0.0
    )
    assert metrics["dpo/accuracy"] == 0.0 and metrics["dpo/loss"] == pytest.approx(np.log(2))
    np.testing.assert_allclose([s.nll_weights[1] for s in streams], [0.25, -0.25])  # beta / 2


def test_a_pair_that_is_won_by_far_pulls_no_more(make_group):
    pair = supervised.Pair(*numbered(make_group(("pa", 1.0), ("pa", 0.0))).episodes)
    for gain in (50.0, 5000.0):
        streams, metrics = supervised.dpo_streams(
            [pair], [np.array([0, gain]), np.zeros(2)], [np.zeros(2)] * 2, 1.0, False, 0.0
        )
        assert np.isfinite(metrics["dpo/loss"]) and abs(streams[0].nll_weights).max() < 1e-20
        streams, _ = supervised.dpo_streams(
            [pair], [np.array([0, -gain]), np.zeros(2)], [np.zeros(2)] * 2, 1.0, False, 0.0
        )
        np.testing.assert_allclose(streams[0].nll_weights, [0, 1])  # and one that is lost by far, with all of beta


def test_successes_are_distinct_and_few_per_task(make_group):
    group = numbered(make_group(("pa", 1.0), ("pa", 0.0), ("pa", 1.0), ("pa", 1.0), ("pa", 1.0, StopReason.ENV_ERROR)))
    copy = dataclasses.replace(group.episodes[0], sample=9)
    group = Group(group.task, [group.episodes[0], copy, *group.episodes[1:]])
    assert [e.sample for e in supervised.successes([group, group], 1.0, per_task=2)] == [0, 2, 0, 2]
    assert [e.sample for e in supervised.successes([group], 1.0, per_task=9)] == [0, 2, 3]
    assert [e.sample for e in supervised.successes([group], 0.0, per_task=9)] == [0, 1, 2, 3]


def test_auc_counts_pairs(make_group):
    scores, labels = np.array([0.1, 0.4, 0.4, 0.8, 0.9]), np.array([False, True, False, False, True])
    # (0.4 > 0.1), (0.4 = 0.4) half, (0.4 < 0.8); 0.9 beats all three: 4.5 of 6.
    assert outcome.auc(scores, labels) == pytest.approx(4.5 / 6)
    assert np.isnan(outcome.auc(scores, np.ones(5, bool)))
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 60) / 9, rng.random(60) < 0.4
    wins = [(a > b) + 0.5 * (a == b) for a in scores[labels] for b in scores[~labels]]
    assert outcome.auc(scores, labels) == pytest.approx(np.mean(wins))
    assert outcome.accuracy(np.array([-1.0, 2.0, 3.0]), np.array([False, False, True]), 0.0) == pytest.approx(2 / 3)
    best = outcome.best_threshold(scores, labels)
    assert outcome.accuracy(scores, labels, best) == max(
        np.mean((scores > c) == labels) for c in np.linspace(-0.5, 1.5, 100)
    )


def test_a_score_at_the_threshold_is_below_it_and_the_best_threshold_lies_between_scores():
    assert outcome.accuracy(np.array([0.0]), np.array([False]), 0.0) == 1.0
    assert outcome.best_threshold(np.array([2.0, 0.0, 1.0]), np.array([True, False, True])) == 0.5


def test_an_outcome_is_read_after_the_last_trajectory_that_acted(make_group):
    (episode,) = make_group(("pa poaa pp", 1.0)).episodes
    end, acted = outcome.through_end(episode), episode.trajectories[1]
    np.testing.assert_array_equal(end.tokens, [*acted.tokens, 0])
    np.testing.assert_array_equal(end.kinds[:-1], acted.kinds)
    assert len(end.logprobs) == len(end.turns) == 5 and end.action_mask[-1]


def test_outcome_losses_have_the_gradients_of_their_formulas(make_group):
    group = numbered(make_group(("pa", 1.0), ("pao a", 0.0), ("paoa", 1.0), ("pa", 0.0)))
    z = np.array([0.3, -1.2, 2.0, 0.9])

    def total(z, streams, loss):
        ends = zip(z, streams, strict=True)
        return sum(s.value_weights[-1].astype(float) * outcome.LOSSES[loss](x, s.returns[-1]) for x, s in ends)

    streams = outcome.binary(group.episodes, 1.0)
    for s in streams:
        assert np.count_nonzero(s.value_weights) == 1 and s.value_weights[-1] != 0  # where the episode has ended
    labels = np.array([1.0, 0, 1, 0])
    got = jax.grad(lambda z: total(z, streams, "binary"))(z)
    np.testing.assert_allclose(got, (1 / (1 + np.exp(-z)) - labels) / 4, rtol=1e-5)

    e = group.episodes
    pairs = [supervised.Pair(e[0], e[1]), supervised.Pair(e[2], e[3])]
    streams = outcome.bradley_terry(pairs, [(z[0], z[1]), (z[2], z[3])])
    got = jax.grad(lambda z: total(z, streams, "bradley_terry"))(z)
    want = jax.grad(lambda z: -(jax.nn.log_sigmoid(z[0] - z[1]) + jax.nn.log_sigmoid(z[2] - z[3])) / 2)(z)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_whole_tasks_are_held_out(make_group):
    episodes = [e for i in range(200) for e in numbered(make_group(("pa", 1.0), ("pa", 0.0)), f"task{i}").episodes]
    training, held_out = outcome.split(episodes, 0.25)
    assert not {e.task.id for e in training} & {e.task.id for e in held_out}
    assert len(training) + len(held_out) == 400 and 60 < len(held_out) < 140
    assert outcome.split(episodes[:100], 0.25)[1] == held_out[: len(outcome.split(episodes[:100], 0.25)[1])]
