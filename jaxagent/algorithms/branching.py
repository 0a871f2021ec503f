"""What `rl.branching` can name: which attempts of a group are forks, and of which turn of which earlier attempt.

A group has `rl.group_size` attempts, numbered from 0. The first `roots` of them are played from the start. A later one
waits until the first so many attempts are over (`waits_for`), chooses one of them and one of its turns, and is played
on from the state in which that turn began (rollout/branching.py). A choice hangs on the attempts' numbers and results
and on numbers drawn for it by (seed, task, attempt), and never on who was ready first. NumPy only.

Whether values that are read off forks are unbiased hangs on the choice: whether there is a fork at a turn may be
decided by what had happened before that turn, and not by how the attempt went on. One turn drawn among all those that
an attempt has come to have depends on their number, which an attempt that goes wrong may make large: then the attempts
that are forked at a state are not as good as those that are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from jaxagent.config.ranges import PositiveInt, at_least
from jaxagent.types import Episode


@dataclasses.dataclass(frozen=True)
class Branching:
    """A rule. Attempts are named by their place in the group."""

    roots: Annotated[int, at_least(2)] = 2  # attempts of each group that begin at the start

    def waits_for(self, attempt: int) -> int:
        """How many attempts, the first ones, must be over before a fork chooses: `roots` to `attempt`."""
        return self.roots

    def rounds(self, group_size: int) -> int:
        """How often in a row an attempt of a group may wait for another one's end, and 1."""
        return 1 + len({self.waits_for(attempt) for attempt in range(self.roots, group_size)})

    def choose(self, episodes: Sequence[Episode], attempt: int, rng: np.random.Generator) -> tuple[int, int]:
        """The attempt that a fork goes on from, and the turn that it plays first: of those turns that it has.

        A fork at turn 0 is played from the start, whichever attempt is named.

        Args:
          episodes: of the attempts that it has waited for, in their order; failed ones among them, from which none may
            go on (`Episode.stop_reason.is_failure`).
          attempt: the fork's place in the group.
          rng: numbers drawn for this attempt.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Planned(Branching):
    """Forks at fixed turns: those of each root begin at its turns 1, 2, ..., `turns`, 1, 2, ..., in this order.

    As in VinePPO (Kazemnejad et al., arXiv 2410.01679, section 4), which has K continuations of each state: K * `turns`
    forks of each root make K. Where a root has no such turn, or has failed, its fork is played from the start. So what
    is decided by the root's future is only whether there is one more attempt at the task, which is independent of it.
    """

    turns: PositiveInt = 2  # at which forks begin; their number

    def choose(self, episodes: Sequence[Episode], attempt: int, rng: np.random.Generator) -> tuple[int, int]:
        number, parent = divmod(attempt - self.roots, self.roots)
        turn, episode = 1 + number % self.turns, episodes[parent]
        return parent, turn if turn < episode.turns and not episode.stop_reason.is_failure else 0


BRANCHINGS: dict[str, type | str] = {"planned": Planned, "ucb": "jaxagent.algorithms.agent_q:UCB"}
