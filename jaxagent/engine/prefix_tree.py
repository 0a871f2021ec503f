"""Which cached page holds which tokens: a radix tree over token ids whose nodes are pages. NumPy and stdlib only.

A node is one page and its 1..page_tokens tokens; only a full page has children. What a page caches depends on all
tokens before it too, so the path from the root says what it holds, and pages with the same tokens at different places
are different nodes. Siblings are kept in the order of their tokens' bytes: of an ordered set, the member that has the
longest prefix in common with a key stands next to where the key would stand. So a search costs the logarithm of the
fan-out, however many tasks follow one system prompt that ends inside a page.

The tree does not know who else uses a page; `pages.PageStore` counts references and says which pages are idle.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections.abc import Callable, Sequence

import numpy as np

ROOT = 0  # names the root where a page is expected: page 0 is the trash page and caches nothing
BYTES = 4  # per token of a key


@dataclasses.dataclass(eq=False)
class _Node:
    page: int
    key: bytes  # its tokens
    parent: _Node | None
    stamp: int  # when it was last used
    keys: list[bytes] = dataclasses.field(default_factory=list)  # ascending; children[i].key == keys[i]
    children: list[_Node] = dataclasses.field(default_factory=list)

    def closest(self, key: bytes) -> tuple[_Node | None, int]:
        """The child that has most leading tokens in common with a key, and how many; (None, 0) if none has any."""
        at = bisect.bisect_left(self.keys, key)
        best: tuple[_Node | None, int] = (None, 0)
        for i in (at, at - 1):
            if 0 <= i < len(self.keys) and (count := common(self.keys[i], key)) > best[1]:
                best = self.children[i], count
        return best

    def link(self, child: _Node) -> None:
        at = bisect.bisect_left(self.keys, child.key)
        self.keys.insert(at, child.key)
        self.children.insert(at, child)

    def unlink(self, child: _Node) -> None:
        at = bisect.bisect_left(self.keys, child.key)
        assert self.children[at] is child
        del self.keys[at], self.children[at]


class PrefixTree:
    """Pages by the tokens they cache, with the order in which idle ones are given up."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._clock = 0  # counts uses, so that the order of evictions is reproducible
        self.clear()

    def __len__(self) -> int:
        return len(self._nodes) - 1

    def __contains__(self, page: int) -> bool:
        return page in self._nodes and page != ROOT

    def match(self, tokens: np.ndarray) -> tuple[list[int], tuple[int, int] | None]:
        """Finds the longest cached prefix, to the token; changes nothing, see `touch`.

        Args:
          tokens: i32[n], a sequence from its start.

        Returns:
          The full pages all of whose tokens match, and (page, count) of one more whose first `count` tokens match too,
          1 <= count < page_tokens; None for that where there is no such page.
        """
        data, width = pack(tokens), self._page_tokens * BYTES
        node, pages = self._nodes[ROOT], []
        for at in range(0, len(data), width):
            child, count = node.closest(data[at : at + width])
            if child is None or count < self._page_tokens:
                return pages, (child.page, count) if child else None
            pages.append(child.page)
            node = child
        return pages, None

    def touch(self, pages: Sequence[int]) -> None:
        """Marks pages as used just now, the last one last."""
        for page in pages:
            self._clock += 1
            self._nodes[page].stamp = self._clock

    def put(self, parent: int, tokens: np.ndarray, page: int) -> int:
        """Says what a page caches; a page that is here and has more tokens now is moved to its new place.

        Args:
          parent: the full page before it, or `ROOT`.
          tokens: i32[1..page_tokens], all that the page caches.
          page: not `ROOT`; if it is here already, its parent is the same and its tokens start with those it had.

        Returns:
          The page that stands for these tokens: `page`, or one that was here and has them all (first come, first kept);
          then `page` is not in the tree.
        """
        key, node, above = pack(tokens), self._nodes.get(page), self._nodes[parent]
        if node is not None and node.key == key:
            return page
        if node is not None:
            # Only a partial page gains tokens and it has no children, so nothing hangs on its old place.
            self._remove(node)
        other, count = above.closest(key)
        if other is not None and count * BYTES == len(key):
            self.touch([other.page])
            return other.page
        self._nodes[page] = node = _Node(page, key, above, 0)
        above.link(node)
        self.touch([page])
        return page

    def offer(self, page: int) -> None:
        """A page has become idle: nobody but the tree uses it."""
        # One with children waits until they are gone, see `_remove`.
        if not self._nodes[page].children and page not in self._queued:
            self._queued.add(page)
            heapq.heappush(self._queue, (self._nodes[page].stamp, page))

    def evict(self, idle: Callable[[int], bool]) -> tuple[int, int] | None:
        """Removes the least recently used idle page that has no children; returns it and the page before it, or None.

        Args:
          idle: whether nobody but the tree uses a page; must be true only of pages that were offered.
        """
        while self._queue:
            stamp, page = heapq.heappop(self._queue)
            self._queued.remove(page)
            node = self._nodes.get(page)
            if node is None or node.children or not idle(page):
                continue  # it is offered again when that changes
            if node.stamp != stamp:
                self.offer(page)  # used since: back, at its new place
                continue
            return page, self._remove(node)
        return None

    def covers(self, parent: int, key: bytes) -> bool:
        """Whether some page behind a full one, or behind `ROOT`, begins with the tokens of a key (`pack`)."""
        return self._nodes[parent].closest(key)[1] * BYTES == len(key)

    def clear(self) -> list[int]:
        """Removes all pages and returns them."""
        pages = [page for page in getattr(self, "_nodes", {}) if page != ROOT]
        self._nodes = {ROOT: _Node(ROOT, b"", None, 0)}
        self._queue: list[tuple[int, int]] = []  # (stamp when queued, page), a heap with one entry per page at most
        self._queued: set[int] = set()
        return pages

    def _remove(self, node: _Node) -> int:
        """Takes a leaf out of the tree; returns the page before it, or `ROOT`."""
        parent = node.parent
        assert parent is not None and not node.children
        parent.unlink(node)
        del self._nodes[node.page]
        if parent.page != ROOT:
            self.offer(parent.page)  # whether it is idle is asked when its turn comes
        return parent.page

    def path(self, page: int) -> list[int]:
        """The pages from the root's child down to this one."""
        node, path = self._nodes[page], []
        while node.parent is not None:
            path.append(node.page)
            node = node.parent
        return path[::-1]

    def is_full(self, page: int) -> bool:
        """Whether all tokens of a page are known, so that it never changes again."""
        return len(self._nodes[page].key) == self._page_tokens * BYTES

    def check(self, idle: Callable[[int], bool]) -> None:
        """Raises AssertionError naming the first broken invariant; linear in the pages, for tests."""
        reached = 0
        stack = [self._nodes[ROOT]]
        while stack:
            node = stack.pop()
            reached += 1
            assert self._nodes.get(node.page) is node, f"page {node.page} is linked but not indexed"
            assert node.keys == [c.key for c in node.children], f"keys below page {node.page} are not its children's"
            assert node.keys == sorted(set(node.keys)), f"children of page {node.page} are unordered or doubled"
            assert all(c.parent is node for c in node.children), f"a child of page {node.page} has another parent"
            if node.page != ROOT:
                assert 0 < len(node.key) <= self._page_tokens * BYTES, f"page {node.page} has a bad number of tokens"
                assert self.is_full(node.page) or not node.children, f"page {node.page} is partial and has children"
                waits = node.children or not idle(node.page) or node.page in self._queued
                assert waits, f"page {node.page} is an idle leaf that will never be evicted"
            stack += node.children
        assert reached == len(self._nodes), "pages are indexed that hang on nothing"
        assert sorted(p for _, p in self._queue) == sorted(self._queued), "the eviction queue has lost count"


def pack(tokens: np.ndarray) -> bytes:
    """Tokens i32[n] as a key."""
    return np.ascontiguousarray(tokens, np.int32).tobytes()


def common(a: bytes, b: bytes) -> int:
    """Leading tokens that two keys have in common."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // BYTES
    return int(np.argmax(np.frombuffer(a, np.int32, size // BYTES) != np.frombuffer(b, np.int32, size // BYTES)))
