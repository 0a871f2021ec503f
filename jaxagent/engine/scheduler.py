"""Who generates next: admission by pages, shared prefixes, chunked prefill, preemption. Host decisions only.

Between two dispatches the driver lets it admit waiting turns, by `admission_order`. A turn needs a free slot and pages
for its context. What the prefix tree holds of the context is shared or copied; the rest is prefilled, at most
`Sizes.prefill_rows` tokens per shard and round, so that a long prompt does not stall turns that generate. Pages for
new tokens are taken dispatch by dispatch. When no page is free, idle prefixes are evicted; then sessions lose their
pages: first those whose environment works, then waiting ones from the end of the queue, last the youngest with a slot,
and never one older than the session that asks. A session that lost its pages is prefilled again when its turn comes;
randomness is keyed by position, so its tokens are the same. There is no deadlock: the oldest turn that generates can
always go on, since one sequence fits, and if no turn generates, the first of the queue gets in.

Owned by the driver's thread. Device work is issued in the order of the decisions, which is why a page may be handed out
while work issued earlier still reads it.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import time
from collections.abc import Iterable, Iterator

import numpy as np

from jaxagent.engine.batching import Span, padded
from jaxagent.engine.executor import Executor
from jaxagent.engine.pages import PageStore
from jaxagent.engine.prefix_tree import common, pack
from jaxagent.engine.requests import Request, Session, SlotTable, admission_order, rows_of
from jaxagent.types import Generation

Copy = tuple[int, int, int]  # the shard, what to copy in it, and where to


class Scheduler:
    """Decides which turns have slots and pages, and what the device does next.

    Args:
      executor: the device side.
      context: tokens of the longest sequence.
    """

    def __init__(self, executor: Executor, context: int) -> None:
        sizes = executor.sizes
        self._executor, self._sizes = executor, sizes
        self.stores = [PageStore(sizes.pages, sizes.page_tokens, sizes.memories) for _ in range(sizes.shards)]
        self.slot_table = SlotTable(sizes.all_slots, context)
        self.stats: collections.Counter[str] = collections.Counter()
        self._tables = np.zeros((sizes.all_slots, sizes.table), np.int32)
        self._free_slots = [
            list(range(shard * sizes.slots, shard * sizes.slots + sizes.usable)) for shard in range(sizes.shards)
        ]  # heaps: low slots first, so that those in use fill few tiles
        self._waiting: list[Request] = []  # in the order of the last look, new ones at the end
        self._served: dict[str, int] = {}  # domain -> `_admissions` when it was last served
        self._admissions = 0
        self._prefilling: list[Request] = []  # have slot and pages, their context is not cached yet
        self._holders: dict[Session, None] = {}  # sessions with pages
        self._slots = sizes.usable * sizes.shards
        self.idle_since: float | None = None  # no turn is in hand
        self._again = 0  # tokens that are prefilled a second time in the round under way

    @property
    def waiting(self) -> bool:
        """Whether some turn is not generating yet."""
        return bool(self._waiting or self._prefilling)

    @property
    def requests(self) -> list[Request]:
        """Every turn that waits or generates."""
        return [*self._waiting, *self._prefilling, *(r for r in self.slot_table.requests if r is not None)]

    def submit(self, requests: Iterable[Request]) -> None:
        """Puts new turns into the queue."""
        self._waiting += requests
        if self._waiting:
            self.count_idle(time.monotonic())

    def count_idle(self, now: float) -> None:
        """A turn has come: all slots were free until now."""
        if self.idle_since is not None:
            self.stats["free_slot_s"] += now - self.idle_since
            self.idle_since = None

    def drop(self, sessions: Iterable[Session]) -> None:
        """Sessions that are closed or whose turn was abandoned: their slots and pages are free at once."""
        mask = np.zeros(self._sizes.all_slots, bool)
        dropped = set(sessions)
        self._waiting = [r for r in self._waiting if r.session not in dropped]
        for request in [r for r in self._prefilling if r.session in dropped]:
            self._prefilling.remove(request)
            self._give_back(request)
        for request in [r for r in self.slot_table.requests if r is not None and r.session in dropped]:
            mask[request.slot] = True
            tokens = np.concatenate([request.tokens, self.slot_table.drop(request.slot).tokens])
            self._commit(request, tokens[:-1])
            self._give_back(request)
        if mask.any():
            self._executor.free(mask)
        for session in dropped:
            self._release(session)

    def forget(self, recompute: bool) -> None:
        """Call when the weights have changed: no new sequence gets a prefix that the old weights cached.

        Args:
          recompute: open sessions too lose what the old weights cached, and turns in progress are prefilled again.
        """
        for store in self.stores:
            store.forget()
        if recompute:
            for session in list(self._holders):
                self._preempt(session)
                session.lost_tokens = 0  # what other weights computed would not have been used again

    def admit(self) -> None:
        """Gives waiting turns slots and pages, prefills, and starts those whose context is cached."""
        room = [self._sizes.prefill_rows] * self._sizes.shards
        while True:
            began = time.monotonic()
            admitted = self._take(began)
            self._again = 0
            spans = list(self._spans(room))
            if spans:
                tokens = sum(len(span.tokens) for span in spans)
                self.stats.update(
                    prefill_tokens=tokens, prefill_padded_tokens=self._executor.prefill(spans, self._tables)
                )
            for request in self._prefilling:
                self._commit(request, request.tokens[: request.prefilled])
            if self._sizes.memories:
                self._take_snapshots()
            ready = [r for r in self._prefilling if r.prefilled == len(r.tokens) - 1]
            self._prefilling = [r for r in self._prefilling if r.prefilled < len(r.tokens) - 1]
            if ready:
                self._begin(ready)
            if spans or ready:
                self._executor.wait()
                spent = time.monotonic() - began
                self.stats["prefill_s"] += spent
                if self._again:
                    self.stats["prefill_again_s"] += spent * self._again / tokens
            # What was prefilled just now may be what others waited for.
            if not admitted or not self._waiting:
                return

    def _take(self, now: float) -> int:
        """Takes turns out of the queue for which there is a slot and pages now, and issues copies of shared pages.

        Returns how many.
        """
        if not any(self._free_slots):
            return 0
        self._sort()
        admissions = 0
        copies: dict[bool, list[Copy]] = {}  # of pages, of memories
        computing = {self._first_page(r.tokens): r for r in reversed(self._prefilling)}
        full: set[int] = set()  # shards in which the first in the queue waits for pages
        for request in list(self._waiting):
            session = request.session
            open_shards = {s for s, slots in enumerate(self._free_slots) if slots} - full
            if session.pages is None:
                cached = {s: self.stores[s].cached(request.tokens) for s in open_shards}
                other = computing.get(self._first_page(request.tokens))
                if other is not None and self._waits(request, other, max(cached.values(), default=0)):
                    continue
                # Where most is cached; else where most is free.
                ranked = sorted(open_shards, key=lambda s: (-cached[s], -self._room(s), s))
            else:
                ranked = [session.shard] if session.shard in open_shards else []
            if not ranked:
                continue
            session.shard = ranked[0]
            if not self._give_pages(request, copies):
                full.add(session.shard)
                continue
            self._waiting.remove(request)
            self._prefilling.append(request)
            admissions += 1
            request.slot = heapq.heappop(self._free_slots[session.shard])
            self._show(request)
            computing.setdefault(self._first_page(request.tokens), request)
            self._served[session.domain] = self._admissions
            self._admissions += 1
            self.stats["queue_s"] += request.spend("queue_s", now)
            if not request.admitted:  # else it was interrupted
                request.admitted, request.cached_tokens = True, request.prefilled
                self.stats.update(requests=1, cached_tokens=request.prefilled)
        for memories, of_shards in copies.items():
            self._executor.copy_pages(of_shards, memories)
        return admissions

    def _waits(self, request: Request, other: Request, cached: int) -> bool:
        """Whether more of a turn's context than is cached will be, once another turn's is prefilled.

        Where the model keeps memories, that one leaves a snapshot where the two part: at the end of its context, or at
        the last page end before, unless it has got there.
        """
        whole = len(other.tokens) - 1
        usable = common(pack(request.tokens[:-1]), pack(other.tokens[:whole]))
        if self._sizes.memories and usable < whole:
            usable -= usable % self._sizes.page_tokens
        if usable <= cached or (self._sizes.memories and usable <= other.prefilled):
            return False
        other.branches.add(usable)
        return True

    def _sort(self) -> None:
        """Brings the queue into the order of admission."""
        if not self._waiting:
            return
        in_use = collections.Counter(r.session.domain for r in self.requests if r.slot >= 0)
        present = in_use.keys() | {r.session.domain for r in self._waiting}
        self._served = {domain: at for domain, at in self._served.items() if domain in present}
        order = admission_order([r.claim for r in self._waiting], in_use, self._served)
        self._waiting = [self._waiting[i] for i in order]

    def _give_pages(self, request: Request, copies: dict[bool, list[Copy]]) -> bool:
        """Gives a turn pages for its context; `request.prefilled` is what is cached of it. False: too few."""
        session, store = request.session, self.stores[request.session.shard]
        # For the snapshot that it left when it lost its pages; those of groups serve others too.
        greedy = session.lost_tokens > 0 or not self._sizes.memories
        while True:
            if session.pages is not None:
                if store.grow(session.pages, len(request.tokens)):
                    request.prefilled = session.cached
                    return True
            else:
                pages = store.open()
                admission = store.admit(pages, request.tokens, len(request.tokens), greedy)
                if admission is not None:
                    session.pages, self._holders[session] = pages, None
                    request.prefilled = admission.cached
                    request.branches = set() if session.lost_tokens else {admission.tree_tokens}
                    for of_memories, copy in admission.copies:
                        copies.setdefault(of_memories, []).append((session.shard, *copy))
                    return True
                store.release(pages)
            if not self._make_room(request):
                if greedy:
                    return False
                greedy = True

    def _make_room(self, asking: Request, idle_only: bool = False) -> bool:
        """Takes the pages of one session of the shard. Returns False if no session may lose its pages.

        A waiting turn takes pages from turns behind it in the queue. A generating turn takes them from all waiting
        turns, however old, and from younger ones that have a slot.
        """
        generating = asking.slot >= 0
        # Not `session.request`, which other threads change.
        busy = {r.session for r in self.requests}
        others = [s for s in self._holders if s.shard == asking.session.shard and s is not asking.session]
        behind = self._waiting if generating else self._waiting[self._waiting.index(asking) + 1 :]
        place = {r.session: at for at, r in enumerate(behind)}
        queued = [s for s in others if s in place]
        running = {r.session for r in self.requests if r.slot >= 0} if generating else set()  # prefilling ones too
        younger = [s for s in others if s in running and s.number > asking.session.number]
        if idle := [s for s in others if s not in busy]:
            self._preempt(max(idle, key=lambda s: s.number))
        elif idle_only:
            return False
        elif queued:
            self._preempt(max(queued, key=place.__getitem__))
        elif younger:
            self._preempt(max(younger, key=lambda s: s.number))
        return bool(idle or queued or younger)

    def _preempt(self, session: Session) -> None:
        """Takes a session's pages; a turn in progress goes back to the queue with what it has sampled."""
        request = next((r for r in self.requests if r.session is session and r.slot >= 0), None)
        if request is not None:
            now = time.monotonic()
            if request in self._prefilling:
                self._prefilling.remove(request)
                request.spend("prefill_s", now)
            else:
                request.spend("decode_s", now)
                mask = np.zeros(self._sizes.all_slots, bool)
                mask[request.slot] = True
                self._executor.free(mask)
                sampled = self.slot_table.drop(request.slot)
                request.before += sampled
                request.budget -= len(sampled.tokens)
                request.tokens = np.concatenate([request.tokens, sampled.tokens])
                self._executor.take_choices([(request, len(request.tokens) - 1)])
                request.prefilled = len(request.tokens) - 1
                self._commit(request, request.tokens[:-1])
            self._give_back(request)
            self.submit([request])
        session.lost_tokens = max(session.lost_tokens, session.cached if request is None else request.prefilled)
        self._release(session)
        self.stats["preemptions"] += 1

    def _spans(self, room: list[int]) -> Iterator[Span]:
        """The spans to prefill now, first come first served; subtracts them from the room of their shard."""
        for request in self._prefilling:
            shard = request.session.shard
            ahead = (b for b in request.branches if b > request.prefilled and self._sizes.memories)
            stop = min(len(request.tokens) - 1, request.prefilled + room[shard], *ahead)
            if stop > request.prefilled:
                self._again += max(0, min(stop, request.session.lost_tokens) - request.prefilled)
                yield Span(request.tokens[request.prefilled : stop], request.prefilled, request.slot)
                room[shard] -= padded(stop - request.prefilled, self._sizes.share)
                request.prefilled = stop

    def _begin(self, ready: list[Request]) -> None:
        self._executor.begin(rows_of(ready, self._sizes.all_slots))
        now = time.monotonic()
        for request in ready:
            request.spend("prefill_s", now)
            request.session.cached, request.session.lost_tokens = len(request.tokens) - 1, 0
            self.slot_table.begin(request)

    def dispatch(self, version: int) -> list[tuple[Request, Generation]]:
        """Generates up to K tokens in every active slot; returns the turns that ended."""
        self._grow()
        turns = int(self.slot_table.active.sum())
        began = time.monotonic()
        if not turns:
            self._look(began)
            return []
        queued, free = len(self._waiting), turns + len(self._prefilling) + len(self._waiting) < self._slots
        lengths = np.array([0 if r is None else len(r.tokens) for r in self.slot_table.requests])
        result = self._executor.generate(self._tables, self.slot_table.active, lengths, self.slot_table.truncated)
        now = time.monotonic()
        sampled = int(result.count @ self.slot_table.active)
        over = self.slot_table.record(result, version)
        self._tell()
        self._executor.take_choices(
            [(self.slot_table.requests[slot], self.slot_table.length(slot) - 1) for slot in over]
        )
        finished = [self.slot_table.finish(slot, result, now) for slot in over]
        for request, generation in finished:
            session = request.session
            session.cached = len(session.tokens) - 1
            self._commit(request, session.tokens[:-1])
            self._give_back(request)
            self.stats["overshoot_count"] += generation.overshoot_bytes > 0
        self.stats.update(dispatches=1, decode_s=now - began, decode_turns=turns, sampled_tokens=sampled)
        self.stats.update(free_slot_s=(now - began) * free, queued_turn_s=(now - began) * queued)
        self._look(now)
        return finished

    def _look(self, now: float) -> None:
        """Notes since when no turn is in hand: then all slots are free."""
        if self.idle_since is None and not self.requests:
            self.idle_since = now

    def _tell(self) -> None:
        """Calls `on_tokens` of the turns that have one with their new tokens."""
        for request in self.slot_table.requests:
            if request is not None and request.on_tokens is not None:
                new = self.slot_table.sampled(request.slot, request.reported - len(request.before.tokens))
                request.reported += len(new.tokens)
                if len(new.tokens):
                    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                        request.loop.call_soon_threadsafe(request.on_tokens, new)

    def _grow(self) -> None:
        """Pages for the tokens of the next dispatch, older sessions first."""
        active = [r for r in self.slot_table.requests if r is not None]
        for request in sorted(active, key=lambda r: r.session.number):
            while self.slot_table.requests[request.slot] is request:  # not preempted by an older one
                count = self.slot_table.count(request.slot)
                position = len(request.tokens) - 1 + count
                needed = position + min(self._executor.steps, request.budget - count)
                if self.stores[request.session.shard].grow(request.session.pages, needed):
                    self._show(request)
                    break
                if not self._make_room(request):
                    self._preempt(request.session)

    def _commit(self, request: Request, tokens: np.ndarray) -> None:
        """Enters what a session has cached into the tree; the session may get shared pages in exchange for its own."""
        self.stores[request.session.shard].commit(request.session.pages, tokens)
        if request.slot >= 0:
            self._show(request)

    def _take_snapshots(self) -> None:
        """Keeps memories for others: of contexts that are prefilled, and where other turns are known to go on from."""
        copies: list[Copy] = []
        for request in self._prefilling:
            session, wanted = request.session, request.prefilled in request.branches
            if wanted or request.prefilled == len(request.tokens) - 1:
                own = self.stores[session.shard].snapshot(session.pages)
                if own is None and wanted and self._make_room(request, idle_only=True):
                    own = self.stores[session.shard].snapshot(session.pages)
                copies += [(session.shard, *copy) for copy in own or ()]
        if copies:
            self._executor.copy_pages(copies, memories=True)

    def _show(self, request: Request) -> None:
        pages = request.session.pages.pages
        self._tables[request.slot, : len(pages)] = pages
        self._tables[request.slot, len(pages) :] = 0
        if self._sizes.memories:
            self._tables[request.slot, -1] = request.session.pages.memory

    def _give_back(self, request: Request) -> None:
        heapq.heappush(self._free_slots[request.session.shard], request.slot)
        request.slot = -1

    def _release(self, session: Session) -> None:
        if session.pages is not None:
            self.stores[session.shard].release(session.pages)
            session.pages, session.cached = None, 0
            del self._holders[session]

    def _room(self, shard: int) -> int:
        return self.stores[shard].free_pages + self.stores[shard].evictable_pages

    def _first_page(self, tokens: np.ndarray) -> bytes:
        return tokens[: self._sizes.page_tokens].tobytes()

    def check(self) -> None:
        """Raises AssertionError if a page or a slot is lost or used twice; for tests."""
        for store in self.stores:
            store.check()
        busy_slots = [r.slot for r in self.requests if r.slot >= 0]
        slots = sorted([*busy_slots, *itertools.chain(*self._free_slots)])
        first = (shard * self._sizes.slots for shard in range(self._sizes.shards))
        assert slots == [s + i for s in first for i in range(self._sizes.usable)], "a slot is lost or used twice"
        listed = sum(store.used_pages for store in self.stores)
        assert listed == len({(s.shard, p) for s in self._holders for p in s.pages.pages}), "pages without a session"
