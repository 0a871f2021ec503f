"""From groups to streams: hand numbers per algorithm, failures, signals, mini-batches."""

import dataclasses

import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.algorithms import checks, compose
from jaxagent.algorithms.compose import as_opd
from jaxagent.algorithms.distill import Scores
from jaxagent.algorithms.streams import ModelScores, action_mask, sampled_trajectories, samples
from jaxagent.config import ConfigError
from jaxagent.types import StopReason

ECHO = dict(coefficient=0.05)


def test_grpo_gives_every_action_token_its_attempts_advantage(rl, make_group):
    group = make_group(("ppaoa", 1.0), ("ppa", 0.0))
    streams, counts = compose.streams([group], rl(), 0.0)
    std = 0.5**0.5  # unbiased, of (1, 0)
    np.testing.assert_allclose(streams[0].advantages, np.array([0, 0, 0.5, 0, 0.5]) / std, rtol=1e-5)
    np.testing.assert_allclose(streams[1].advantages, np.array([0, 0, -0.5]) / std, rtol=1e-5)
    np.testing.assert_array_equal(streams[0].policy_weights, [0, 0, 1, 0, 1])
    assert counts["groups/zero_signal"] == 0 and counts["groups/failed_episodes"] == 0


def test_samples_are_the_trajectories_with_an_action_each_with_its_scores(make_group):
    groups = [make_group(("pa pp paa", 1.0), ("", 0.0)), make_group(("pp", 0.0), ("poa", 0.0))]
    values = [np.full(2, 1.0), np.full(3, 2.0), np.full(3, 3.0)]
    made = samples(groups, ModelScores(values=values))
    assert [s.trajectory for s in made] == sampled_trajectories(groups)
    assert [(s.group, s.attempt, s.values[0], s.reference) for s in made] == [
        (0, 0, 1.0, None), (0, 0, 2.0, None), (1, 1, 3.0, None),
    ]  # fmt: skip
    assert [s.episode for s in made] == [groups[0].episodes[0]] * 2 + [groups[1].episodes[1]]
    with pytest.raises(ValueError, match="zip"):
        samples(groups, ModelScores(values=values[:2]))


