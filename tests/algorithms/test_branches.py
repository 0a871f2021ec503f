"""Values and advantages of forks on a small game whose values and gradient are known exactly."""

import dataclasses

import numpy as np
import pytest

from jaxagent.algorithms.branches import BranchAdvantage, Tree, TreeRL, TreeValues, VinePPO
from jaxagent.algorithms.branching import Branching, Planned
from jaxagent.types import Episode, StopReason, Task
from tests.branching_game import CHANCES, GRADIENT, TURNS, VALUE, outcome, sigmas, value

TASK = Task("t", "", ())


@dataclasses.dataclass
class Game:
    """An attempt: (place, action, paid) of all its turns, those that it has copied first."""

    path: list
    parent: int = -1
    first: int = 0

    @property
    def episode(self):
        return Episode(TASK, 0, (), sum(paid for *_, paid in self.path), {}, StopReason.ANSWER, len(self.path))


def play(rng, parent=-1, copied=()):
    path, place = list(copied), copied[-1][1] if copied else 0  # an action is the place after it
    while True:
        turn, action = len(path), int(rng.random() < CHANCES[place])
        paid, after, over = outcome(turn, place, action)
        path.append((place, action, paid))
        place = after
        if over:
            return Game(path, parent, len(copied))


def games(rule, size, rng):
    group = []
    for at in range(size):
        if at < rule.roots:
            group.append(play(rng))
            continue
        episodes = [game.episode for game in group[: rule.waits_for(at)]]
        parent, turn = rule.choose(episodes, at, rng)
        while turn and group[parent].parent >= 0 and turn <= group[parent].first:
            parent = group[parent].parent
        group.append(play(rng, parent, group[parent].path[:turn]))
    return group


def arrays(groups):
    shape = (len(groups), len(groups[0]), TURNS)
    rewards, mask = np.zeros(shape), np.zeros(shape, bool)
    parents, firsts = np.full(shape[:2], -1), np.zeros(shape[:2], int)
    for n, group in enumerate(groups):
        for a, game in enumerate(group):
            own = [paid for _, _, paid in game.path[game.first :]]
            rewards[n, a, : len(own)], mask[n, a, : len(own)] = own, True
            parents[n, a], firsts[n, a] = game.parent, game.first
    return rewards, mask, parents, firsts


def gradients(advantage, groups):
    """The estimate of the gradient that each group makes, by its attempts' own turns: [N, 2 * TURNS]."""
    out = np.zeros((len(groups), 2 * TURNS))
    for n, (group, numbers) in enumerate(zip(groups, advantage(*arrays(groups)), strict=True)):
        for game, row in zip(group, numbers, strict=True):
            for turn, (place, action, _) in enumerate(game.path[game.first :], game.first):
                number = row[turn - game.first]
                out[n, 2 * turn + place] += number * (action - CHANCES[place])
    return out


class LooksAhead(Branching):
    """What went badly is tried again from its last turn."""

    def choose(self, episodes, attempt, rng):
        parent = int(np.argmin([episode.reward for episode in episodes]))
        return parent, episodes[parent].turns - 1


@dataclasses.dataclass(frozen=True)
class Nested(Branching):
    """Forks of forks: each goes on from a turn, planned before, of the attempt before it."""

    def waits_for(self, attempt):
        return attempt

    def choose(self, episodes, attempt, rng):
        turn = int(rng.integers(1, 3))
        return attempt - 1, turn if turn < episodes[-1].turns else 0


class Unweighted(TreeValues):
    def of_attempt(self, tree, a):
        return [number / w for number, w in zip(super().of_attempt(tree, a), tree.weights(a), strict=True)]


class OwnInBaseline(TreeValues):
    """V(s_k) as the mean of all that went on from the state, the turn's own branch among them."""

    def of_attempt(self, tree, a):
        numbers = []
        for turn, weight in zip(range(tree.first[a], tree.end(a)), tree.weights(a), strict=True):
            owner, at = tree.state(a, turn)
            own = [a] if owner == a else [owner] if owner >= 0 else []
            level = [tree.worth(other, at) for other in {*own, *tree.begun[owner, at]}]
            numbers.append(weight * (tree.worth(a, turn) - np.mean(level)))
        return numbers


def simulated(rule, size=6, count=4000, seed=0):
    rng = np.random.default_rng(seed)
    return [games(rule, size, rng) for _ in range(count)]


@pytest.fixture(scope="module")
def planned():
    return simulated(Planned(roots=2, turns=2))


