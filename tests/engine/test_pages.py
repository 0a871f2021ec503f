"""Page lists, sharing and reuse: by hand with exact page numbers, and at random against simulated page contents."""

import copy

import numpy as np
import pytest

from jaxagent.engine.pages import TRASH, Admission, PagedSequence, PageStore


def ids(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def start(store: PageStore, text: str, needed: int | None = None) -> tuple[PagedSequence, Admission | None]:
    seq = store.open()
    admission = store.admit(seq, ids(text), needed or len(text))
    store.check()
    return seq, admission


def run(store: PageStore, text: str) -> PagedSequence:
    """A sequence whose tokens are all cached; its pages must suffice."""
    seq, admission = start(store, text)
    assert admission is not None
    store.commit(seq, ids(text))
    store.check()
    return seq


def state(store: PageStore) -> tuple:
    """Everything that a refusal must leave as it was."""
    tree = store._tree
    nodes = {p: (n.key, n.stamp, n.parent and n.parent.page) for p, n in tree._nodes.items()}
    lists = [(list(seq.pages), seq.committed, seq.life) for seq in store._open]
    memories = store._memories.free, list(store._memories.snapshots.items())
    own = (store._free, store._refs, store._idle, store.hit_tokens, store.evictions, memories)
    return copy.deepcopy((own, nodes, tree._queue, tree._clock, lists))


def test_a_group_shares_its_prompt() -> None:
    store = PageStore(pages=64, page_tokens=4)
    prompt = "aaaabbbbcccd"  # the last token is decoded from: 11 are cached
    first, admission = start(store, prompt, needed=16)
    assert admission[:2] == (0, []) and first.pages == [1, 2, 3, 4]
    store.commit(first, ids(prompt[:-1]))
    store.check()
    for n in range(15):
        seq, admission = start(store, prompt, needed=16)
        assert admission[:2] == (11, [(False, (3, 5 + 2 * n))])
        assert seq.pages == [1, 2, 5 + 2 * n, 6 + 2 * n]
    assert store.used_pages == 2 + 16 * 2 and store.evictable_pages == 0
    assert store.hit_tokens == 15 * 11


def test_a_sequence_begins_with_its_admission() -> None:
    store = PageStore(pages=8, page_tokens=4)
    seq = store.open()
    store.forget()
    assert store.admit(seq, ids("aaaab"), 5) == (0, [], 0)
    store.commit(seq, ids("aaaa"))  # of the new weights
    assert start(store, "aaaab")[1] == (4, [], 4)


def test_misuse() -> None:
    with pytest.raises(ValueError, match="2 pages"):
        PageStore(1, 4)
    store = PageStore(8, 4)
    seq, _ = start(store, "ab")
    for call in (
        lambda: store.admit(seq, ids("ab"), 2),  # has pages
        lambda: store.admit(store.open(), ids("ab"), 1),  # no page for the last token
        lambda: store.commit(seq, ids("aaaab")),  # beyond its pages
        lambda: store.grow(PagedSequence(), 1),
        lambda: PageStore(8, 4).release(seq),
    ):
        with pytest.raises(ValueError):
            call()
    store.release(seq)
    with pytest.raises(ValueError, match="not open"):
        store.release(seq)


def hashes(tokens: np.ndarray, life: int) -> np.ndarray:
    """What position p caches, as one number that depends on tokens[0..p] and the weights."""
    out, h = np.zeros(len(tokens), np.int64), 17 + life
    for i, token in enumerate(tokens.tolist()):
        h = out[i] = (int(h) * 1_000_003 + token + 1) % (2**61 - 1)
    return out


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Leading tokens that two sequences have in common."""
    size = min(len(a), len(b))
    return int(np.cumprod(a[:size] == b[:size]).sum())


class Simulation:
    """A store, the contents of its pages and memories as the device would have them, and sequences that do random
    things. What a memory holds is what its sequence's last token caches."""

    def __init__(self, seed: int, pages: int, page_tokens: int, memories: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.store = PageStore(pages, page_tokens, memories)
        self.pool = np.zeros((pages, page_tokens), np.int64)
        self.memories = np.zeros(memories, np.int64)
        self.snapshots: list[np.ndarray] = []  # of which tokens there must be one, since the last forget
        self.context = 6 * page_tokens
        self.live: list[tuple[PagedSequence, np.ndarray, int]] = []  # handle, its tokens, the weights that compute it
        self.past: list[np.ndarray] = [np.zeros(0, np.int32)]  # sequences to begin like
        self.committed: list[np.ndarray] = []  # since the last forget
        self.life = 0
        self.seen = dict.fromkeys(("shared", "copied", "refused", "swapped", "stuck", "crowded"), 0)

    def text(self, size: int) -> np.ndarray:
        return self.rng.integers(0, 2, size, np.int32) * 1000

    def expect(self, seq: PagedSequence, tokens: np.ndarray, life: int) -> None:
        at = np.arange(len(tokens))
        held = self.pool[np.array(seq.pages, int)[at // self.store.page_tokens], at % self.store.page_tokens]
        np.testing.assert_array_equal(held, hashes(tokens, life))
        if len(self.memories) and len(tokens):
            assert self.memories[seq.memory] == hashes(tokens, life)[-1]

    def write(self, seq: PagedSequence, tokens: np.ndarray, since: int, life: int) -> None:
        at = np.arange(since, len(tokens))
        pages = np.array(seq.pages, int)[at // self.store.page_tokens]
        self.pool[pages, at % self.store.page_tokens] = hashes(tokens, life)[since:]
        if len(self.memories) and len(tokens):
            assert since == 0 or self.memories[seq.memory] == hashes(tokens, life)[since - 1]
            self.memories[seq.memory] = hashes(tokens, life)[-1]

    def snapshot(self, i: int) -> None:
        seq, tokens, life = self.live[i]
        self.commit(i)
        copies = self.store.snapshot(seq)
        for source, target in copies or []:
            self.memories[target] = self.memories[source]
        if len(self.memories) and copies is None:
            assert all(s.memory for s, _, _ in self.live) and len(self.live) == len(self.memories) - 1
            self.seen["crowded"] += 1
        elif life == self.life:
            self.snapshots.append(tokens[:-1])

    def release(self, i: int) -> None:
        seq, tokens, life = self.live[i]
        if len(self.memories):
            self.commit(i)  # as the contract has it
        self.live.pop(i)
        self.store.release(seq)
        if life == self.life:
            self.snapshots.append(tokens[:-1])

    def admit(self) -> None:
        store, page_tokens = self.store, self.store.page_tokens
        like = self.past[self.rng.integers(len(self.past))]
        like = like[: self.rng.integers(len(like) + 1)] if self.rng.random() < 0.6 else like
        tokens = np.concatenate([like, self.text(self.rng.integers(1, 5))])[: self.context]
        needed = int(self.rng.integers(len(tokens), self.context + 4))
        pages, *_ = store._match(tokens)
        busy = {p for seq, _, _ in self.live for p in seq.pages} | set(pages)
        possible = -(-needed // page_tokens) - len(pages) <= len(self.pool) - 1 - len(busy)
        possible = possible and not 0 < len(self.memories) <= len(self.live) + 1
        seq = store.open()
        before, known = state(store), store.cached(tokens)
        admission = store.admit(seq, tokens, needed)
        assert (admission is not None) == possible
        if admission is None:
            assert state(store) == before
            store.release(seq)
            self.seen["refused"] += 1
            return
        cached, both, _ = admission
        copies, memories = ([copy for kind, copy in both if kind == memory] for memory in (False, True))
        assert cached == known
        if store.evictions == 0 and not len(self.memories):
            assert cached == max((common(c, tokens[:-1]) for c in self.committed), default=0)
        if len(self.memories) > 1000:  # none is given up
            lengths = [len(s) for s in self.snapshots if common(s, tokens[:-1]) == len(s)]
            assert store.evictions or cached == max(lengths, default=0)
        assert len(seq.pages) == -(-needed // page_tokens) and TRASH not in seq.pages
        assert cached < len(tokens)
        for source, target in copies:
            assert source not in seq.pages[len(pages) :]
            self.pool[target] = self.pool[source]
        for source, target in memories:
            self.memories[target] = self.memories[source]
        self.expect(seq, tokens[:cached], self.life)
        self.write(seq, tokens[:-1], cached, self.life)
        self.seen["shared"] += bool(pages)
        self.seen["copied"] += len(copies)
        self.past = [*self.past[-20:], tokens]
        self.live.append((seq, tokens, self.life))
        if self.rng.random() < 0.7:
            self.commit(-1)

    def turn(self, i: int) -> None:
        seq, tokens, life = self.live[i]
        longer = np.concatenate([tokens, self.text(self.rng.integers(1, 6))])[: self.context]
        busy = {p for s, _, _ in self.live for p in s.pages}
        fresh = -(-len(longer) // self.store.page_tokens) - len(seq.pages)
        before = state(self.store)
        grown = self.store.grow(seq, len(longer))
        assert grown == (fresh <= len(self.pool) - 1 - len(busy))
        if not grown:
            assert state(self.store) == before
            self.seen["stuck"] += 1
            return
        self.write(seq, longer[:-1], len(tokens) - 1, life)
        self.live[i] = seq, longer, life
        self.past = [*self.past[-20:], longer]

    def commit(self, i: int) -> None:
        seq, tokens, life = self.live[i]
        before = list(seq.pages)
        self.store.commit(seq, tokens[:-1])
        self.seen["swapped"] += before != seq.pages
        self.expect(seq, tokens[:-1], life)
        if life == self.life:
            self.committed.append(tokens[:-1])

    def forget(self) -> None:
        self.store.forget()
        self.life += 1
        self.committed, self.snapshots = [], []

    def step(self) -> None:
        acts = ["admit", "turn", "commit", "snapshot", "release", "forget"]
        act = self.rng.choice(acts, p=[0.3, 0.3, 0.1, 0.1, 0.19, 0.01])
        if act == "forget":
            self.forget()
        elif act == "admit" or not self.live:
            self.admit()
        else:
            getattr(self, act)(int(self.rng.integers(len(self.live))))
        self.store.check()
        for seq, tokens, life in self.live:
            self.expect(seq, tokens[:-1], life)  # nobody has written into what it reads


@pytest.mark.parametrize(
    ("pages", "page_tokens", "memories"),
    [(14, 4, 0), (12, 1, 0), (24, 3, 0), (1000, 4, 0), (30, 4, 2), (12, 1, 3), (24, 3, 12), (1000, 4, 2000)],
)
def test_random_steps_against_simulated_pages(pages, page_tokens, memories) -> None:
    sim = Simulation(pages + memories, pages, page_tokens, memories)
    for _ in range(300 if pages > 100 else 1000):
        sim.step()
    roomy = pages > 100
    assert (sim.store.evictions == 0) == roomy or memories == 2
    assert sim.seen["shared"] and (sim.seen["copied"] or page_tokens == 1)
    assert sim.seen["swapped"] or memories == 2
    if not memories:
        assert bool(sim.seen["refused"]) == bool(sim.seen["stuck"]) == (not roomy)
    assert bool(sim.seen["crowded"]) == (memories in (2, 3)), sim.seen
    while sim.live:
        sim.release(0)
        sim.store.check()
    seq = sim.store.open()
    assert sim.store.admit(seq, sim.text(1), (pages - 1) * page_tokens)  # evicts all there is
    assert sim.store.used_pages == pages - 1 and not sim.store._memories.snapshots
    sim.store.release(seq)
    sim.store.check()
    assert sim.store.free_pages == pages - 1 and len(sim.store._memories.free) == max(memories - 1, 0)


def test_the_same_steps_give_the_same_pages() -> None:
    a, b = Simulation(9, 20, 4, 12), Simulation(9, 20, 4, 12)
    for _ in range(300):
        a.step()
        b.step()
    assert state(a.store) == state(b.store)