def test_several_trajectories_by_the_three_published_rules(rl, make_group):
    group = make_group(("pa paa", 1.0), ("pa", 0.0), ("pa", 0.0))

    def advantages(rule):
        config = rl(advantage=dict(name="group_mean", multi_trajectory=rule))
        return [s.advantages.max() + s.advantages.min() for s in compose.streams([group], config, 0.0)[0]]

    np.testing.assert_allclose(advantages("full"), [2 / 3, 2 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    np.testing.assert_allclose(advantages("divide"), [1 / 3, 1 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    np.testing.assert_allclose(advantages("statistics"), [0.5, 0.5, -0.5, -0.5], rtol=1e-6)  # mean of 1, 1, 0, 0


def test_an_episodes_trajectories_stay_in_one_update_and_count_once(rl, make_group):
    groups = [make_group(("pa paa pa", 1.0), ("paa", 0.0)) for _ in range(4)]
    config = rl(aggregation="rollout_mean", updates_per_step=4)
    streams = compose.streams(groups, config, 0.0)[0]
    updates = list(compose.mini_batches(streams, config, (0, 0)))
    episodes = [{s.episode for s in update} for update in updates]
    assert sum(map(len, episodes)) == 8 and len(set.union(*episodes)) == 8
    for update in updates:
        for episode in {s.episode for s in update}:
            total = sum(s.policy_weights.sum() for s in update if s.episode == episode)
            np.testing.assert_allclose(total, 1 / len({s.episode for s in update}), rtol=1e-6)


def test_the_reference_is_refreshed_on_schedule(rl):
    config = rl(kl=dict(coefficient=0.1, refresh_every=3))
    assert [step for step in range(1, 8) if compose.refresh_due(config, step)] == [3, 6]
    assert not any(compose.refresh_due(rl(kl=dict(coefficient=0.1)), step) for step in range(1, 8))


def test_failed_attempts_change_no_statistic_and_are_not_trained(rl, make_group):
    attempts = [("pa", 1.0), ("pa", 0.0), ("pa", 0.0)]
    clean, _ = compose.streams([make_group(*attempts)], rl(), 0.0)
    failed, counts = compose.streams([make_group(*attempts, ("pa", 0.0, StopReason.ENV_ERROR))], rl(), 0.0)
    assert counts["groups/failed_episodes"] == 1 and len(failed) == len(clean) == 3
    for a, b in zip(clean, failed, strict=True):
        np.testing.assert_array_equal(a.advantages, b.advantages)


def test_groups_without_signal_are_dropped_or_kept(rl, make_group):
    groups = [make_group(("pa", 1.0), ("pa", 1.0)), make_group(("pa", 1.0), ("pa", 0.0))]
    dropped, counts = compose.streams(groups, rl(), 0.0)
    assert len(dropped) == 2 and counts["groups/zero_signal_frac"] == 0.5
    kept, _ = compose.streams(groups, rl(advantage="group_mean_std"), 0.0)
    assert len(kept) == 4 and not kept[0].advantages.any() and kept[0].policy_weights.any()


def test_episodes_without_an_action_are_no_trajectory(rl, make_group):
    groups = [make_group(("ppo", 1.0), ("pa", 0.0), ("pa", 1.0))]
    assert len(sampled_trajectories(groups)) == 2
    assert len(compose.streams(groups, rl(), 0.0)[0]) == 2
    assert compose.streams([make_group(("ppo", 1.0))], rl(), 0.0)[0] == []


def test_nothing_predicts_a_trajectorys_first_token(make_trajectory):
    np.testing.assert_array_equal(action_mask(make_trajectory("aoa")), [0, 0, 1])


def test_along_tokens_failed_attempts_are_not_trained_and_the_last_token_needs_no_place_in_a_row(rl, make_group):
    group = make_group(("paaoa", 1.0), ("pa", 1.0, StopReason.TIMEOUT))
    config = rl(advantage="return", batch=dict(row_tokens=4))  # five tokens: four inputs
    (only,) = compose.streams([group], config, 0.0)[0]
    np.testing.assert_array_equal(only.advantages, [0, 1, 1, 0, 1])


def test_ppo_puts_the_reward_on_the_last_action_and_skips_the_observation(rl, make_group):
    group = make_group(("ppaooao", 1.0))
    advantage = dict(name="gae", gamma=0.5, lam=1.0, critic=dict(value_coefficient=2.0))
    values = [np.array([9, 9, 0.25, 9, 9, 0.5, 9], np.float32)]  # 9: never read
    (s,), _ = compose.streams([group], rl(advantage=advantage), 0.0, ModelScores(values=values))
    # last action: 1 - .5 = .5; first: .5 * .5 - .25 + .5 * .5 = .25; returns = value + advantage
    np.testing.assert_allclose(s.advantages, [0, 0, 0.25, 0, 0, 0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(s.returns, [0, 0, 0.5, 0, 0, 1.0, 0], rtol=1e-6)
    np.testing.assert_allclose(s.old_values, [0, 0, 0.25, 0, 0, 0.5, 0])
    np.testing.assert_allclose(s.value_weights, [0, 0, 2, 0, 0, 2, 0])


def test_kl_in_loss_and_entropy_are_weights(rl, make_group):
    config = rl(kl=dict(coefficient=0.1, where="loss"), entropy_coefficient=0.01)
    reference = [np.array([0, -2.0], np.float32)] * 2
    (s, _), _ = compose.streams([make_group(("pa", 1.0), ("pa", 0.0))], config, 0.0, ModelScores(reference=reference))
    np.testing.assert_allclose(s.kl_weights, [0, 0.1])
    np.testing.assert_allclose(s.entropy_weights, [0, 0.01])
    np.testing.assert_allclose(s.reference_logprobs, [0, -2.0])


def test_every_term_is_a_mean_over_the_update_times_its_coefficient(rl, make_group):
    group = make_group(("paaoa", 1.0), ("pa", 1.0), ("paoo", 1.0, StopReason.TIMEOUT))
    config = rl(
        advantage=dict(name="gae", critic=dict(value_coefficient=2.0)), updates_per_step=1, entropy_coefficient=0.01,
        z_loss=dict(coefficient=0.02), kl=dict(coefficient=0.1, where="loss"),
        positive_nll=dict(coefficient=0.3, min_reward=1.0),
        echo=dict(coefficient=0.05, schedule="linear_decay", denominator="token_mean"), aggregation="sequence_mean",
    )  # fmt: skip
    zeros = [np.zeros(len(t), np.float32) for t in sampled_trajectories([group])]
    streams, _ = compose.streams([group], config, 0.5, ModelScores(reference=zeros, values=zeros))
    (update,) = compose.mini_batches(streams, config, (0, 0))
    sums = {name: float(sum(getattr(s, f"{name}_weights").sum() for s in update)) for name in
            ("policy", "kl", "entropy", "z", "value", "nll", "ce")}  # fmt: skip
    expected = dict(policy=1.0, kl=0.1, entropy=0.01, z=0.02, value=2.0, nll=0.3)  # not of the failed attempt
    expected["ce"] = 0.025 * 3 / 3.001  # of all three sequences; half of the stage is over
    assert sums == pytest.approx(expected, rel=1e-6)
    # What is imitated is a mean over tokens, whatever the aggregation of the policy's term.
    (longer,) = (s for s in update if len(s.trajectory) == 5)
    np.testing.assert_allclose(longer.nll_weights, np.array([0, 1, 1, 0, 1]) * 0.3 / 4, rtol=1e-6)
    np.testing.assert_allclose(longer.policy_weights, np.array([0, 1, 1, 0, 1]) / 6, rtol=1e-6)


def test_echo_is_grpo_plus_observation_weights(rl, make_group):
    groups = [
        make_group(("paooa", 1.0), ("paow", 0.0), ("pao", 0.0, StopReason.TIMEOUT)),
        make_group(("paooo", 1.0), ("pa", 1.0)),  # no signal: world model only
    ]
    plain, _ = compose.streams(groups, rl(), 0.0)
    echoed, _ = compose.streams(groups, rl(echo=ECHO), 0.0)
    assert len(plain) == 2 and len(echoed) == 5
    for a, b in zip(plain, echoed[:2], strict=True):
        np.testing.assert_array_equal(a.policy_weights, b.policy_weights)
        np.testing.assert_array_equal(a.advantages, b.advantages)
    assert not any(s.policy_weights.any() for s in echoed[2:])
    np.testing.assert_allclose(echoed[1].ce_weights, [0, 0, 0.05, 0], rtol=1e-6)
    (update,) = compose.mini_batches(echoed, rl(echo=ECHO, updates_per_step=1), (0, 0))
    got = sorted(float(s.ce_weights.sum()) for s in update)
    # targets / (observation tokens + .001) / 5 sequences * .05; one of the two of "paow" is a warning
    expected = sorted(0.05 / 5 * n / (full + 1e-3) for n, full in ((2, 2), (1, 2), (1, 1), (3, 3), (0, 0)))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_mini_batches_part_evenly_cover_each_epoch_and_normalise_each_update(rl, make_group):
    groups = [make_group(("paoa", 1.0), ("paa", 0.0), ("pa", 0.0)) for _ in range(3)]
    streams, _ = compose.streams(groups, rl(), 0.0)
    updates = list(compose.mini_batches(streams, rl(updates_per_step=2, epochs=2), (1, 7)))
    assert [len(u) for u in updates] == [5, 4, 5, 4]
    for epoch in (updates[:2], updates[2:]):
        assert {id(s.trajectory) for u in epoch for s in u} == {id(s.trajectory) for s in streams}
    for update in updates:
        np.testing.assert_allclose(sum(s.policy_weights.sum() for s in update), 1.0, rtol=1e-6)
    again = list(compose.mini_batches(streams, rl(updates_per_step=2, epochs=2), (1, 7)))
    assert [[id(s.trajectory) for s in u] for u in updates] == [[id(s.trajectory) for s in u] for u in again]
    first, _, second, _ = ({id(s.trajectory) for s in u} for u in updates)
    assert first != second  # every epoch is shuffled anew
    assert list(compose.mini_batches([], rl(), (0, 0))) == []


@pytest.mark.parametrize("silent_frac", [0.5, 0.25, 0.0])
@pytest.mark.parametrize("updates", [1, 2, 4])
def test_what_is_there_for_an_auxiliary_term_is_spread_evenly_over_the_updates(rl, make_group, updates, silent_frac):
    """A token of the policy term weighs the same in every update, however silent groups are shuffled in."""
    silent = round(8 * silent_frac)
    groups = [make_group(("paoa", 1.0), ("paoa", 0.0)) for _ in range(8 - silent)]
    groups += [make_group(("paoa", 1.0), ("paoa", 1.0)) for _ in range(silent)]
    for seed in range(5):
        config = rl(echo=ECHO, updates_per_step=updates)
        parts = list(compose.mini_batches(compose.streams(groups, config, 0.0)[0], config, (seed, 0)))
        assert [len(part) for part in parts] == [16 // updates] * updates
        assert sorted(id(s.trajectory) for part in parts for s in part) == sorted(
            id(t) for t in sampled_trajectories(groups)
        )
        for part in parts:
            live = [s for s in part if s.policy_weights.any()]
            assert len(live) == (16 - 2 * silent) // updates
            for s in live:
                np.testing.assert_allclose(s.policy_weights[[1, 3]], 1 / (2 * len(live)), rtol=1e-6)


def test_uneven_numbers_make_updates_whose_sizes_differ_by_one(rl, make_group):
    groups = [make_group(("pao", 1.0), ("pa", 0.0), ("pa", 0.0)), make_group(("pao", 1.0), ("pao", 1.0))]
    config = rl(echo=ECHO, updates_per_step=3)
    groups += [make_group(("pa", 1.0), ("pa", 0.0))]
    parts = list(compose.mini_batches(compose.streams(groups, config, 0.0)[0], config, (0, 0)))
    assert [sum(bool(s.policy_weights.any()) for s in part) for part in parts] == [2, 2, 1]
    assert [len(part) for part in parts] == [2, 3, 2]


def test_without_auxiliary_terms_updates_are_the_shuffled_episodes_cut_evenly(rl, make_group):
    groups = [make_group(*[("pa", float(i == 0)) for i in range(5)]) for _ in range(3)]
    made = compose.streams(groups, rl(), 0.0)[0]
    parts = list(compose.mini_batches(made, rl(updates_per_step=4), (3, 5)))
    order = np.random.default_rng([3, 5, 0]).permutation(15)
    expected = [[id(made[i].trajectory) for i in part] for part in np.array_split(order, 4)]
    assert [[id(s.trajectory) for s in part] for part in parts] == expected


def test_no_groups_give_nothing(rl):
    assert compose.streams([], rl(), 0.0) == ([], {})


TRUNCATE = dict(name="truncate", low=0.0, high=2.0)
KEEPING = "group_mean_std"  # groups without signal
ONE_UPDATE = dict(updates_per_step=1, epochs=1)
IN_REWARD = dict(coefficient=0.1, where="reward")
TEACHER = dict(teacher="runs/x/policy")


def test_the_stage_opd_keeps_the_pull_to_the_reference(rl, make_group):
    """KL in the reward, which the stage does not have, goes into the advantage: it is not lost."""
    given = rl(kl=dict(coefficient=0.05, where="reward", estimator="k1"), mask_truncated=True)
    alone = as_opd(dataclasses.replace(config.parse(get_config("laptop-opd")), rl=given)).rl
    alone = dataclasses.replace(alone, distill=rl(distill=TEACHER).distill)
    checks.check(alone)
    group = make_group(("pa", 1.0), ("pa", 0.0, StopReason.TOKEN_LIMIT))  # behaviour log-prob -1
    none = np.zeros((2, 1), np.float32)
    teacher = [Scores(np.array([0.0, -1.0], np.float32), none.astype(np.int32), none, none)] * 2
    reference = [np.array([0.0, -3.0], np.float32)] * 2
    made, _ = compose.streams([group], alone, 0.0, ModelScores(reference=reference, teacher=teacher))
    assert len(made) == 2  # every attempt is used
    for s in made:  # the teacher agrees, the reference finds it less likely by 2 nats
        np.testing.assert_allclose(s.advantages, [0, -0.05 * 2], rtol=1e-6)


FORKS = dict(advantage="tree", branching="planned")
REFUSED = (  # changes of rl, and what is said of them
    (dict(advantage="vtrace", correction=TRUNCATE), "holds importance weights already"),
    (dict(advantage="vtrace", correction=dict(name="opsm")), "'opsm' with an rl.advantage that holds"),
    (dict(advantage="gae_bilevel", kl=IN_REWARD), "kl.where='reward' would lose the KL"),
    (dict(objective="reinforce", updates_per_step=2), "only the first is on-policy: set both to 1"),
    (dict(objective="reinforce", updates_per_step=1, epochs=3), "only the first is on-policy: set both to 1"),
    (ONE_UPDATE | dict(objective="reinforce", staleness=4), "rl.staleness=4 steps old: set rl.correction to"),
    (dict(advantage="vtrace_turns", correction=TRUNCATE), "holds importance weights already"),
    (dict(objective="gspo", correction=TRUNCATE | dict(name="mask")), "take tokens out of the sequences"),
    (dict(objective="gmpo", correction=TRUNCATE | dict(name="mask")), "sequences that rl.objective='gmpo'"),
    (dict(advantage="maxrl", kl=IN_REWARD), "kl.where='reward' would make rewards negative"),
    (dict(advantage="no_reward", kl=IN_REWARD), "kl.where='reward' does nothing with rl.advantage='no_reward'"),
    (dict(objective="none"), "nothing would be learnt"),
    (dict(objective="none", echo=ECHO, kl=IN_REWARD), "kl.where='reward' does nothing with rl.objective='none'"),
    (dict(objective="none", distill=TEACHER), "loss='sampled' is an advantage"),
    (dict(distill=TEACHER, advantage=KEEPING, refill=dict(max_rounds=2)), "refill=none"),
    (dict(distill=TEACHER, advantage=KEEPING, keep_groups_frac=0.5), "keep_groups_frac=1"),
    (dict(positive_nll=dict(coefficient=0.1), replay=dict(per_step=2, use="nll")), "use one of them"),
    (dict(advantage="tree"), "reads forks: set rl.branching=planned"),
    (dict(branching="planned"), "rl.advantage takes them for independent: use 'vine_ppo', "),
    (
        FORKS | dict(branching=dict(name="planned", roots=8)),
        r"rl.branching.roots \(8\) must be less than rl.group_size",
    ),
    (FORKS | dict(aggregation="sequence_mean"), "must be 'constant' or 'token_mean' where forks are learnt from"),
    (FORKS | dict(oversample=dict(extra_attempts=1)), "rl.branching needs rl.oversample=none"),
    (FORKS | dict(keep_groups_frac=0.5), "rl.branching needs rl.keep_groups_frac=1.0"),
    (FORKS | dict(tool_epsilon=0.1), "rl.branching needs rl.tool_epsilon=0.0"),
    (FORKS | dict(group_reward="preferences"), "rl.branching needs rl.group_reward=none"),
    (FORKS | dict(branching="jaxagent.algorithms.estimators:GAE"), "must extend Branching of jaxagent.algorithms.bran"),
)


def test_check_refuses_what_cannot_mean_anything(rl):
    checks.check(rl())
    for changes, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            checks.check(rl(**changes))
    checks.check(rl(objective="reinforce", **ONE_UPDATE))
    checks.check(rl(**FORKS))
    checks.check(rl(advantage="vine_ppo", branching="planned", aggregation="sequence_mean"))
    checks.check(rl(objective="reinforce", staleness=4, correction=TRUNCATE, **ONE_UPDATE))
    checks.check(rl(objective="importance_sampling", staleness=4, updates_per_step=2))
    checks.check(rl(advantage="gae_bilevel", kl=dict(coefficient=0.1, where="loss")))


def test_the_critic_and_the_policys_own_scores_are_asked_for_only_when_read(rl):
    assert rl(advantage="gae").critic is not None and rl().critic is None and rl(advantage="return").critic is None
    assert rl(advantage="vtrace").reads_old and rl(correction=TRUNCATE).reads_old
    assert not rl().reads_old and not rl(correction="opsm").reads_old


def test_reinforce_plus_plus_gives_each_token_what_comes_after_it(rl, make_group):
    group = make_group(("pa", 0.0), ("paoa", 1.0))  # behaviour log-prob -1 on every action
    kl = dict(coefficient=0.1, estimator="k1", where="reward")
    reference = [np.array([0, -1.0], np.float32), np.array([0, -3.0, 9.0, -1.5], np.float32)]
    config = rl(advantage="return", kl=kl)
    first, second = compose.streams([group], config, 0.0, ModelScores(reference=reference))[0]
    # Token rewards: 0; -0.1 * (-1 + 3) = -0.2 and -0.1 * (-1 + 1.5) + 1 = 0.95.
    np.testing.assert_allclose(first.advantages, [0, 0])
    np.testing.assert_allclose(second.advantages, [0, 0.75, 0, 0.95], rtol=1e-6)
    assert not second.value_weights.any() and not second.kl_weights.any()
    white = compose.streams(
        [group], dataclasses.replace(config, whiten_advantages=True), 0.0, ModelScores(reference=reference)
    )[0]
    values = np.array([0.0, 0.75, 0.95])
    expected = (values - values.mean()) / values.std(ddof=1)
    np.testing.assert_allclose([*white[0].advantages[1:], *white[1].advantages[[1, 3]]], expected, rtol=1e-5)


def scored(make_group, rewards, seed=0):
    """A group of these rewards, with random log-probs of its sampler, a reference, and the learner before the step."""
    rng, group = np.random.default_rng(seed), make_group(*(("paoa", reward) for reward in rewards))
    episodes = [
        dataclasses.replace(e, trajectories=[dataclasses.replace(t, logprobs=np.float32(rng.normal(-1, 0.3, 4)))])
        for e in group.episodes
        for t in e.trajectories
    ]
    group = dataclasses.replace(group, episodes=episodes)
    reference, old = (rng.normal(-1, 0.3, (len(rewards), 4)).astype(np.float32) for _ in range(2))
    sampler = np.array([e.trajectories[0].logprobs for e in episodes], np.float64)
    return group, sampler[:, [1, 3]], ModelScores(reference=list(reference), old=list(old))


@pytest.mark.parametrize("where", ["reward", "advantage"])
def test_kl_is_taken_off_before_whitening_and_is_that_of_the_sampler(rl, make_group, where):
    """slime's and verl's order: A = whiten(R - mean(R) - KL); k1 of the log-probs recorded when sampling, in NumPy.

    Not of the learner's own, which a correction reads beside it and which differ from the sampler's here.
    """
    group, sampler, scores = scored(make_group, [1.0, 0.0, 0.5])
    kl = 0.3 * (sampler - np.array(scores.reference)[:, [1, 3]])
    rewards = np.array([1.0, 0.0, 0.5])
    if where == "reward":
        rewards = rewards - kl.sum(axis=1)
    expected = np.repeat((rewards - rewards.mean())[:, None], 2, axis=1) - (kl if where == "advantage" else 0.0)
    for whitened in (False, True):
        config = rl(
            advantage="group_mean", whiten_advantages=whitened, correction=dict(name="truncate"), epochs=2,
            kl=dict(coefficient=0.3, estimator="k1", where=where),
        )  # fmt: skip
        got = np.array([s.advantages[[1, 3]] for s in compose.streams([group], config, 0.0, scores)[0]])
        wanted = (expected - expected.mean()) / expected.std(ddof=1) if whitened else expected
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("advantage", ["group_mean_std", "turn_mean_std"])
def test_whether_a_group_has_signal_is_asked_of_its_rewards_before_kl(rl, make_group, advantage):
    """With KL in the reward no group of random log-probs has equal scores; ToolRL's recipe trains such groups."""
    group, _, scores = scored(make_group, [1.0, 1.0, 1.0])
    kl = dict(coefficient=0.001, estimator="k1", where="reward")
    for drop, trained in ((True, 0), (False, 3)):
        config = rl(advantage=dict(name=advantage, drop_zero_signal=drop), kl=kl)
        streams, counts = compose.streams([group], config, 0.0, scores)
        assert (len(streams), counts["groups/zero_signal"]) == (trained, 1.0)
        # Divided by their own std, advantages made of KL alone are of full size.
        assert not trained or max(abs(s.advantages).max() for s in streams) > 0.5
