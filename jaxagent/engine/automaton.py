"""Stop strings as an automaton over tokens: generation ends exactly where a string search would end it.

stop strings + the bytes of every token -> one table `next[state, token]`, looked up once per sampled token on the
device. The states are the proper prefixes of the stop strings (Aho & Corasick 1975, "Efficient string matching"),
over bytes; a token is then a walk over its bytes, taken in advance for every state. So it does not matter how the
tokenizer splits a stop string, nor whether a token runs past its end: the entry then says how many bytes past.

Each request ends at its own strings, and one compiled program serves them all: a `StopTable` stacks the automata of all
requests in hand in one table of a fixed size. An automaton's states are a block of its rows, and a turn begins at its
block's first row. Blocks that no request uses make room for new ones, the least recently used first.

NumPy only: tables are made on the host, once per tokenizer and set of stop strings.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxagent.config import ConfigError

MOST_STATES = 2**15 - 1  # of a table: states are int16 where they fit
START = 0  # the state of a turn that has produced nothing yet


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """Compiled stop strings, and where their states begin in the `StopTable` that holds them.

    An entry `e = table[state, token]` is the next state when `e >= 0`. When `e < 0` the token completed a stop
    string: `decode(e)` gives which one and the overshoot.
    """

    stop_strings: tuple[str, ...]
    table: np.ndarray  # int16 or int32 [states, V]
    token_bytes: Sequence[bytes] = dataclasses.field(repr=False)  # of the vocabulary
    first: int = START  # row of a `StopTable`

    @property
    def num_stops(self) -> int:
        """Number of stop strings, at least 1 so that entries can be divided by it."""
        return max(len(self.stop_strings), 1)

    def decode(self, entry: int) -> tuple[str, int]:
        """(stop string, bytes of the token that lie past its end) of a negative entry."""
        overshoot, stop = divmod(-1 - int(entry), self.num_stops)
        return self.stop_strings[stop], overshoot

    def state_after(self, tokens: Sequence[int]) -> int:
        """The row of the stacked table after tokens none of which completed a stop string."""
        state = START
        for token in tokens:
            state = int(self.table[state, token])
        return self.first + state


def build(
    stop_strings: Sequence[str], token_bytes: Sequence[bytes], vocab_size: int, most_states: int = MOST_STATES
) -> Automaton:
    """Compiles stop strings for a vocabulary.

    Where several stop strings end at the same byte, the longest is reported.

    Args:
      stop_strings: non-empty strings; may be no strings at all.
      token_bytes: bytes of each token id; special tokens as their literal text, unused ids as b"".
      vocab_size: V, the width of the logits; ids past `token_bytes` have no bytes.
      most_states: of the table. Strings that need more cost nothing: they are counted before the vocabulary is walked.

    Raises:
      ValueError: an empty stop string, more tokens than `vocab_size`, or strings that need more states.
    """
    if any(not s for s in stop_strings):
        raise ValueError("A stop string must not be empty.")
    if (longest := max((len(s.encode()) for s in stop_strings), default=0)) > most_states:
        raise ValueError(f"engine.stop_states leaves {most_states} states, and a stop string has {longest} bytes.")
    if len(stop_strings) > most_states:
        raise ValueError(
            f"engine.stop_states leaves {most_states} states, and there are {len(stop_strings)} stop strings."
        )
    if len(token_bytes) > vocab_size:
        raise ValueError(f"{len(token_bytes)} tokens do not fit a vocabulary of {vocab_size}.")
    step, stop_of = _byte_automaton([s.encode() for s in stop_strings])
    if (states := int((stop_of < 0).sum())) > most_states:
        raise ValueError(f"engine.stop_states leaves {most_states} states, and the stop strings need {states}.")
    table = _lift(step, stop_of, token_bytes, vocab_size, max(len(stop_strings), 1))
    return Automaton(tuple(stop_strings), table, token_bytes)


def _byte_automaton(stops: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Dense DFA over bytes: `step[state, byte]`, and `stop_of[state]` = completed stop index or -1."""
    prefixes = sorted({s[:i] for s in stops for i in range(len(s) + 1)} | {b""}, key=lambda p: (len(p), p))
    index = {p: i for i, p in enumerate(prefixes)}
    following: dict[bytes, list[int]] = collections.defaultdict(list)
    for prefix in prefixes[1:]:
        following[prefix[:-1]].append(prefix[-1])
    step = np.zeros((len(prefixes), 256), np.int32)
    stop_of = np.full(len(prefixes), -1, np.int32)
    for i, prefix in enumerate(prefixes):
        ending = [k for k, s in enumerate(stops) if prefix.endswith(s)]
        if ending:
            stop_of[i] = max(ending, key=lambda k: len(stops[k]))
        # A byte leads to the longest suffix that is still the beginning of some stop string. Shorter suffixes are
        # earlier in `prefixes`, so the row of the suffix without its first byte is already there to fall back on.
        if prefix:
            fallback = next(index[prefix[j:]] for j in range(1, len(prefix) + 1) if prefix[j:] in index)
            step[i] = step[fallback]
        for byte in following[prefix]:
            step[i, byte] = index[prefix + bytes([byte])]
    return step, stop_of


