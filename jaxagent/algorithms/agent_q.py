"""Agent Q: a search decides which state an attempt goes on from, and pairs of what was done in one state are learnt.

"Agent Q" (Putta et al., arXiv 2408.07199, sections 4 and 5), with the search of sentient-engineering/agent-q. A value
is the mean of what the attempts through a turn have earned. The paper mixes it, half and half, with how the model
itself ranks the actions; that is not here. NumPy only.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxagent.algorithms.branches import BranchAdvantage, Tree, mean
from jaxagent.algorithms.branching import Branching
from jaxagent.config.ranges import NonNegativeFloat, PositiveInt
from jaxagent.types import Episode


@dataclasses.dataclass(frozen=True)
class UCB(Branching):
    """Each fork goes down from the start, child by best child, to the first state with fewer than `actions`.

    The best of a state's children (turns played there) has the largest Q + explore sqrt(log N / (1 + n)): Q is
    the mean reward of the n attempts through it, N those through the state. A child that ended its attempts is passed
    over; where all have, the state gets one more. It looks ahead, so values are no unbiased estimates.
    """

    actions: PositiveInt = 2  # turns that are played in a state before one goes on from its best
    explore: NonNegativeFloat = 1.0  # weight of what was seldom tried, in units of reward
    at_once: PositiveInt = 1  # forks that choose together, by what was known before the first of them

    def waits_for(self, attempt: int) -> int:
        return attempt - (attempt - self.roots) % self.at_once

    def choose(self, episodes: Sequence[Episode], attempt: int, rng: np.random.Generator) -> tuple[int, int]:
        places = {episode.sample: place for place, episode in enumerate(episodes)}

        def owner(place: int, turn: int) -> int:
            """Who has played the turn that an attempt has, or has copied."""
            while (parent := episodes[place].fork_of) is not None and turn < episodes[place].forked_at:
                place = places[parent]
            return place

        through = [place for place, episode in enumerate(episodes) if not episode.stop_reason.is_failure]
        turn = 0
        while True:
            children: dict[int, list[int]] = collections.defaultdict(list)
            for place in through:
                if turn < episodes[place].turns:
                    children[owner(place, turn)].append(place)
            if not children:
                return 0, 0
            further = [some for some in children.values() if any(turn + 1 < episodes[place].turns for place in some)]
            if len(children) < self.actions or not further:
                return min(children), turn
            tried = math.log(len(through))
            best = [
                mean([episodes[place].total_reward for place in some]) + self.explore * (tried / (1 + len(some))) ** 0.5
                for some in further
            ]
            through, turn = further[int(np.argmax(best))], turn + 1


@dataclasses.dataclass(frozen=True)
class BranchPairs(BranchAdvantage):
    """A_k = 1/2 (losers - winners) of turns that were played in one state: DPO on pairs whose Q differ by `min_gap`.

    A pair's loss is -log sigmoid(b (log p(w) / p_ref(w) - log p(l) / p_ref(l))). The paper takes the likelihoods under
    which the turns were sampled for those of the reference. Then the argument is 0 at a step's first update, and the
    gradient is -b/2 (grad log p(w) - grad log p(l)): that of -A log p, summed over tokens, but for b, which is a scale.
    With further updates the pairs would have to be scored again, so `rl.objective=reinforce` allows one.
    """

    min_gap: NonNegativeFloat = 0.1  # of Q, from 0 to 1; equal ones never are a pair

    def of_attempt(self, tree: Tree, a: int) -> list[float]:
        numbers = []
        for turn in range(tree.first[a], tree.end(a)):
            state = tree.state(a, turn)
            beside = {*tree.begun.get(state, ()), state[0]} - {a}  # who begins there, and who came there
            others = [mean(tree.through[other, turn + 1]) for other in beside if (other, turn + 1) in tree.through]
            gaps = [mean(tree.through[a, turn + 1]) - other for other in others]
            numbers.append(0.5 * sum(np.sign(gap) for gap in gaps if abs(gap) >= self.min_gap))
        return numbers
