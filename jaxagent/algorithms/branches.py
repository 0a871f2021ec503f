"""Advantages over turns that read which attempts are forks of which turns: Monte-Carlo values of states.

A group's attempts are paths of one tree. A state is a place in it: the start, or what an attempt has come to before one
of its turns. From a state there go on the attempt that came there, and the forks that begin there. What they earn from
there on are independent estimates of the state's value, and of each turn's worth what it was paid plus the value of
the state after it. Turns that a fork has copied are its parent's: they are in the tree once, and are learnt from once.

Unbiased are, for a rule of `rl.branching` that does not look ahead,

  values      the mean of what went on from a state, at each state one vote per branch (`worth`)
  baselines   of what went on from the nearest state of the path that others went on from: never of the turn's own
              outcome, nor of attempts that are there because of it
  weights     of turns that several attempts play on in the place of one: 1 / their number, at each fork of the path.
              With all weights 1 the policy would learn the more about a state, the more attempts begin there.

They are weights of tokens: an `rl.aggregation` that divides by an attempt's own length changes them, and is refused.
Axis letters: N tasks, G attempts per group, K turns of their own.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from jaxagent.algorithms.advantages import TurnAdvantage
from jaxagent.contract import check_arrays

START = -1, 0  # where all roots begin
Place = tuple[int, int]  # an attempt, and one of its turns: the state before it


class Tree:
    """The attempts of one group, by their places in it; of those that failed or said nothing there are no turns.

    Args:
      rewards, mask: float and bool [G, K]: of an attempt's own turns, those that it has copied are not counted.
      parents: i64[G] the attempt that a fork goes on from; -1 for a root.
      forked_at: i64[G] the turn that is a fork's first own; 0 for a root.
    """

    def __init__(self, rewards: np.ndarray, mask: np.ndarray, parents: np.ndarray, forked_at: np.ndarray):
        self.rewards = [rewards[a][mask[a]].tolist() for a in range(len(rewards))]
        self.first = forked_at.tolist()
        self.parents = parents.tolist()
        self.attempts = [a for a, own in enumerate(self.rewards) if own]
        self.begun: dict[Place, list[int]] = collections.defaultdict(list)  # who begins at a state
        for a in self.attempts:
            self.begun[self.state(a, self.first[a])].append(a)

    def end(self, a: int) -> int:
        """The turn after an attempt's last."""
        return self.first[a] + len(self.rewards[a])

    def paid(self, a: int, start: int, end: int | None = None) -> float:
        """What an attempt's own turns from `start` to before `end` were paid."""
        return sum(self.rewards[a][start - self.first[a] : None if end is None else end - self.first[a]])

    def earlier(self, a: int) -> float:
        """What was paid on the way to an attempt's first own turn."""
        parent, first = self.parents[a], self.first[a]
        return self.earlier(parent) + self.paid(parent, self.first[parent], first) if first else 0.0

    def state(self, a: int, turn: int) -> Place:
        """The state in which a turn began, by the attempt that came there first."""
        while self.parents[a] >= 0 and turn <= self.first[a]:
            a = self.parents[a]
        return (a, turn) if turn else START

    @functools.cache  # noqa: B019  it lives as long as the tree
    def worth(self, a: int, turn: int) -> float:
        """What an own turn was paid and the value of the state after it."""
        after, forks = turn + 1, self.begun.get((a, turn + 1), ())
        value = 0.0
        if after < self.end(a):
            value = mean([self.worth(a, after), *(self.worth(fork, after) for fork in forks)])
        return self.rewards[a][turn - self.first[a]] + value

    def baseline(self, a: int, turn: int, value: Callable[[int, int], float]) -> float:
        """What others went on to from the nearest state on the way to an own turn, less what was paid since.

        `value`: of an attempt's own turn. NaN where there are no others, of which something could be said.
        """
        for at in range(turn, self.first[a], -1):
            if forks := self.begun.get((a, at)):
                return mean([value(fork, at) for fork in forks]) - self.paid(a, at, turn)
        at = self.first[a]
        state = self.state(a, at)
        others = [other for other in self.begun[state] if other != a and not (state == START and self.owes(other, a))]
        if state != START and state[0] in self.attempts:
            others.append(state[0])
        if others:
            return mean([value(other, at) for other in others]) - self.paid(a, at, turn)
        return math.nan if len(self.rewards) > 1 else 0.0  # an attempt planned alone keeps what it earned

    @functools.cached_property
    def through(self) -> dict[Place, list[float]]:
        """What each attempt through a state has earned; (a, k + 1) is what came of an attempt's own turn k."""
        through: dict[Place, list[float]] = collections.defaultdict(list)
        for leaf in self.attempts:
            earned = self.earlier(leaf) + self.paid(leaf, self.first[leaf])
            at, end, path = leaf, self.end(leaf), [START]
            while end:
                path += [(at, turn) for turn in range(end, self.first[at], -1)]
                at, end = self.parents[at], self.first[at]
            for place in path:
                through[place].append(earned)
        return through

    def owes(self, other: int, a: int) -> bool:
        """Whether an attempt from the start is a fork of `a`, which did not come to the turn planned for it."""
        return self.parents[other] == a

    def weights(self, a: int) -> list[float]:
        """Of an attempt's own turns: 1 / the number of attempts that go on, for all forks on the way to each."""
        weight, first = 1.0, self.first[a]
        state = self.state(a, first)
        if state != START:
            owner = state[0]
            weight = self.weights(owner)[first - self.first[owner]] if owner in self.attempts else 1.0
        weights = []
        for turn in range(first, self.end(a)):
            weight /= 1 + len(self.begun.get((a, turn), ())) if turn > first else 1
            weights.append(weight)
        return weights


