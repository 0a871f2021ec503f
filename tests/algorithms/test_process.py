"""Process rewards: which token gets which, and the advantages over turns, by hand and by a loop over what counts."""

import dataclasses
import statistics

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.algorithms import checks, compose
from jaxagent.algorithms.estimate import by_turn, states, token_rewards
from jaxagent.algorithms.estimators import GiGPO, TurnMeanStd
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


def test_a_group_planned_with_one_attempt_of_one_turn_keeps_its_reward():
    rewards = np.array([[[3.0, 1.0]]])
    np.testing.assert_allclose(TurnMeanStd()(rewards, np.array([[[True, False]]])), [[[3.0, 0.0]]])


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
    np.testing.assert_allclose(TurnMeanStd()(rewards, mask), expected, rtol=1e-9, atol=1e-9)


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


def test_the_state_of_a_turn_is_what_was_shown_since_the_policy_spoke(make_group):
    # Tokens are 0, 1, 2, ... Two trajectories: turns 0, 2 (1 was not sampled) and, in the second, turn 0.
    one = episode(make_group, "ppaaoowa ppa", "00001112 000", 0.0, ())
    assert states(one) == [np.array(t, np.int32).tobytes() for t in ([0, 1], [4, 5, 6], [0, 1])]
    assert len(states(one)) == len(by_turn(one)[1])
    assert states(episode(make_group, "pa po", "00 00", 0.0, ())) == [np.array([0], np.int32).tobytes()]
    back_to_back = episode(make_group, "paa", "001", 0.0, ())  # nothing was shown between two turns
    assert states(back_to_back) == [np.array([0], np.int32).tobytes(), b""]


def test_gigpo_by_hand(rl, make_group):
    """Two attempts, gamma 0.5: both begin in one state; the first comes back to it, which the second never does."""
    one = episode(make_group, "paoapa", "000122", 1.0, (0.0, 0.5, 0.0))
    two = episode(make_group, "paowa", "00011", 0.0, (0.0, 0.0))
    tokens = np.array([0, 9, 5, 9, 0, 9], np.int32)  # turn 2 is shown what turn 0 was
    one = dataclasses.replace(one, trajectories=[dataclasses.replace(one.trajectories[0], tokens=tokens)])
    config = rl(advantage=dict(name="gigpo", gamma=0.5, step_weight=2.0))
    checks.check(config)
    first, second = compose.streams([Group(one.task, [one, two])], config, 0.0)[0]
    attempt = 0.75 / (1.5 * 0.5**0.5 + 1e-6)  # of 1.5 and 0
    returns = [0.0 + 0.5 * (0.5 + 0.5 * 1.0), 1.0, 0.0]  # from the common state: turns 0 and 2 of one, turn 0 of two
    step = [(r - statistics.mean(returns)) / (statistics.stdev(returns) + 1e-6) for r in returns]
    expected = [0, attempt + 2 * step[0], 0, attempt, 0, attempt + 2 * step[1]]  # turn 1: a state of its own
    np.testing.assert_allclose(first.advantages, expected, rtol=1e-5)
    np.testing.assert_allclose(second.advantages, [0, 2 * step[2] - attempt, 0, 0, -attempt], rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.2, 0.7, 1.0]))
def test_gigpo_equals_the_papers_formula_turn_by_turn(seed, keep):
    """arXiv 2505.10978: eq. 3 over attempts, eq. 7 over the turns of a group that began in one state."""
    rng, entry = np.random.default_rng(seed), GiGPO(gamma=0.9, step_weight=0.7)
    lengths = rng.integers(0, 5, (2, 3)) * (rng.random((2, 3)) < keep)
    mask = np.arange(4) < lengths[:, :, None]
    rewards, began = rng.normal(size=mask.shape), rng.integers(0, 3, mask.shape)
    rewards[~mask] = np.nan  # never read

    def normal(x, among):
        return (x - statistics.mean(among)) / (statistics.stdev(among) + 1e-6) if len(among) > 1 else 0.0

    expected = np.zeros(mask.shape)
    for n in range(2):
        follow = lambda s, k: sum(0.9 ** (j - k) * rewards[n, s, j] for j in range(k, lengths[n, s]))  # noqa: B023, E731
        sums = {s: float(rewards[n, s, : lengths[n, s]].sum()) for s in range(3) if lengths[n, s]}
        turns = [(s, k) for s in sums for k in range(lengths[n, s])]
        for s, k in turns if len(sums) > 1 else ():  # an attempt left alone has none
            among = [float(follow(*turn)) for turn in turns if began[n][turn] == began[n, s, k]]
            expected[n, s, k] = normal(sums[s], list(sums.values())) + 0.7 * normal(float(follow(s, k)), among)
    np.testing.assert_allclose(entry(rewards, mask, began), expected, rtol=1e-9, atol=1e-9)
