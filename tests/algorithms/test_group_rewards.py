"""Rewards that compare the attempts of a group: by hand, with failures, and where they go."""

import dataclasses

import chex
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import toolrl
from jaxagent import config
from jaxagent.algorithms import compose
from jaxagent.algorithms.group_rewards import Preferences, normalised, preferred, weights_of
from jaxagent.algorithms.streams import shaped
from jaxagent.config import ConfigError
from jaxagent.runs import checks as run_checks
from jaxagent.types import StopReason

YES, NO = True, False


class ByHand(chex.TestCase):
    def test_each_feature_lies_between_the_groups_least_and_largest(self):
        features = np.array([[2.0, -5.0, 7.0], [4.0, -1.0, 7.0], [3.0, -2.0, 7.0], [90.0, -90.0, 0.0]])
        got = normalised(features, np.array([YES, YES, YES, NO]))
        np.testing.assert_allclose(got, [[0, 0, 0], [1, 1, 0], [0.5, 0.75, 0], [0, 0, 0]])
        assert not normalised(features, np.zeros(4, bool)).any()  # all failed

    def test_a_correct_attempt_has_its_vector_in_the_users_weights_and_a_wrong_one_nothing(self):
        # outcome, minus the cost, minus the latency, searches
        features = np.array([[1, -8.0, -30.0, 0], [1, -2.0, -10.0, 2], [0, -0.5, -1.0, 0], [1, -4.5, -20.0, 1]])
        correct = features[:, 0] > 0
        weights = np.array([1.0, 0.5, 0.2, -0.4])
        got = preferred(features, weights, correct, np.ones(4, bool))
        # Costs run over 8 - 0.5 = 7.5, latencies over 29, searches over 2.
        by_hand = [1.0, 1 + 0.5 * 6 / 7.5 + 0.2 * 20 / 29 - 0.4, 0.0, 1 + 0.5 * 3.5 / 7.5 + 0.2 * 10 / 29 - 0.2]
        np.testing.assert_allclose(got, by_hand, rtol=1e-12)

    def test_other_shapes_and_types_are_refused(self):
        with pytest.raises(AssertionError):
            normalised(np.ones((2, 1)), np.ones((2, 1), bool))
        with pytest.raises(AssertionError):
            preferred(np.ones((2, 2)), np.ones(1), np.ones(2, bool), np.ones(2, bool))
        with pytest.raises(AssertionError):
            preferred(np.ones((2, 1)), np.ones(1), np.ones(2), np.ones(2, bool))


def played(make_group, outcomes, preferences=None, stops=None):
    """A group of (solved, cost, latency_s, searches)."""
    stops = stops or [StopReason.ANSWER] * len(outcomes)
    group = make_group(*[("pa", float(solved), stop) for (solved, *_), stop in zip(outcomes, stops, strict=True)])
    episodes = [
        dataclasses.replace(
            episode,
            rewards={} if stop.is_failure else {"solved": float(solved)},
            metrics={} if stop.is_failure else {"cost": cost, "latency_s": latency, "calls_search": searches},
        )
        for episode, (solved, cost, latency, searches), stop in zip(group.episodes, outcomes, stops, strict=True)
    ]
    metadata = {} if preferences is None else {"preferences": preferences}
    task = dataclasses.replace(group.task, metadata=metadata)
    return dataclasses.replace(group, task=task, episodes=[dataclasses.replace(e, task=task) for e in episodes])


OUTCOMES = [(1, 8.0, 30.0, 0.0), (1, 2.0, 10.0, 2.0), (0, 0.5, 1.0, 0.0), (1, 4.5, 20.0, 1.0)]


def test_a_group_is_compared_in_the_tasks_own_weights_or_else_in_the_entrys(make_group):
    own = Preferences(accuracy=9.0)(played(make_group, OUTCOMES, {"accuracy": 1, "cost": 0.5, "search": -0.4}))
    np.testing.assert_allclose(own, [1.0, 1 + 0.4 - 0.4, 0.0, 1 + 0.5 * 3.5 / 7.5 - 0.2])
    general = Preferences(accuracy=1.0, cost=0.5, latency=0.2)(played(make_group, OUTCOMES))
    np.testing.assert_allclose(general, [1.0, 1 + 0.4 + 0.2 * 20 / 29, 0.0, 1 + 0.5 * 3.5 / 7.5 + 0.2 * 10 / 29])


def test_a_failed_attempt_changes_nothing_and_keeps_its_place(make_group, rl):
    stops = [StopReason.ANSWER, StopReason.TIMEOUT, *[StopReason.ANSWER] * 3]
    with_failure = played(make_group, [OUTCOMES[0], (0, 0, 0, 0), *OUTCOMES[1:]], stops=stops)
    cfg = rl(group_reward={"name": "preferences"})
    got = [episode.reward for episode in shaped(with_failure, cfg).episodes]
    without = [episode.reward for episode in shaped(played(make_group, OUTCOMES), cfg).episodes]
    assert got == [without[0], 0.0, *without[1:]] and without[1] > without[0] > without[2] == 0.0
    failed = played(make_group, [(0, 0, 0, 0)] * 2, stops=[StopReason.ENV_ERROR] * 2)
    assert [episode.reward for episode in shaped(failed, cfg).episodes] == [0.0, 0.0]


def test_without_either_a_group_stays_as_it_is(make_group, rl):
    group = played(make_group, OUTCOMES)
    assert [e.reward for e in shaped(group, rl()).episodes] == [e.reward for e in group.episodes]