def _lift(
    step: np.ndarray, stop_of: np.ndarray, token_bytes: Sequence[bytes], vocab_size: int, num_stops: int
) -> np.ndarray:
    """Walks every token from every state, all at once: one NumPy step per byte position."""
    lengths = np.array([len(b) for b in token_bytes], np.int64)
    # Longest first: at byte position j the tokens that still have bytes are a leading block.
    order = np.argsort(-lengths, kind="stable")
    longest = int(lengths.max(initial=0))
    states = np.repeat(np.arange(len(step), dtype=np.int32)[:, None], len(lengths), axis=1)
    entries = np.zeros_like(states)  # negative once a stop string is complete
    remaining = lengths[order]
    for j in range(longest):
        live = int(np.searchsorted(-remaining, -j, side="left"))  # tokens with more than j bytes
        byte = np.fromiter((token_bytes[i][j] for i in order[:live]), np.int64, live)
        states[:, :live] = step[states[:, :live], byte]
        stop = stop_of[states[:, :live]]
        overshoot = remaining[:live] - j - 1
        hit = (stop >= 0) & (entries[:, :live] == 0)  # the first completion ends the turn
        entries[:, :live] = np.where(hit, -1 - (overshoot * num_stops + stop), entries[:, :live])
    table = np.repeat(np.arange(len(step), dtype=np.int32)[:, None], vocab_size, axis=1)
    table[:, order] = np.where(entries < 0, entries, states)
    # A state in which a stop string is complete is never entered: the generation has ended. Drop those rows.
    keep = stop_of < 0
    renumber = np.cumsum(keep) - 1
    table = np.where(table >= 0, renumber[np.maximum(table, 0)], table)[keep]
    small = np.iinfo(np.int16)
    return table.astype(np.int16 if small.min <= table.min() and table.max() <= small.max else np.int32)


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
        row = np.int16 if rows <= MOST_STATES else np.int32
        self.table = np.zeros((rows, default.table.shape[1]), np.promote_types(default.table.dtype, row))
        self.default = default
        self.changed = False  # since the device took the table
        self._blocks: dict[tuple[str, ...], Automaton] = {}  # least recently used first
        self._write(self.default)

    def block(self, stop_strings: Sequence[str], in_use: Iterable[Automaton]) -> Automaton | None:
        """The automaton of a set of stop strings, compiled and given a block of rows when it is new.

        Args:
          stop_strings: of a request.
          in_use: those of the requests in hand, which stay where they are.

        Returns:
          None where there is no room until some request has ended.

        Raises:
          ValueError: an empty string, or strings for which there could never be room.
        """
        key = tuple(stop_strings)
        if key == self.default.stop_strings:
            return self.default
        if (entry := self._blocks.pop(key, None)) is None:
            free = len(self.table) - len(self.default.table)
            stops = build(key, self.default.token_bytes, self.table.shape[1], free)
            first = self._room(stops, in_use)
            if first is None:
                return None
            self._write(entry := dataclasses.replace(stops, first=first))
        self._blocks[key] = entry
        return entry

    def _room(self, stops: Automaton, in_use: Iterable[Automaton]) -> int | None:
        """The first row of a gap that holds the automaton, after unused ones have made way where they must."""
        blocks_in_use = None
        if not np.can_cast(stops.table.dtype, self.table.dtype):
            raise ValueError(f"{len(stops.stop_strings)} stop strings are too many for tokens of so many bytes.")
        while True:
            end = len(self.default.table)
            for block in sorted(self._blocks.values(), key=lambda block: block.first):
                if block.first - end >= len(stops.table):
                    return end
                end = block.first + len(block.table)
            if len(self.table) - end >= len(stops.table):
                return end
            blocks_in_use = set(in_use) if blocks_in_use is None else blocks_in_use
            unused = next((key for key, block in self._blocks.items() if block not in blocks_in_use), None)
            if unused is None:
                return None
            del self._blocks[unused]

    def _write(self, block: Automaton) -> None:
        table = block.table
        self.table[block.first : block.first + len(table)] = np.where(table >= 0, table + block.first, table)
        self.changed = True
