"""Who uses which page and memory of the cache: reference counts, page lists, reuse. NumPy and stdlib only.

A sequence's position p lies in `pages[p // page_tokens]` at `p % page_tokens`. A full page whose keys and values are
computed never changes and is shared by reference. A partial page has one writer; the prefix tree may know its tokens,
since the writer only appends, but another sequence that begins with them gets a copy. What sequences leave behind
stays in the tree until the pages are needed.

Where the model keeps memories, each sequence with pages has one, and a prefix can be used only where a snapshot says
what the memory was after it: an admission ends at the deepest one. A closed sequence leaves its memory as a snapshot.

Nothing here touches the device. It is enough that the device does what the driver issues in order: a page may be handed
out again while work issued earlier still uses it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxagent.engine.memories import Memories, Place
from jaxagent.engine.prefix_tree import BYTES, ROOT, PrefixTree, pack

TRASH = ROOT  # the page that padding rows write to: never handed out


@dataclasses.dataclass(eq=False)
class PagedSequence:
    """The pages of one sequence, and its memory. Made by `PageStore.open`; read these two, change nothing."""

    pages: list[int] = dataclasses.field(default_factory=list)
    memory: int = 0  # 0: without pages, or of a model that keeps none
    committed: int = 0  # leading tokens that `commit` has seen, or that came with shared pages
    last: bytes = b""  # of those that `commit` has seen, the packed ones in the last page
    life: int = 0  # how often the store had forgotten everything when this sequence began


Copy = tuple[int, int]  # from which page or memory, to which


class Admission(NamedTuple):
    """What an admitted sequence gets of others."""

    cached: int  # leading tokens that need no prefill once the copies are made
    copies: list[tuple[bool, Copy]]  # of a page (False) and of a memory (True), where there is one to copy
    tree_tokens: int  # leading ones in whole pages that the tree has, if only there were a snapshot


class PageStore:
    """All pages but the trash page, all memories, the sequences that use them and the tree of what they cache.

    In every step these hold, see `check`: a page is free, or has one reference per sequence that lists it and one if
    the tree has it. The listed pages before `committed` are a path of the tree, so a page that only the tree uses has
    only such pages below it: every idle page can be evicted, and counting them tells what can be handed out.

    Args:
      pages: P, the trash page included; at least 2.
      page_tokens: positions per page.
      memories: memory 0, which is nobody's, included; 0: the model keeps none.

    Raises:
      ValueError: sizes too small.
    """

    def __init__(self, pages: int, page_tokens: int, memories: int = 0) -> None:
        if pages < 2 or page_tokens < 1:
            raise ValueError(f"A store needs 2 pages of 1 token at least, not {pages} of {page_tokens}.")
        self.page_tokens, self._remembers = page_tokens, memories > 0
        self.hit_tokens = 0  # tokens that admissions found cached
        self.evictions = 0  # pages given up because others needed them
        self._total = pages - 1
        self._free = list(range(pages - 1, TRASH, -1))  # a stack, page 1 on top
        self._refs = [0] * pages
        self._idle = 0  # pages that only the tree uses
        self._tree = PrefixTree(page_tokens)
        self._memories = Memories(memories)
        self._open: dict[PagedSequence, None] = {}
        self._life = 0

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def evictable_pages(self) -> int:
        """Pages that only the tree uses."""
        return self._idle

    @property
    def used_pages(self) -> int:
        """Pages that sequences use, each counted once."""
        return self._total - len(self._free) - self._idle

    def open(self) -> PagedSequence:
        """A new sequence without pages; `admit` it next, `release` it in the end."""
        seq = PagedSequence(life=self._life)
        self._open[seq] = None
        return seq

    def admit(self, seq: PagedSequence, tokens: np.ndarray, needed: int, greedy: bool = True) -> Admission | None:
        """Gives a sequence its first pages, those that hold a prefix of its tokens already where there are any.

        The last token is never counted as cached: a turn begins by decoding from it. The copies must be issued before
        any work that a later call on this store leads to, and after the work that earlier commits spoke of.

        Args:
          seq: open and without pages.
          tokens: i32[n], the sequence from its start.
          needed: positions to have pages for, n at least.
          greedy: whether it may take for its own the very snapshot that it begins from, if no other memory is left.

        Returns:
          What it got of others; None if there are not enough pages even without all idle ones, or no memory even
          without other snapshots, and then nothing has changed.

        Raises:
          ValueError: the sequence is not open, has pages, or `needed` is less than n.
        """
        self._must_be_open(seq)
        if seq.pages or needed < len(tokens):
            raise ValueError(f"Admission of {len(tokens)} tokens to {needed} positions and {len(seq.pages)} pages.")
        shared, tail, place, tree_tokens = self._match(tokens)
        fresh = self._pages_for(needed) - len(shared)
        spare = len(self._free) + self._idle - sum(self._refs[page] == 1 for page in shared)
        if fresh > spare or (self._remembers and self._memories.available <= (place is not None and not greedy)):
            return None
        copies = []
        if self._remembers:
            memory = self._memories.use(place) if place else 0
            seq.memory, seq.last = self._memories.take(place), place[1] if place and not tail else b""
            if memory not in (0, seq.memory):  # else there was no other left: the snapshot goes on as the sequence's
                copies.append((True, (memory, seq.memory)))
        source, count = tail or (TRASH, 0)
        # All pages that are left are needed, the one to copy from too: then it is the sequence's from here on.
        becomes_own = fresh == spare and self._refs[source] == 1
        reused = [*shared, source] if tail and not becomes_own else shared
        self._tree.touch(reused)
        # The source of the copy is held while pages are handed out, so that it is none of them. No longer: the driver
        # issues the copy now, and whoever gets the source later writes to it later.
        for page in reused:
            self._retain(page)
        own = self._take(fresh)
        if becomes_own:
            own = [source, *(page for page in own if page != source)]
        elif tail:
            copies.append((False, (source, own[0])))
            self._drop(source)
        cached = len(shared) * self.page_tokens
        seq.pages, seq.committed, seq.life = shared + own, cached, self._life
        self.hit_tokens += cached + count
        return Admission(cached + count, copies, tree_tokens)

    def snapshot(self, seq: PagedSequence) -> list[Copy] | None:
        """Keeps what a sequence's memory is now for others; call when it has read what was last committed, no more.

        Returns:
          The copy of a memory to issue, (source, target): none where there is such a snapshot, or nobody would find
          it; None if all memories belong to sequences.

        Raises:
          ValueError: the sequence is not open.
        """
        self._must_be_open(seq)
        place = self._place(seq)
        if place is None or self._memories.use(place):
            return []
        if not self._memories.available:
            return None
        memory = self._memories.take()
        self._memories.keep(place, memory)
        return [(seq.memory, memory)]

    def cached(self, tokens: np.ndarray) -> int:
        """How many leading tokens of i32[n] an admission would find cached, n - 1 at most."""
        pages, tail, *_ = self._match(tokens)
        return len(pages) * self.page_tokens + (tail[1] if tail else 0)

    def grow(self, seq: PagedSequence, needed: int) -> bool:
        """Gives a sequence pages for all positions below `needed`; False if there are too few: nothing has changed.

        Raises:
          ValueError: the sequence is not open.
        """
        self._must_be_open(seq)
        fresh = max(self._pages_for(needed) - len(seq.pages), 0)
        if fresh > len(self._free) + self._idle:
            return False
        seq.pages += self._take(fresh)
        return True

    def commit(self, seq: PagedSequence, tokens: np.ndarray) -> None:
        """Lets others find what a sequence has cached; costs only what is new since its last commit.

        A full page that equals one of the tree's is given back and `seq.pages` names the tree's instead: read it anew
        before the next dispatch. A sequence that began before the last `forget` is not entered, its cache is of
        other weights.

        Args:
          seq: open.
          tokens: i32[n], the sequence from its start, all of it computed or issued to the device; starts with what
            was committed before.

        Raises:
          ValueError: the sequence is not open, or has no pages for so many tokens.
        """
        self._must_be_open(seq)
        if self._pages_for(len(tokens)) > len(seq.pages):
            raise ValueError(f"{len(tokens)} tokens cannot be cached in {len(seq.pages)} pages.")
        if len(tokens) <= seq.committed or seq.life != self._life:
            return
        for i in range(seq.committed // self.page_tokens, self._pages_for(len(tokens))):
            part = tokens[i * self.page_tokens : (i + 1) * self.page_tokens]
            page, was_in = seq.pages[i], seq.pages[i] in self._tree
            in_tree = self._tree.put(seq.pages[i - 1] if i else ROOT, part, page)
            # The sequence has a reference of its own throughout, so the page becomes neither idle nor free by this.
            self._refs[page] += (in_tree == page) - was_in
            if in_tree != page and len(part) == self.page_tokens:
                # Not only to save a page: it keeps the sequence's pages a path of the tree.
                self._retain(in_tree)
                self._drop(page)
                seq.pages[i] = in_tree
        full = (len(tokens) - 1) // self.page_tokens
        seq.committed, seq.last = len(tokens), pack(tokens[full * self.page_tokens :])

    def release(self, seq: PagedSequence) -> None:
        """Ends a sequence, or takes its pages from it; what it committed can be found until it is evicted.

        Its memory becomes a snapshot: it must have read what was last committed, no more.

        Raises:
          ValueError: the sequence is not open.
        """
        self._must_be_open(seq)
        del self._open[seq]
        if seq.memory and (place := self._place(seq)):
            self._memories.keep(place, seq.memory)
        elif seq.memory:
            self._memories.free.append(seq.memory)
        for page in reversed(seq.pages):
            self._drop(page)
        seq.pages, seq.memory, seq.committed, seq.last = [], 0, 0, b""

    def forget(self) -> None:
        """Nothing cached so far is found any more (the weights have changed); open sequences keep their pages."""
        self._life += 1
        self._idle = 0
        self._memories.clear()
        for page in self._tree.clear():
            self._drop(page)

    def _match(self, tokens: np.ndarray) -> tuple[list[int], tuple[int, int] | None, Place | None, int]:
        """What an admission can use, as `PrefixTree.match`, and `Admission.tree_tokens`.

        With memories it ends at the deepest snapshot, whose place it says.
        """
        pages, tail = self._tree.match(tokens[:-1])
        tree_tokens = len(pages) * self.page_tokens
        if not self._remembers:
            return pages, tail, None, tree_tokens
        data, width = pack(tokens[:-1]), BYTES * self.page_tokens
        for i in range(len(pages), -1, -1):
            parent = pages[i - 1] if i else ROOT
            if key := self._memories.longest(parent, data[i * width : (i + 1) * width]):
                whole = pages[: i + len(key) // width]
                page = [*pages, tail and tail[0]][i]
                return whole, None if len(whole) > i else (page, len(key) // BYTES), (parent, key), tree_tokens
        return [], None, None, tree_tokens

    def _place(self, seq: PagedSequence) -> Place | None:
        """Where a snapshot of a sequence's memory belongs; None where nobody would find it."""
        if not seq.last or not self._remembers or seq.life != self._life:
            return None
        full = (seq.committed - 1) // self.page_tokens
        place = seq.pages[full - 1] if full else ROOT, seq.last
        return place if self._tree.covers(*place) else None

    def _must_be_open(self, seq: PagedSequence) -> None:
        if seq not in self._open:
            raise ValueError("The sequence is not open in this store.")

    def _pages_for(self, positions: int) -> int:
        return -(-positions // self.page_tokens)

    def _retain(self, page: int) -> None:
        self._idle -= self._is_idle(page)
        self._refs[page] += 1

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)
        elif self._is_idle(page):
            self._idle += 1
            self._tree.offer(page)

    def _is_idle(self, page: int) -> bool:
        return self._refs[page] == 1 and page in self._tree

    def _take(self, count: int) -> list[int]:
        """Hands out pages with a reference each, evicting the fewest possible; there must be enough."""
        while len(self._free) < count:
            leaf = self._tree.evict(self._is_idle)
            assert leaf is not None, "idle pages were miscounted"
            page, parent = leaf
            self._memories.drop_behind(parent, lambda tokens, parent=parent: not self._tree.covers(parent, tokens))
            self._idle -= 1
            self.evictions += 1
            self._refs[page] = 0
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def check(self) -> None:
        """Raises AssertionError naming the first broken invariant; linear in the pages, for tests."""
        pages, free = range(TRASH + 1, self._total + 1), set(self._free)
        users: dict[int, list[tuple[PagedSequence, int]]] = {page: [] for page in pages}
        for seq in self._open:
            for i, page in enumerate(seq.pages):
                assert page in users, f"a sequence lists page {page}, which is not its to have"
                users[page].append((seq, i))
            path = seq.pages[: seq.committed // self.page_tokens]
            if path and seq.life == self._life:
                assert path[-1] in self._tree, f"page {path[-1]} is committed but not in the tree"
                assert self._tree.path(path[-1]) == path, "a sequence's committed pages are not a path of the tree"
        for page, uses in users.items():
            refs = len(uses) + (page in self._tree)
            assert self._refs[page] == refs, f"page {page} has {refs} references, {self._refs[page]} are counted"
            assert (page in free) == (refs == 0), f"page {page} is free and in use, or lost"
            full = all(i < seq.committed // self.page_tokens for seq, i in uses)
            assert len(uses) <= 1 or full, f"page {page} is written by several sequences"
            if page in self._tree:
                fresh = all(seq.life == self._life for seq, _ in uses)
                assert fresh, f"page {page} is in the tree with what other weights computed"
                assert self._tree.is_full(page) or len(uses) <= 1, f"page {page} is partial and shared"
                above = self._tree.path(page) if uses else []
                assert not any(map(self._is_idle, above)), f"page {page} is used below an idle page"
        self._check_memories()
        assert self._refs[TRASH] == 0 and TRASH not in free, "the trash page is in circulation"
        assert len(free) == len(self._free), "a page is free twice"
        assert self._idle == sum(map(self._is_idle, pages)), "idle pages are miscounted"
        self._tree.check(self._is_idle)

    def _check_memories(self) -> None:
        snapshots, free = self._memories.snapshots, self._memories.free
        used = [seq.memory for seq in self._open if seq.memory]
        every = sorted([*used, *free, *snapshots.values()])
        assert every == list(range(1, len(every) + 1)), "a memory is lost or used twice"
        assert all(bool(seq.pages and self._remembers) == bool(seq.memory) for seq in self._open), "pages want a memory"
        for parent, tokens in snapshots:
            assert parent == ROOT or (parent in self._tree and self._tree.is_full(parent)), f"no page {parent} is full"
            assert tokens and self._tree.covers(parent, tokens), f"no page behind {parent} has a snapshot's tokens"
            assert self._memories.longest(parent, tokens) == tokens, f"a snapshot behind page {parent} is not found"
