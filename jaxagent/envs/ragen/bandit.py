"""RAGEN's bandit of two arms: one pays a little for certain, the other much, seldom (arXiv 2504.20073, section 3.1)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxagent.config import ConfigError
from jaxagent.config.ranges import FiniteFloat, ZeroToOne
from jaxagent.envs.ragen.world import Outcome

PROMPT = (  # the published text, letter for letter
    "You are playing a bandit game. Goal: Maximize your total reward by choosing which arm to pull. \n"
    "Game Rules: \n"
    "1. There are 2 arms, named {name_a} and {name_b}\n"
    "2. Each arm has its own reward distribution, related to their names. \n"
    "3. Analyze the symbolic meaning of each arm's name to guess how their reward distribution might behave.\n"
    "4. Based on the symbolic meaning of their names, which arm do you think is more likely to give higher rewards on "
    "average? Choose between {name_a} and {name_b}, and output like <answer> {name_a} </answer> or <answer> {name_b} "
    "</answer>.\n"
)


@dataclasses.dataclass(frozen=True)
class Bandit:
    """Two arms in random order; an attempt pulls one of them. Solved: the arm with the higher mean."""

    low_arm: str = "Phoenix"  # published for evaluation: Trader
    high_arm: str = "Dragon"  # published for evaluation: Librarian
    low_score: FiniteFloat = 0.1
    high_score: FiniteFloat = 1.0
    high_frac: ZeroToOne = 0.25  # how often the high arm pays; else it pays 0

    instruction: ClassVar[str] = ""
    symbols: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Raises ConfigError for arms that cannot be told apart."""
        if not self.low_arm.strip() or self.low_arm.strip().lower() == self.high_arm.strip().lower():
            raise ConfigError(
                f"env.world: the arms need two names, got low_arm={self.low_arm!r}, high_arm={self.high_arm!r}."
            )

    @property
    def actions(self) -> Sequence[str]:
        """The arms."""
        return (self.low_arm, self.high_arm)

    @property
    def max_actions(self) -> int:
        """One pull."""
        return 1

    def begin(self, seed: int) -> tuple[str, ...]:
        """The arms in the order in which the prompt names them."""
        arms = [self.low_arm, self.high_arm]
        random.Random(f"bandit/{seed}").shuffle(arms)
        return tuple(arms)

    def act(self, state: tuple[str, ...], action: str, random_: random.Random) -> Outcome:
        """Pulls an arm."""
        paid = random_.random() < self.high_frac  # drawn whichever arm it is
        reward = self.low_score if action == self.low_arm else self.high_score if paid else 0.0
        return Outcome((f"{action}: {reward} points",), reward, done=True, solved=action == self.high_arm)

    def render(self, state: tuple[str, ...]) -> str:
        """The game's description, or what an arm has paid."""
        return PROMPT.format(name_a=state[0], name_b=state[1]) if len(state) == 2 else state[0]
