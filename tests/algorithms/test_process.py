"""Process rewards: which token gets which, and the advantages over turns, by hand and by a loop over what counts."""

import dataclasses
import statistics

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms import checks, compose
from jaxagent.algorithms.process import by_turn, token_rewards, turn_mean_std
from jaxagent.algorithms.streams import ModelScores
from jaxagent.types import Group, StopReason


def episode(make_group, kinds, turns, reward, process, stop=StopReason.ANSWER):
    """An episode of trajectories spelled by kinds, with the turn of each token spelled by digits."""
    (made,) = make_group((kinds, reward, stop)).episodes
    trajectories = [
        dataclasses.replace(t, turns=np.array([int(d) for d in digits], np.int32))
        for t, digits in zip(made.trajectories, turns.split(), strict=True)
    ]
    return dataclasses.replace(made, trajectories=trajectories, turn_rewards=process)


def test_each_turns_reward_is_on_its_last_action_token(make_group):
    one = episode(make_group, "paaoa", "00001", 9.0, (0.25, 0.5))
    np.testing.assert_array_equal(token_rewards(one)[0], [0, 0, 0.25, 0, 0.5])
    # Three trajectories: turns 0 to 2, turn 3, turn 4. A turn without action tokens leaves its reward to the one before
    # it; what lies behind the last goes to the last.
    two = episode(make_group, "paoa po paa", "0002 00 000", 9.0, (1.0, 2.0, 4.0, 8.0, 16.0, 32.0))
    indices, rewards = by_turn(two)
    np.testing.assert_array_equal(np.concatenate(indices), [-1, 0, -1, 1, -1, 2, 2])
    np.testing.assert_array_equal(rewards, [3, 12, 48])
    np.testing.assert_array_equal(np.concatenate(token_rewards(two)), [0, 3, 0, 12, 0, 0, 48])
    # The first trajectory ends with a turn without action tokens: its reward stays in the first trajectory.
    ended = episode(make_group, "pao pa", "001 00", 9.0, (1.0, 2.0, 4.0))
    np.testing.assert_array_equal(np.concatenate(token_rewards(ended)), [0, 3, 0, 0, 4])
    assert by_turn(episode(make_group, "po", "00", 1.0, (1.0,)))[0] == []
    np.testing.assert_array_equal(token_rewards(episode(make_group, "pa", "00", 1.0, ()))[0], [0, 0])


class ByHand(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_two_attempts_of_two_turns_and_of_one(self):
        # Turns 3, 1 and 2: mean 2, unbiased std 1. The third attempt failed; the fourth has no turn.
        rewards = jnp.array([[[3.0, 1.0], [2.0, 7.0], [5.0, 5.0], [6.0, 6.0]]])
        mask = jnp.array([[[1, 1], [1, 0], [0, 0], [0, 0]]], bool)
        got = self.variant(turn_mean_std)(rewards, mask)
        np.testing.assert_allclose(got[0], [[0.0, -1.0], [0, 0], [0, 0], [0, 0]], atol=1e-5)
        lone = self.variant(turn_mean_std)(rewards, mask & (rewards == 3.0))
        assert not lone.any()  # the others failed
        lone = self.variant(turn_mean_std)(rewards, mask & jnp.array([True, False, False, False])[:, None])
        assert not lone.any()  # of two turns
        planned = self.variant(turn_mean_std)(rewards[:, :1], jnp.array([[[True, False]]]))
        np.testing.assert_allclose(planned[0, 0], [3.0, 0.0])


compiled = jax.jit(turn_mean_std)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.2, 0.7, 1.0]), st.booleans())
def test_equals_a_loop_over_the_turns_that_count(seed, keep, equal):
    rng = np.random.default_rng(seed)
    rewards = np.full((2, 3, 4), 0.5) if equal else rng.normal(size=(2, 3, 4))
    mask = rng.random((2, 3, 4)) < keep
    rewards[~mask] = rng.choice([np.nan, np.inf, 1e30])  # never read
    expected = np.zeros(rewards.shape)
    for g in range(2):
        kept = [float(r) for r in rewards[g][mask[g]]]
        mean, std = (statistics.mean(kept), statistics.stdev(kept) + 1e-6) if len(kept) > 1 else (0.0, 1.0)
        for s in range(3):
            for k in np.flatnonzero(mask[g, s] * (mask[g].any(axis=1).sum() > 1)):  # one left alone has none
                expected[g, s, k] = sum((rewards[g, s, j] - mean) / std for j in range(k, 4) if mask[g, s, j])
    np.testing.assert_allclose(turn_mean_std(rewards, mask), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(compiled(rewards.astype(np.float32), mask), expected, rtol=1e-5, atol=1e-5)


def test_streams_over_turns_count_the_outcome_once_and_drop_groups_without_signal(rl, make_group):
    attempts = [
        episode(make_group, "paoa", "0001", 1.0, (0.5, 0.0)),  # turns 0.5 and 0 + 1
        episode(make_group, "pa paa", "00 000", 0.0, (0.25, 0.0)),  # two trajectories: turns 0.25 and 0
        episode(make_group, "pa", "00", 9.0, (9.0,), StopReason.ENV_ERROR),
    ]
    config = rl(advantage=dict(name="turn_mean_std", drop_zero_signal=True))
    checks.check(config)
    one, two, three = compose.streams([Group(attempts[0].task, attempts)], config, 0.0)[0]
    steps = [0.5, 1.0, 0.25, 0.0]
    normal = [(r - statistics.mean(steps)) / (statistics.stdev(steps) + 1e-6) for r in steps]
    np.testing.assert_allclose(one.advantages, [0, normal[0] + normal[1], 0, normal[1]], rtol=1e-6)
    np.testing.assert_allclose(two.advantages, [0, normal[2] + normal[3]], rtol=1e-6)
    np.testing.assert_allclose(three.advantages, [0, normal[3], normal[3]], rtol=1e-6)
    alike = [dataclasses.replace(e, reward=1.0, turn_rewards=(0.0, 0.0)) for e in attempts[:1]] * 2
    group = Group(attempts[0].task, alike)  # turns 0 and 1 in both: they differ, so there is a signal
    assert len(compose.streams([group], config, 0.0)[0]) == 2
    silent = Group(attempts[0].task, [dataclasses.replace(e, reward=0.0) for e in alike])
    assert compose.streams([silent], config, 0.0)[0] == []


def test_kl_in_the_reward_is_taken_from_its_turn(rl, make_group):
    one = episode(make_group, "paoa", "0001", 1.0, (0.5,))  # behaviour log-prob -1
    reference = [np.array([0, -3.0, 9.0, -1.5], np.float32)]
    config = rl(advantage="turn_mean_std", kl=dict(coefficient=0.1, estimator="k1", where="reward"))
    (got,) = compose.streams([Group(one.task, [one])], config, 0.0, ModelScores(reference=reference))[0]
    steps = [0.5 - 0.2, 1.0 - 0.05]
    normal = [(r - statistics.mean(steps)) / (statistics.stdev(steps) + 1e-6) for r in steps]
    np.testing.assert_allclose(got.advantages, [0, sum(normal), 0, normal[1]], rtol=1e-5, atol=1e-6)


def test_advantages_along_tokens_read_them(rl, make_group):
    one = episode(make_group, "paaoa", "00001", 1.0, (0.5, 0.25))
    config = rl(advantage="return")
    (got,) = compose.streams([Group(one.task, [one])], config, 0.0)[0]
    np.testing.assert_allclose(got.advantages, [0, 1.75, 1.75, 0, 1.25], rtol=1e-6)