def test_the_reward_of_a_truncated_attempt_is_scaled(make_group, rl):
    stops = [StopReason.ANSWER, StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT, StopReason.ANSWER]
    got = shaped(played(make_group, OUTCOMES, stops=stops), rl(shaping={"truncated_factor": 0.1})).episodes
    np.testing.assert_allclose([episode.reward for episode in got], [1.0, 0.1, 0.0, 1.0])
    # A penalty must not shrink because the attempt ran out of tokens.
    bad = make_group(("pa", -3.0, StopReason.TOKEN_LIMIT), ("pa", -3.0, StopReason.ANSWER))
    got = shaped(bad, rl(shaping={"truncated_factor": 0.1})).episodes
    assert [episode.reward for episode in got] == [-3.0, -3.0]


def test_good_attempts_have_a_higher_advantage(make_group, rl):
    group = make_group(("ppaa", 1.0), ("pa", 0.0), ("pa", 0.999), ("pa", 1.0 - 1e-6))
    plain, boosted = (compose.streams([group], cfg, 0.0)[0] for cfg in (rl(), rl(shaping={"correct_boost": 0.1})))
    more = [b.advantages - a.advantages for a, b in zip(plain, boosted, strict=True)]
    for got, expected in zip(more, [[0, 0, 0.1, 0.1], [0, 0], [0, 0], [0, 0.1]], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("given", [[], {}, {"accuracy": "1"}, {"cost": float("nan")}, {"cost": True}, {3: 1.0}, "x"])
def test_preferences_that_are_none_are_refused(given):
    with pytest.raises(ConfigError, match=r"task 't7': metadata\.preferences must be"):
        weights_of(given, "t7")


def test_a_weight_for_what_nobody_counts_is_refused(make_group):
    with pytest.raises(ConfigError, match="counters have no 'calls_serach'"):
        Preferences()(played(make_group, OUTCOMES, {"serach": 1.0}))
    with pytest.raises(ConfigError, match="verdict have no 'em'"):
        Preferences(score="em")(played(make_group, OUTCOMES))


def test_gdpo_compares_each_component_by_itself_and_whitens_their_sum(make_group, rl):
    """verl's order, in NumPy: sum of w_k (r_k - mean) / (std + 1e-6) in each group, then whitened over all tokens."""
    verdicts = [[(1, 0), (0, 30), (1, 10), (0, 0)], [(1, 5), (1, 5), (0, 5)]]  # one component is much larger
    groups = []
    for verdict in verdicts:
        group = make_group(*[("ppaa" if form else "pa", 9.0) for form, _ in verdict], ("pa", 0.0, StopReason.TIMEOUT))
        rewards = [dict(form=form, score=score) for form, score in verdict] + [{}]
        episodes = [dataclasses.replace(e, rewards=r) for e, r in zip(group.episodes, rewards, strict=True)]
        groups.append(dataclasses.replace(group, episodes=episodes))
    choice = dict(name="gdpo", components=("form", "score"), weights=(1.0, 0.5))
    cfg = rl(group_reward=choice, advantage="no_baseline", whiten_advantages=True)
    got = np.concatenate([s.advantages[1:][s.policy_weights[1:] > 0]
                          for s in compose.streams([shaped(g, cfg) for g in groups], cfg, 0.0)[0]])  # fmt: skip
    expected = []
    for verdict in verdicts:
        parts = np.array(verdict, float)
        total = ((parts - parts.mean(0)) / (parts.std(0, ddof=1) + 1e-6)) @ [1.0, 0.5]
        expected += [a for a, (form, _) in zip(total, verdict, strict=True) for _ in range(1 + form)]
    expected = (expected - np.mean(expected)) / np.std(expected, ddof=1)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    with pytest.raises(ConfigError, match="verdict have no 'scroe'"):
        shaped(groups[0], rl(group_reward=choice | dict(components=("scroe",), weights=())))


@pytest.mark.parametrize(
    ("components", "weights", "message"),
    [((), (), "needs components"), (("format",), (1.0, 2.0), "1 components and 2"), (("from",), (), "such component")],
)
def test_gdpo_needs_components_that_there_are_and_a_weight_of_each(components, weights, message):
    raw = toolrl.get_config()
    raw.rl.group_reward = ConfigDict({"name": "gdpo", "components": ("format", "correctness"), "weights": (1.0, 0.5)})
    run_checks.check(config.parse(raw))
    raw.rl.group_reward.update(components=components, weights=weights)
    with pytest.raises(ConfigError, match=message):
        run_checks.check(config.parse(raw))


@pytest.mark.parametrize("whitened", [False, True])
def test_truncated_attempts_count_in_their_group_and_are_not_trained(make_group, rl, whitened):
    """DAPO's overlong filter (TRL: mask_truncated_completions): the others' advantages are what they were."""
    cut, ended = StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT
    group = make_group(("paa", 1.0), ("poa", 0.5, cut), ("pa", 0.0), ("pa", 1.0, ended))
    cfg = rl(advantage="group_mean", whiten_advantages=whitened, mask_truncated=True, echo=dict(coefficient=0.1))
    streams, counts = compose.streams([group], cfg, 0.0)
    assert [s.episode for s in streams if s.policy_weights.any()] == [0, 2, 3] and counts["groups/failed_episodes"] == 0
    assert streams[1].ce_weights.any()  # ECHO still reads what it was shown
    values = np.array([0.375, 0.375, -0.625, 0.375])  # R - 0.625, the mean of all four
    wanted = (values - values.mean()) / values.std(ddof=1) if whitened else values
    np.testing.assert_allclose(np.concatenate([s.advantages[s.policy_weights > 0] for s in streams]), wanted, rtol=1e-5)
