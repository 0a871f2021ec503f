"""Stop strings of all requests in hand: their automata, stacked in one table of a fixed size.

Each request ends at its own strings, and one compiled program serves them all: an automaton's states are a block of the
table's rows, and a turn begins at its block's first row. Blocks that no request uses make room for new ones, the least
recently used first. Host side, NumPy only; the driver guards it with its lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.engine import automaton
from jaxagent.engine.automaton import Automaton


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """An automaton and where its states begin in the table."""

    stops: Automaton
    first: int

    def state_after(self, tokens: Sequence[int]) -> int:
        """The row of the table after tokens none of which completed a stop string."""
        return self.first + self.stops.state_after(tokens)


class StopTable:
    """The stacked automata.

    Args:
      default: of requests that name no stop strings; always there. Others are compiled for its vocabulary.
      rows: states of all automata together, at most.

    Raises:
      ConfigError: `default` alone has more states.
    """

    def __init__(self, default: Automaton, rows: int) -> None:
        if len(default.table) > rows:
            raise ConfigError(
                f"engine.stop_states={rows} is too small: the stop strings {list(default.stop_strings)} need "
                f"{len(default.table)}."
            )
        row = np.int16 if rows <= automaton.MOST_STATES else np.int32
        self.table = np.zeros((rows, default.table.shape[1]), np.promote_types(default.table.dtype, row))
        self.default = Block(default, 0)
        self.changed = False  # since the device took the table
        self._blocks: dict[tuple[str, ...], Block] = {}  # least recently used first
        self._write(self.default)

    def block(self, stop_strings: Sequence[str], in_use: Iterable[Block]) -> Block | None:
        """The block of a set of stop strings, compiled when it is new.

        Args:
          stop_strings: of a request.
          in_use: blocks of the requests in hand, which stay where they are.

        Returns:
          None where there is no room until some request has ended.

        Raises:
          ValueError: an empty string, or strings for which there could never be room.
        """
        key = tuple(stop_strings)
        if key == self.default.stops.stop_strings:
            return self.default
        if (known := self._blocks.pop(key, None)) is None:
            free = len(self.table) - len(self.default.stops.table)
            stops = automaton.build(key, self.default.stops.token_bytes, self.table.shape[1], free)
            first = self._room(stops, in_use)
            if first is None:
                return None
            self._write(known := Block(stops, first))
        self._blocks[key] = known
        return known

    def _room(self, stops: Automaton, in_use: Iterable[Block]) -> int | None:
        """The first row of a gap that holds the automaton, after unused ones have made way where they must."""
        kept = None
        if not np.can_cast(stops.table.dtype, self.table.dtype):
            raise ValueError(f"{len(stops.stop_strings)} stop strings are too many for tokens of so many bytes.")
        while True:
            end = len(self.default.stops.table)
            for block in sorted(self._blocks.values(), key=lambda block: block.first):
                if block.first - end >= len(stops.table):
                    return end
                end = block.first + len(block.stops.table)
            if len(self.table) - end >= len(stops.table):
                return end
            kept = set(in_use) if kept is None else kept
            unused = next((key for key, block in self._blocks.items() if block not in kept), None)
            if unused is None:
                return None
            del self._blocks[unused]

    def _write(self, block: Block) -> None:
        table = block.stops.table
        self.table[block.first : block.first + len(table)] = np.where(table >= 0, table + block.first, table)
        self.changed = True