def mean(values: Sequence[float]) -> float:
    """Of one number or more."""
    return math.fsum(values) / len(values)


def weighted(advantages: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Each times its weight."""
    return [advantage * weight for advantage, weight in zip(advantages, weights, strict=True)]


@dataclasses.dataclass(frozen=True)
class BranchAdvantage(TurnAdvantage):
    """One number per turn, from what attempts have in common.

    It is called with rewards float[N, G, K] and mask bool[N, G, K] of the attempts' own turns, and with parents
    i64[N, G], places in the group or -1, and forked_at i64[N, G], the turn that is the first own one. It says 0 of a
    turn that is compared with nothing, since all others failed.
    """

    reads_branches: ClassVar[bool] = True

    def __call__(self, rewards: np.ndarray, mask: np.ndarray, parents: np.ndarray, forked_at: np.ndarray) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        check_arrays(rewards, mask, types=[float, bool], rank=3)
        check_arrays(parents, forked_at, types=[int, int], rank=2)
        advantages = np.zeros_like(rewards)
        for n in range(len(rewards)):
            tree = Tree(rewards[n], mask[n], parents[n], forked_at[n])
            for a in tree.attempts:
                advantages[n, a][mask[n, a]] = self.of_attempt(tree, a)
        return np.where(np.isnan(advantages), 0.0, advantages)

    def of_attempt(self, tree: Tree, a: int) -> list[float]:
        """One number for each own turn of an attempt."""
        raise NotImplementedError

    @property
    def learns_forks(self) -> bool:
        """Whether forks are learnt from, or only tell what states are worth."""
        return True


@dataclasses.dataclass(frozen=True)
class VinePPO(BranchAdvantage):
    """A_k = r_k + V(s_k+1) - V(s_k), V(s) = the mean return of the continuations of s, on NumPy.

    VinePPO (Kazemnejad et al., arXiv 2410.01679, eqs. 5 and 6). Where the state after a turn has no continuations, what
    was paid up to the next one that has some, or to the end, takes its place; where the state before it has none, the
    baseline is that of the nearest earlier one, which at the start is the mean of the other roots. In the paper
    continuations are not learnt from; where they are, each turn has the weight that is said above.
    """

    train_forks: bool = False

    @property
    def learns_forks(self) -> bool:
        return self.train_forks

    def of_attempt(self, tree: Tree, a: int) -> list[float]:
        if tree.parents[a] >= 0 and not self.train_forks:
            return [0.0] * len(tree.rewards[a])
        advantages = []
        for turn in range(tree.first[a], tree.end(a)):
            after = next((at for at in range(turn + 1, tree.end(a)) if tree.begun.get((a, at))), None)
            value = 0.0 if after is None else mean([tree.paid(fork, after) for fork in tree.begun[a, after]])
            advantages.append(tree.paid(a, turn, after) + value - tree.baseline(a, turn, tree.paid))
        return weighted(advantages, tree.weights(a)) if self.train_forks else advantages


class TreeValues(BranchAdvantage):
    """A_k = r_k + V(s_k+1) - V(s_k) over the whole tree, forks learnt from, on NumPy; weights as said above.

    V(s_k+1) is the mean of all that went on from there, the attempt itself among them. V(s_k) is the mean of what went
    on from there, or from the nearest state before it, without the turn's own branch.
    """

    def of_attempt(self, tree: Tree, a: int) -> list[float]:
        turns = range(tree.first[a], tree.end(a))
        advantages = [tree.worth(a, turn) - tree.baseline(a, turn, tree.worth) for turn in turns]
        return weighted(advantages, tree.weights(a))


class TreeRL(BranchAdvantage):
    """A_k = [V(s_k+1) - V(start) + V(s_k+1) - V(s_k)] sqrt(L), V(s) = the mean return of the attempts through s.

    TreeRL (Hou et al., arXiv 2506.11902, section 3.2), where L attempts go through s_k+1. The paper learns from each
    of the L with 1 / sqrt(L); here a turn is learnt from once. Biased, as published: a turn's own outcome is in V(s_k).
    """

    def of_attempt(self, tree: Tree, a: int) -> list[float]:
        through = tree.through
        value = {place: mean(returns) for place, returns in through.items()}
        numbers = []
        for turn in range(tree.first[a], tree.end(a)):
            after, before = (a, turn + 1), tree.state(a, turn)
            steps = value[after] - value[START] + value[after] - value[before]
            numbers.append(steps * len(through[after]) ** 0.5)
        return numbers
