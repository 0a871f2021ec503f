"""What a world of RAGEN is: states without an owner, and pure functions of them.

    state = world.begin(seed)
    outcome = world.act(state, "Right", random_)      # -> the next state, the reward, whether it is over and solved

A seed decides the whole world, chance included: attempts at one task that act alike see the same. So has the published
code, which gives all environments of a group one seed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

State = Any  # hashable, of the world's own kind


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an action did."""

    state: State
    reward: float
    done: bool = False
    solved: bool = False


class World(Protocol):
    """One of `environment.WORLDS`: a frozen dataclass of settings.

    Attributes:
      instruction: how the prompt begins; "" = the state says everything.
      symbols: character of a state -> its meaning; {} = states are sentences, which name the actions too.
    """

    instruction: ClassVar[str]
    symbols: ClassVar[Mapping[str, str]]

    @property
    def actions(self) -> Sequence[str]:
        """Names of all actions, in the order of the prompt."""
        ...

    @property
    def max_actions(self) -> int:
        """Actions of one attempt, at most."""
        ...

    def begin(self, seed: int) -> State:
        """The first state of a seed."""
        ...

    def act(self, state: State, action: str, random_: random.Random) -> Outcome:
        """What one of `actions` does."""
        ...

    def render(self, state: State) -> str:
        """The state as the policy reads it."""
        ...


def chance(seed: int, number: int) -> random.Random:
    """The random numbers of an attempt's action; `number` counts the actions of the attempt from 0."""
    return random.Random(f"ragen/{seed}/{number}")
