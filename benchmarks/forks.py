"""What forks buy: the noise of a policy gradient that attempts and their forks estimate, at equal turns sampled.

    python -m benchmarks.forks [--groups=4000]

Two games whose gradient is computed exactly, by all their paths (tests/branching_game.py). The short one has about four
turns and rewards on the way. In the long one, ten turns with even chances, only the last two decide: 1 where both are
action 1. Noise is the trace of the covariance of a group's estimate times the turns that the group samples, over the
squared length of the gradient: so many times as many turns must be sampled for the same accuracy. Lines are Markdown;
intervals are 95 %, by bootstrap over groups. Some minutes on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxagent.algorithms.branches import BranchAdvantage, TreeValues, VinePPO
from jaxagent.algorithms.branching import Branching, Planned
from jaxagent.types import Episode
from tests import branching_game
from tests.algorithms import test_branches

RESAMPLES = 200
LONG_TURNS = 10


@dataclasses.dataclass(frozen=True)
class At(Branching):
    """Forks of each root at these turns, one after the other."""

    turns: tuple[int, ...] = (1,)

    def choose(self, episodes: Sequence[Episode], attempt: int, rng: np.random.Generator) -> tuple[int, int]:
        """The root and the turn."""
        number, parent = divmod(attempt - self.roots, self.roots)
        return parent, self.turns[number % len(self.turns)]


def long_outcome(turn: int, place: int, action: int) -> tuple[float, int, bool]:
    """As `branching_game.outcome`: what an action is paid, the place after it, and whether that is the end."""
    over = turn == LONG_TURNS - 1
    return float(over and action and place), action, over


def use_long_game() -> None:
    """Puts the long game in the place of the short one."""
    for module in (branching_game, test_branches):
        module.TURNS, module.CHANCES, module.outcome = LONG_TURNS, (0.5, 0.5), long_outcome


def noise(advantage: BranchAdvantage, rule: Branching, groups: list, gradient: np.ndarray) -> str:
    """The noise with its interval."""
    alone = isinstance(advantage, VinePPO) and not advantage.train_forks
    scale = rule.roots if alone else test_branches.started(groups)
    estimates = test_branches.gradients(advantage, groups) / scale
    turns = np.mean([sum(len(game.path) - game.first for game in group) for group in groups])

    def of(samples: np.ndarray) -> float:
        return float(np.trace(np.cov(samples.T)) * turns / (gradient @ gradient))

    rng = np.random.default_rng(0)
    low, high = np.quantile(
        [of(estimates[rng.integers(len(estimates), size=len(estimates))]) for _ in range(RESAMPLES)], [0.025, 0.975]
    )
    return f"{of(estimates):.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    """Prints a table of each game."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=4000)
    count = parser.parse_args().groups
    short = [("6 roots", Planned(roots=6), 6)]
    short += [(f"{r} roots, {f} forks at turns 1, 2", Planned(roots=r), r + f) for r, f in ((2, 4), (4, 8), (2, 16))]
    long = [("6 roots", Planned(roots=6), 6), ("2 roots, 18 forks at turns 1 to 9", Planned(roots=2, turns=9), 20)]
    long += [("2 roots, 8 forks at turn 8", At(roots=2, turns=(8,)), 10)]
    for name, rows in (("short", short), ("long", long)):
        if name == "long":
            use_long_game()
        _, gradient = branching_game.value(0, 0)
        print(
            f"\n| the {name} game | turns sampled | `vine_ppo` | `vine_ppo`, `train_forks` | `tree` |\n{'| --- ' * 5}|"
        )
        for what, rule, size in rows:
            groups = test_branches.simulated(rule, size, count, seed=1)
            turns = np.mean([sum(len(game.path) - game.first for game in group) for group in groups])
            cells = [noise(a, rule, groups, gradient) for a in (VinePPO(), VinePPO(train_forks=True), TreeValues())]
            print(f"| {what} | {turns:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
