"""Agent Q: the search by hand and against one over explicit nodes; pairs against DPO's own streams."""

import dataclasses
import math

import numpy as np
import pytest

from jaxagent.algorithms import checks, supervised, trial
from jaxagent.algorithms.agent_q import UCB, BranchPairs
from jaxagent.config import ConfigError
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory
from tests.algorithms.test_branches import arrays, simulated

TASK = Task("t", "", ())
RNG = np.random.default_rng(0)


def episode(sample, reward, turns, fork_of=None, forked_at=0, stop=StopReason.ANSWER):
    return Episode(TASK, sample, (), reward, {}, stop, turns, fork_of=fork_of, forked_at=forked_at)


def test_the_search_goes_down_the_better_branch_and_then_where_it_was_seldom():
    rule = UCB(roots=2, actions=2)
    roots = [episode(16, 0.0, 4), episode(17, 1.0, 3)]
    assert rule.choose(roots, 2, RNG) == (1, 1)  # the start is full: attempt 1 is better, and its next state is not
    three = [*roots, episode(18, 1.0, 5, 17, 1)]
    # Through attempt 1's first turn: 2 of 3, Q 1; down to its second state, of which both children are equal.
    assert rule.choose(three, 3, RNG) == (1, 2)
    bad = [episode(16, 0.5, 4), episode(17, 0.6, 3), episode(18, 0.0, 5, 17, 1)]
    # Q .5 + (log 3 / 2)^.5 against .3 + (log 3 / 3)^.5: the other branch
    assert rule.choose(bad, 3, RNG) == (0, 1)
    assert UCB(roots=2, actions=3).choose(roots, 2, RNG)[1] == 0, "the start has room for a third"


def test_what_has_ended_or_failed_is_passed_over():
    rule = UCB(roots=2, actions=2)
    assert rule.choose([episode(0, 1.0, 1), episode(1, 0.0, 3)], 2, RNG) == (1, 1)
    assert rule.choose([episode(0, 1.0, 1), episode(1, 0.0, 1)], 2, RNG)[1] == 0
    failed = episode(1, 0.0, 3, stop=StopReason.ENV_ERROR)
    assert rule.choose([episode(0, 1.0, 2), failed], 2, RNG)[1] == 0
    assert rule.choose([failed, failed], 2, RNG) == (0, 0)


def test_forks_that_choose_together_wait_for_the_same_attempts():
    assert [UCB(roots=2, at_once=3).waits_for(place) for place in range(2, 9)] == [2, 2, 2, 5, 5, 5, 8]
    assert UCB(roots=2, at_once=3).rounds(8) == 3 and UCB(roots=2).rounds(8) == 7


def by_nodes(group, explore, actions):
    """The search over explicit nodes: a node is the list of who has played each turn on the way to it."""
    paths = []
    for place, game in enumerate(group):
        copied = paths[game.parent][: game.first] if game.parent >= 0 else []
        paths.append([*copied, *[(place, turn) for turn in range(game.first, len(game.path))]])
    reward = [game.episode.reward for game in group]
    node = []
    while True:
        here = [p for p, path in enumerate(paths) if path[: len(node)] == node]
        children = sorted({paths[p][len(node)] for p in here if len(paths[p]) > len(node)})
        if not children:
            return None
        through = {c: [p for p in here if len(paths[p]) > len(node) and paths[p][len(node)] == c] for c in children}
        further = [c for c in children if any(len(paths[p]) > len(node) + 1 for p in through[c])]
        if len(children) < actions or not further:
            return node
        seldom = {c: explore * math.sqrt(math.log(len(here)) / (1 + len(through[c]))) for c in children}
        score = {c: math.fsum(reward[p] for p in through[c]) / len(through[c]) + seldom[c] for c in further}
        node = [*node, max(further, key=score.get)]


@pytest.mark.parametrize(("explore", "actions"), [(1.0, 2), (0.0, 2), (0.5, 3)])
def test_it_is_the_search_over_nodes(explore, actions):
    rule = UCB(roots=2, actions=actions, explore=explore)
    for seed, group in enumerate(simulated(rule, size=8, count=60, seed=3)):
        for size in range(2, 8):
            some = group[:size]
            episodes = [
                dataclasses.replace(g.episode, sample=100 + i, fork_of=100 + g.parent if g.parent >= 0 else None,
                                    forked_at=g.first)
                for i, g in enumerate(some)
            ]  # fmt: skip
            chosen, turn = rule.choose(episodes, size, np.random.default_rng(seed))
            node = by_nodes(some, explore, actions)
            assert node is not None and len(node) == turn
            if turn:
                owners = [chosen] * turn
                at = chosen
                for t in reversed(range(turn)):
                    while some[at].parent >= 0 and t < some[at].first:
                        at = some[at].parent
                    owners[t] = at
                assert [who for who, _ in node] == owners