def started(groups):
    """Attempts of a group that are played from the start, on average: what the gradient is multiplied by."""
    return np.mean([sum(game.first == 0 for game in group) for group in groups])


def test_values_are_those_of_the_game(planned):
    """Of the start, and of the state after each first action, by all that went on from there."""
    starts, after = [], {0: [], 1: []}
    for rewards, mask, parents, firsts in zip(*arrays(planned), strict=True):
        tree = Tree(rewards, mask, parents, firsts)
        starts += [tree.worth(a, 0) for a in (0, 1)]
        for a in (0, 1):
            action = int(rewards[a, 0] == 0.0)
            after[action].append(tree.worth(a, 0) - rewards[a, 0])
    assert sigmas(np.array(starts)[:, None], VALUE) < 3
    for action, found in after.items():
        assert sigmas(np.array(found)[:, None], value(1, action)[0]) < 3


def test_gradients_are_those_of_the_game(planned):
    assert sigmas(gradients(VinePPO(), planned) / 2, GRADIENT) < 3  # of two roots; forks only tell values
    for advantage in (VinePPO(train_forks=True), TreeValues()):
        assert sigmas(gradients(advantage, planned) / started(planned), GRADIENT) < 3


def test_gradients_of_forks_of_forks_are_those_of_the_game():
    groups = simulated(Nested(roots=2), size=5)
    assert max(game.first and groups[0] is not None and game.parent for group in groups for game in group) >= 2
    assert sigmas(gradients(TreeValues(), groups) / started(groups), GRADIENT) < 3


@pytest.mark.parametrize("advantage", [Unweighted(), OwnInBaseline(), TreeRL()])
def test_other_weights_and_baselines_are_seen_to_be_wrong(planned, advantage):
    samples = gradients(advantage, planned)
    scaled = samples * (GRADIENT @ GRADIENT / (samples.mean(axis=0) @ GRADIENT))  # the direction is looked at alone
    assert sigmas(scaled, GRADIENT) > 5


def test_a_rule_that_looks_ahead_is_seen_to_be_wrong():
    groups = simulated(LooksAhead(roots=2))
    starts = []
    for rewards, mask, parents, firsts in zip(*arrays(groups), strict=True):
        tree = Tree(rewards, mask, parents, firsts)
        starts += [tree.worth(a, 0) for a in (0, 1)]
    assert sigmas(np.array(starts)[:, None], VALUE) > 5


def test_by_hand():
    """Root 0: turns paid 1, 2; root 1: 5. Fork 2 of root 0 at turn 1: 4, 0. Fork 3 did not find its turn: 3."""
    rewards = np.array([[[1.0, 2.0], [5.0, 0.0], [4.0, 0.0], [3.0, 0.0]]])
    mask = np.array([[[True, True], [True, False], [True, True], [True, False]]])
    parents, firsts = np.array([[-1, -1, 0, 1]]), np.array([[0, 0, 1, 0]])
    # Root 0, turn 0: 1 + V(fork) = 5 against roots 1 and 3's mean 4; turn 1: 2 against the fork's 4. Root 1: 5 against
    # what root 0 earned, 3: attempt 3 is there because of root 1.
    np.testing.assert_allclose(VinePPO()(rewards, mask, parents, firsts), [[[1, -2], [2, 0], [0, 0], [0, 0]]])
    # Tree: V(s1) = mean(2, 4) = 3, so root 0 is worth 4. Fork: turn 0 is 4 against 2, turn 1 is 0 against 2 - 4 = -2.
    expected = [[[4 - 4, (2 - 4) / 2], [5 - 4, 0], [(4 - 2) / 2, (0 + 2) / 2], [3 - (4 + 5) / 2, 0]]]
    np.testing.assert_allclose(TreeValues()(rewards, mask, parents, firsts), expected)
    # TreeRL: leaves earn 3, 5, 1 + 4 = 5, 3: V(start) = 4; V(s1) = 4, of two leaves.
    (numbers,) = TreeRL()(rewards, mask, parents, firsts)
    np.testing.assert_allclose(numbers[0], [0.0, (3 - 4) + (3 - 4)])
    np.testing.assert_allclose(numbers[1:, 0], [2.0, (5 - 4) * 2, -2.0])
    assert isinstance(TreeRL(), BranchAdvantage) and Planned(roots=2, turns=2).rounds(6) == 2
    assert Nested(roots=2).rounds(5) == 4
