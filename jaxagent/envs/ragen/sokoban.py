"""Sokoban as RAGEN has it: push every box onto a target; nothing can be pulled, so a mistake may be final.

The rules, the rewards and the look are gym-sokoban's; rooms are drawn by a generator of ours, which carves a room by a
random walk, puts the boxes on their targets and plays backwards.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from jaxagent.config import ConfigError
from jaxagent.config.ranges import PositiveInt, between
from jaxagent.envs.ragen.world import Outcome

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
STEP, ON_TARGET, OFF_TARGET, FINISHED = -0.1, 1.0, -1.0, 10.0  # gym-sokoban's rewards
_TRIES = 1_000
Cell = tuple[int, int]  # (row, column)


@dataclasses.dataclass(frozen=True)
class Room:
    """A state. Whatever is no floor is a wall."""

    size: Cell  # rows, columns
    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell


def beside(cell: Cell, direction: str) -> Cell:
    """The next cell in a direction."""
    down, right = MOVES[direction]
    return cell[0] + down, cell[1] + right


@dataclasses.dataclass(frozen=True)
class Sokoban:
    """A walled room with boxes and as many targets."""

    rows: Annotated[int, between(5, 16)] = 6
    columns: Annotated[int, between(5, 16)] = 6
    boxes: PositiveInt = 1
    depth: PositiveInt = 30  # moves that are played backwards from the solution
    max_actions: PositiveInt = 10  # of one attempt

    instruction: ClassVar[str] = (  # the published text, letter for letter
        "You are solving the Sokoban puzzle. You are the player and you need to push all boxes to targets. When you "
        "are right next to a box, you can push it by moving in the same direction. You cannot push a box through a "
        "wall, and you cannot pull a box. The answer should be a sequence of actions, like <answer>Right || Right || "
        "Up</answer>"
    )
    symbols: ClassVar[Mapping[str, str]] = {
        "#": "wall", "_": "empty", "O": "target", "√": "box on target", "X": "box", "P": "player",
        "S": "player on target",
    }  # fmt: skip

    def __post_init__(self) -> None:
        """Raises ConfigError where the boxes leave no room to push."""
        if self.boxes > (most := (self.rows - 2) * (self.columns - 2) // 8):
            raise ConfigError(f"env.world.boxes={self.boxes} is more than a room of this size can have, {most}.")

    @property
    def actions(self) -> Sequence[str]:
        """The four directions."""
        return tuple(MOVES)

    def begin(self, seed: int) -> Room:
        """A room that can be solved and is not."""
        random_ = random.Random(f"sokoban/{seed}")
        for _ in range(_TRIES):
            room = self._solved(random_)
            if room is None:
                continue
            for _ in range(self.depth):
                room = _backwards(room, random_)
            if room.boxes != room.targets:
                return room
        raise ValueError(f"no room of {self.rows} x {self.columns} with {self.boxes} boxes in {_TRIES} tries")

    def act(self, state: Room, action: str, random_: random.Random) -> Outcome:
        """A step, or a push if a box is in the way; against a wall nothing moves."""
        to = beside(state.player, action)
        boxes, reward = state.boxes, STEP
        if to in boxes:
            pushed = beside(to, action)
            if pushed not in state.floor or pushed in boxes:
                return Outcome(state, STEP)
            boxes = boxes - {to} | {pushed}
            reward += ON_TARGET * (pushed in state.targets) + OFF_TARGET * (to in state.targets)
        elif to not in state.floor:
            return Outcome(state, STEP)
        solved = boxes == state.targets
        after = dataclasses.replace(state, boxes=boxes, player=to)
        return Outcome(after, reward + FINISHED * solved, done=solved, solved=solved)

    def render(self, state: Room) -> str:
        """The room, row by row."""
        return "\n".join(
            "".join(_symbol(state, (row, column)) for column in range(self.columns)) for row in range(self.rows)
        )

    def _solved(self, random_: random.Random) -> Room | None:
        """A carved room whose boxes are on their targets; None where it became too small."""
        cell = (random_.randrange(1, self.rows - 1), random_.randrange(1, self.columns - 1))
        floor = {cell}
        for _ in range(3 * (self.rows + self.columns) + 8 * self.boxes):
            to = beside(cell, random_.choice(tuple(MOVES)))
            if 0 < to[0] < self.rows - 1 and 0 < to[1] < self.columns - 1:
                cell = to
                floor.add(cell)
        if len(floor) < 3 * self.boxes + 3:
            return None
        *targets, player = random_.sample(sorted(floor), self.boxes + 1)
        at = frozenset(targets)
        return Room((self.rows, self.columns), frozenset(floor), at, at, player)


def _backwards(room: Room, random_: random.Random) -> Room:
    """A move whose reverse is a step or a push: the player goes, and may pull the box behind it."""
    direction = random_.choice(tuple(MOVES))
    to = beside(room.player, direction)
    if to not in room.floor or to in room.boxes:
        return room
    opposite = (2 * room.player[0] - to[0], 2 * room.player[1] - to[1])
    boxes = room.boxes
    if opposite in boxes and random_.random() < 0.7:
        boxes = boxes - {opposite} | {room.player}
    return dataclasses.replace(room, boxes=boxes, player=to)


def _symbol(room: Room, cell: Cell) -> str:
    if cell not in room.floor:
        return "#"
    target = cell in room.targets
    if cell == room.player:
        return "S" if target else "P"
    if cell in room.boxes:
        return "√" if target else "X"
    return "O" if target else "_"
