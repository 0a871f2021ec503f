"""Replay of past successes: what is kept, what is chosen, what it weighs, and that none of it is lost."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxagent.algorithms.corrections import Importance
from jaxagent.algorithms.estimators import GAE, GroupMean, GroupMeanStd
from jaxagent.config import ReplayConfig
from jaxagent.data import codec
from jaxagent.rollout import replay
from jaxagent.rollout.replay import ReplayBuffer, Success
from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory

CFG = ReplayConfig(per_step=2, capacity=4, use="nll", coefficient=0.1, min_reward=1.0, low=0.5, high=0.95)
TIS = Importance()
P, A, O = TokenKind.PROMPT, TokenKind.ACTION, TokenKind.OBSERVATION  # noqa: E741


def trajectory(seed, kinds=(P, A, A, O, A), logprob=-1.0):
    kinds = np.array(kinds, np.uint8)
    rng = np.random.default_rng(seed)
    return Trajectory(
        tokens=rng.integers(0, 50_000, len(kinds)).astype(np.int32),
        kinds=kinds,
        logprobs=np.where(kinds == A, logprob + rng.normal(size=len(kinds)) / 9, 0).astype(np.float32),
        policy_versions=np.where(kinds == A, seed, -1).astype(np.int32),
        turns=np.arange(len(kinds), dtype=np.int32),
    )


def group(name, rewards, failed=()):
    task = Task(name, "?", ("a",))
    episodes = [
        Episode(task, i, (trajectory(i),), r, {}, StopReason.TIMEOUT if i in failed else StopReason.ANSWER, 1)
        for i, r in enumerate(rewards)
    ]
    return Group(task, tuple(episodes))


def success(name, logprobs):
    """One attempt, and its action tokens' log-probs under the policy."""
    t = trajectory(0, (P, *[A] * len(logprobs)))
    return Success(name, 0, 1.0, 0.5, (t,)), [np.array([0.0, *logprobs], np.float32)]


