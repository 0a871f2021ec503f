"""FrozenLake as RAGEN has it: a random map, a start, a goal, holes, and ice on which a step may slip sideways."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from jaxagent.config.ranges import PositiveInt, between
from jaxagent.envs.ragen.world import Outcome

ICE, HOLE, GOAL = "_", "O", "G"
MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}  # in Gymnasium's order, for slipping
_NAMES = tuple(MOVES)
Cell = tuple[int, int]  # (row, column)
Lake = tuple[tuple[str, ...], Cell]  # a state: the rows of the map without the player, and where the player is


@dataclasses.dataclass(frozen=True)
class FrozenLake:
    """A square lake with a way from start to goal. 1 for the goal, 0 for everything else; a hole ends the attempt."""

    size: Annotated[int, between(2, 12)] = 4
    ice_frac: Annotated[float, between(0, 1, without="low")] = 0.8  # chance of a cell to be ice and no hole
    slippery: bool = True  # a step goes to each side of where it should go once in three times
    max_actions: PositiveInt = 10  # of one attempt

    instruction: ClassVar[str] = (  # the published text, letter for letter
        "You are solving the FrozenLake puzzle. Forbid the whole and go to the target. You may move to the unintended "
        "direction due to the slippery ice. Example answer format: <think>To forbid the hole and go to the target, I "
        "should go left then go up.</think><answer>Left || Up</answer>"
    )
    symbols: ClassVar[Mapping[str, str]] = {
        "P": "player", ICE: "empty", HOLE: "hole", GOAL: "goal", "X": "player in hole", "√": "player on goal",
    }  # fmt: skip

    @property
    def actions(self) -> Sequence[str]:
        """The four directions."""
        return _NAMES

    def begin(self, seed: int) -> Lake:
        """A map on which the goal can be reached."""
        random_ = random.Random(f"frozen_lake/{seed}")
        while True:
            cells = [
                [ICE if random_.random() < self.ice_frac else HOLE for _ in range(self.size)] for _ in range(self.size)
            ]
            start, goal = ((random_.randrange(self.size), random_.randrange(self.size)) for _ in range(2))
            cells[start[0]][start[1]], cells[goal[0]][goal[1]] = ICE, GOAL
            lake = tuple("".join(row) for row in cells), start
            if start != goal and self._reachable(lake):
                return lake

    def act(self, state: Lake, action: str, random_: random.Random) -> Outcome:
        """One step, against an edge in place."""
        aside = random_.choice((-1, 0, 1)) if self.slippery else 0
        rows, player = state
        player = self._beside(player, _NAMES[(_NAMES.index(action) + aside) % len(_NAMES)])
        under = rows[player[0]][player[1]]
        solved = under == GOAL
        return Outcome((rows, player), float(solved), done=under in (HOLE, GOAL), solved=solved)

    def render(self, state: Lake) -> str:
        """The map, row by row."""
        rows, (row, column) = list(state[0]), state[1]
        symbol = {ICE: "P", HOLE: "X", GOAL: "√"}[rows[row][column]]
        rows[row] = rows[row][:column] + symbol + rows[row][column + 1 :]
        return "\n".join(rows)

    def _beside(self, cell: Cell, direction: str) -> Cell:
        down, right = MOVES[direction]
        return min(max(cell[0] + down, 0), self.size - 1), min(max(cell[1] + right, 0), self.size - 1)

    def _reachable(self, lake: Lake) -> bool:
        rows, player = lake
        visited, waiting = {player}, [player]
        while waiting:
            cell = waiting.pop()
            for following in (self._beside(cell, name) for name in _NAMES):
                under = rows[following[0]][following[1]]
                if under == GOAL:
                    return True
                if under == ICE and following not in visited:
                    visited.add(following)
                    waiting.append(following)
        return False