def pairs_by_nodes(group, min_gap):
    """Per attempt and own turn: half of (worse siblings - better ones), from lists of paths alone."""
    paths = []
    for place, game in enumerate(group):
        copied = paths[game.parent][: game.first] if game.parent >= 0 else []
        paths.append([*copied, *[(place, turn) for turn in range(game.first, len(game.path))]])
    reward = [game.episode.reward for game in group]
    q = lambda prefix: np.mean([r for path, r in zip(paths, reward, strict=True) if path[: len(prefix)] == prefix])  # noqa: E731
    out = []
    for game, path in zip(group, paths, strict=True):
        numbers = []
        for turn in range(game.first, len(path)):
            siblings = {
                tuple(other[: turn + 1]) for other in paths if other[:turn] == path[:turn] and len(other) > turn
            }
            gaps = [q(path[: turn + 1]) - q(list(other)) for other in siblings if list(other) != path[: turn + 1]]
            numbers.append(0.5 * sum(np.sign(gap) for gap in gaps if abs(gap) > 1e-12 and abs(gap) >= min_gap))
        out.append(numbers)
    return out


@pytest.mark.parametrize("min_gap", [0.0, 0.37])
def test_pairs_are_those_of_turns_played_in_one_state(min_gap):
    groups = simulated(UCB(roots=2), size=8, count=80, seed=1)
    numbers = BranchPairs(min_gap=min_gap)(*arrays(groups))
    for group, rows in zip(groups, numbers, strict=True):
        for wanted, row in zip(pairs_by_nodes(group, min_gap), rows, strict=True):
            np.testing.assert_allclose(row[: len(wanted)], wanted)
    assert np.abs(numbers).max() > 0.5 and abs(numbers.sum()) < 1e-9, "each pair lifts one turn and lowers one"


def trajectory(seed, tokens=4):
    rng = np.random.default_rng(seed)
    kinds = np.array([TokenKind.PROMPT] + [TokenKind.ACTION] * tokens, np.uint8)
    number = np.arange(tokens + 1, dtype=np.int32)
    logprobs = np.where(kinds == TokenKind.ACTION, -rng.random(tokens + 1), 0).astype(np.float32)
    return Trajectory(number, kinds, logprobs, number, np.zeros(tokens + 1, np.int32))


def test_a_pair_has_dpos_gradient_where_the_reference_has_sampled():
    won, lost = (Episode(TASK, i, (trajectory(i),), 1.0 - i, {}, StopReason.ANSWER, 1) for i in range(2))
    logprobs = [won.trajectories[0].logprobs, lost.trajectories[0].logprobs]
    beta = 0.3
    streams, counts = supervised.dpo_streams([supervised.Pair(won, lost)], logprobs, logprobs, beta, False, 0.0)
    one, ones = np.ones((1, 2, 1)), np.ones((1, 2, 1), bool)
    numbers = BranchPairs()(one * [[[1.0], [0.0]]], ones, np.full((1, 2), -1), np.zeros((1, 2), int))
    for stream, number in zip(streams, numbers[0, :, 0], strict=True):
        np.testing.assert_allclose(stream.nll_weights[1:], beta * number)
    assert counts["dpo/margin"] == 0.0 and numbers.ravel().tolist() == [0.5, -0.5]


def test_it_needs_forks_and_one_update(rl):
    choices = dict(advantage="branch_pairs", objective="reinforce", branching="ucb", group_size=8)
    fine = rl(**choices, aggregation="token_mean", updates_per_step=1)
    checks.check(fine)
    trial.check_answers(fine)
    with pytest.raises(ConfigError, match="only the first is on-policy"):
        checks.check(rl(**choices, aggregation="token_mean", updates_per_step=2))
    with pytest.raises(ConfigError, match="reads forks: set rl"):
        checks.check(rl(**choices | dict(branching=None), aggregation="token_mean", updates_per_step=1))