def same(a, b):
    pairs = ((getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return all(x is y is None or (np.array_equal(x, y) and x.dtype == y.dtype) for x, y in pairs)


def test_it_keeps_successes_in_task_order_with_the_advantage_of_their_group():
    buffer = ReplayBuffer(CFG, 0)
    buffer.record([group("a", [1.0, 0.0, 0.0, 0.0]), group("b", [1.0, 1.0], failed=[1])], 3, GroupMean())
    kept = buffer.get_state()
    assert [(s["task_id"], s["step"], s["advantage"]) for s in kept] == [("a", 3, 0.75), ("b", 3, 0.0)]  # left alone
    alone = ReplayBuffer(CFG, 0)  # an advantage along tokens is none of an attempt
    alone.record([group("a", [1.0, 0.0])], 0, GAE())
    assert [s["advantage"] for s in alone.get_state()] == [0.0]


def test_the_oldest_are_forgotten_first():
    buffer = ReplayBuffer(CFG, 0)
    for step in range(3):
        buffer.record([group(f"t{step}", [1.0, 1.0])], step, GroupMean())
    assert [s["step"] for s in buffer.get_state()] == [1, 1, 2, 2]
    buffer.record([group("x", [1.0])], 3, GroupMean())
    assert [s["task_id"] for s in buffer.get_state()] == ["t1", "t2", "t2", "x"]


def test_a_saved_buffer_is_the_same_to_the_bit():
    buffer, again = ReplayBuffer(CFG, 5), ReplayBuffer(CFG, 5)
    task = Task("two", "?", ("a",))
    both = (trajectory(8), trajectory(9, (P, A)))
    episode = Episode(task, 0, both, 1.0, {}, StopReason.ANSWER, 1)
    buffer.record([group("a", [1.0, 0.0]), Group(task, (episode,))], 1, GroupMeanStd())
    again.set_state(json.loads(json.dumps(buffer.get_state())))
    bundled = buffer.get_state()[1]["trajectories"]
    assert json.loads(json.dumps(bundled)) == [codec.encode_trajectory(t) for t in both], "the one codec"
    assert len(again) == len(buffer) == 2 and again.get_state() == buffer.get_state()
    for mine, theirs in zip(buffer.candidates(7), again.candidates(7), strict=True):
        assert dataclasses.replace(mine, trajectories=()) == dataclasses.replace(theirs, trajectories=())
        assert all(same(a, b) for a, b in zip(mine.trajectories, theirs.trajectories, strict=True))


def test_probability_is_over_the_action_tokens_of_the_whole_attempt():
    t = (trajectory(0, (P, A, O, A)), trajectory(1, (P, A)))
    scores = [np.array([9, -1, 9, -2], np.float32), np.array([9, -3], np.float32)]
    assert replay.token_probability(Success("a", 0, 1.0, 0.0, t), scores) == pytest.approx(math.exp(-2.0))


def test_the_window_by_hand():
    rows = [success(n, [math.log(p)] * 3) for n, p in [("a", 0.5), ("b", 0.51), ("c", 0.96), ("d", 0.94), ("e", 0.7)]]
    by_id = {id(success.trajectories[0]): logprobs[0] for success, logprobs in rows}
    asked = []

    def score(trajectories):
        asked.append(len(trajectories))
        return [by_id[id(t)] for t in trajectories]

    chosen, looked = replay.choose([success for success, _ in rows], score, CFG)
    assert [success.task_id for success, _ in chosen] == ["b", "d"] and (looked, asked) == (4, [4])
    three = dataclasses.replace(CFG, per_step=1)
    chosen, looked = replay.choose([success for success, _ in rows[2:]], score, three)
    assert [success.task_id for success, _ in chosen] == ["d"] and looked == 2
    chosen, looked = replay.choose([rows[0][0], rows[2][0]], score, CFG)
    assert (chosen, looked) == ([], 2)
    exactly = dataclasses.replace(CFG, low=0.25, high=0.5)  # (0.25, 0.5]: log .5 in f32 is a little below
    assert replay.choose([rows[0][0]], score, exactly)[0]


def test_candidates_come_in_an_order_of_the_step():
    buffer = ReplayBuffer(dataclasses.replace(CFG, capacity=40), 0)
    buffer.record([group("a", [1.0] * 40)], 0, GroupMean())
    orders = [tuple(int(s.trajectories[0].tokens[0]) for s in buffer.candidates(step)) for step in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == sorted(orders[2])


def test_nll_streams():
    (s,) = replay.streams([success("a", [-0.3, -0.1])], CFG, TIS, 17)
    np.testing.assert_allclose(s.nll_weights, [0, 0.1, 0.1], rtol=1e-6)
    assert s.episode == 17 and not s.policy_weights.any() and not s.advantages.any()


def test_policy_streams_are_corrected_by_hand():
    one = success("a", [-0.5, -3.0])
    behaviour = one[0].trajectories[0].logprobs[1:]
    cfg = dataclasses.replace(CFG, use="policy", coefficient=2.0)
    (s,) = replay.streams([one], cfg, TIS, 0)
    expected = np.clip(np.exp(np.array([-0.5, -3.0]) - behaviour), 0, 2)
    np.testing.assert_allclose(s.corrections[1:], expected, rtol=1e-6)
    np.testing.assert_array_equal(s.policy_weights, [0, 1, 1])
    np.testing.assert_array_equal(s.advantages, [0, 1.0, 1.0])  # .5 of its group, times 2
    # Compared with itself: the gap between engine and trainer is a number about this step's samples.
    np.testing.assert_array_equal(s.trajectory.logprobs, np.array([0, -0.5, -3.0], np.float32))
    np.testing.assert_array_equal(s.old_logprobs, s.trajectory.logprobs)
    vetoing = dataclasses.replace(TIS, veto=0.5)
    assert replay.streams([one], cfg, vetoing, 0) == []  # exp(-3 - about -1) < .5


def of_turns(name, *turns):
    """An attempt whose turns, an observation before each, have tokens of these probabilities."""
    kinds = [P] + [kind for turn in turns for kind in (*[A] * len(turn), O)]
    t = dataclasses.replace(
        trajectory(0, kinds), turns=np.array([0] + [k for k, x in enumerate(turns) for _ in (*x, 0)])
    )
    logprobs = np.array([0.0] + [math.log(p) for turn in turns for p in (*turn, 1.0)], np.float32)
    return Success(name, 0, 1.0, 0.5, (t,)), [logprobs]


BY_TURN = dataclasses.replace(CFG, turns=True, per_step=4, use="reference", coefficient=0.5)


def test_turns_are_chosen_one_by_one_by_their_own_probability():
    # The whole attempt of "a" would be too sure; one of its turns is not. The geometric mean counts.
    rows = [of_turns("a", (0.99, 0.99), (0.6, 0.9), (0.5,)), of_turns("b", (0.2,)), of_turns("c", (0.7,), (0.8, 0.9))]
    assert not replay.choose([rows[0][0]], lambda _: rows[0][1], dataclasses.replace(CFG, high=0.7))[0]
    by_id = {id(s.trajectories[0]): x[0] for s, x in rows}
    chosen, looked = replay.choose([s for s, _ in rows], lambda ts: [by_id[id(t)] for t in ts], BY_TURN)
    assert [(s.task_id, replay.turns_of(s.trajectories[0])) for s, _ in chosen] == [("a", [1]), ("c", [0, 1])]
    two = dataclasses.replace(BY_TURN, per_step=2)
    chosen, _ = replay.choose([s for s, _ in rows], lambda ts: [by_id[id(t)] for t in ts], two)
    assert [replay.turns_of(s.trajectories[0]) for s, _ in chosen] == [[1], [0]] and looked == 3
    assert rows[0][0].trajectories[0].action_mask.sum() == 5, "what is kept is not changed"


def test_replayed_turns_are_compared_with_the_reference_alone():
    row = of_turns("a", (0.99,), (0.6, 0.9))
    chosen, _ = replay.choose([row[0]], lambda _: row[1], BY_TURN)
    (s,) = replay.streams(chosen, BY_TURN, None, 3, lambda ts: [np.full(len(t), -2.0, np.float32) for t in ts])
    np.testing.assert_array_equal(s.policy_weights, [0, 0, 0, 1, 1, 0])
    np.testing.assert_array_equal(s.advantages, [0, 0, 0, 0.5, 0.5, 0])
    np.testing.assert_array_equal(s.reference_logprobs[3:5], [-2, -2])
    np.testing.assert_allclose(s.trajectory.logprobs[3:5], np.log([0.6, 0.9]), rtol=1e-6)
    assert s.episode == 3 and (s.corrections == 1).all()


@pytest.mark.parametrize(("turns", "most"), [(True, 6), (False, 2)])
def test_at_most_so_many_times_what_the_step_has_sampled(turns, most):
    cfg = dataclasses.replace(CFG, turns=turns, times=2.0, per_step=100, capacity=50)
    buffer = ReplayBuffer(cfg, 0)
    buffer.record([group("a", [1.0] * 40)], 0, GroupMean())
    new = trajectory(3)
    learnt = replay.Streams.of(new, 7, policy_weights=replay.action_mask(new))
    beside = [learnt, replay.Streams.of(new, 8)]  # of which the second is not learnt from
    scores = lambda ts: [np.full(len(t), math.log(0.7), np.float32) for t in ts]  # noqa: E731
    out, counts = buffer.replayed(1, scores, TIS, beside)
    assert len({s.episode for s in out}) == counts["replay/used"] == 2 and min(s.episode for s in out) == 9
    assert counts.get("replay/turns", 2.0) == most
    assert buffer.replayed(1, scores, TIS, [])[0] == []
