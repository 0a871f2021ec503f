"""The memories of one shard: which are free, and which hold a snapshot of what some prefix leaves. Stdlib only.

A memory is a state of fixed size. One that belongs to a sequence changes with every token; a snapshot never changes: it
is what a memory was after exactly the tokens of a place. A place is a full page of the prefix tree (or its root) and
one to page_tokens tokens behind it. `pages.PageStore` gives sequences their memories, and sees to it that the tree has
a page with a place's tokens as long as the snapshot is here.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

Place = tuple[int, bytes]  # the full page before, or prefix_tree.ROOT, and the packed tokens behind it


class Memories:
    """Free memories, and snapshots in the order of their last use.

    Args:
      memories: memory 0, which nobody gets, included; 0: there are none, and nothing is asked for.
    """

    def __init__(self, memories: int) -> None:
        self.free = list(range(memories - 1, 0, -1))  # a stack, memory 1 on top
        self.snapshots: dict[Place, int] = {}  # the least recently used first
        self._behind: dict[int, set[bytes]] = collections.defaultdict(set)  # their places, by page

    @property
    def available(self) -> int:
        """How many `take` can hand out: snapshots are given up for sequences."""
        return len(self.free) + len(self.snapshots)

    def take(self, wanted: Place | None = None) -> int:
        """A memory, of which there must be one available; the snapshot at `wanted` is given up last."""
        if not self.free:
            self._drop(min(self.snapshots, key=lambda place: place == wanted))
        return self.free.pop()

    def use(self, place: Place) -> int:
        """The snapshot at a place, which is now the one used last; 0 if there is none."""
        memory = self.snapshots.pop(place, 0)
        if memory:
            self.snapshots[place] = memory
        return memory

    def keep(self, place: Place, memory: int) -> None:
        """Makes a memory that was handed out the snapshot of a place; if there is one, the memory is free."""
        if self.use(place):
            self.free.append(memory)
        else:
            self.snapshots[place] = memory
            self._behind[place[0]].add(place[1])

    def longest(self, page: int, tokens: bytes) -> bytes:
        """Of the places behind a page, the one most of whose tokens come next in packed tokens; b"" for none."""
        return max(filter(tokens.startswith, self._behind.get(page, ())), key=len, default=b"")

    def drop_behind(self, page: int, hopeless: Callable[[bytes], bool]) -> None:
        """Gives up the snapshots behind a page that are hopeless."""
        for tokens in sorted(filter(hopeless, self._behind.get(page, ()))):
            self._drop((page, tokens))

    def clear(self) -> None:
        """Gives up all snapshots."""
        for place in list(self.snapshots):
            self._drop(place)

    def _drop(self, place: Place) -> None:
        self.free.append(self.snapshots.pop(place))
        self._behind[place[0]].remove(place[1])
        if not self._behind[place[0]]:
            del self._behind[place[0]]
