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
    own = (store._free, store._refs, store._idle, store.hit_tokens, store.evictions)
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
        assert admission[:2] == (11, [(3, 5 + 2 * n)])
        assert seq.pages == [1, 2, 5 + 2 * n, 6 + 2 * n]
    assert store.used_pages == 2 + 16 * 2 and store.evictable_pages == 0
    assert store.hit_tokens == 15 * 11


def test_eviction_order() -> None:
    store = PageStore(pages=6, page_tokens=4)
    store.release(run(store, "aaaabbbb"))  # 1 2
    store.release(run(store, "cccc"))  # 3
    store.release(run(store, "aaaadddd"))  # 1 4
    assert (store.free_pages, store.evictable_pages, store.used_pages) == (1, 4, 0)
    seq, _ = start(store, "x")
    taken = []
    for pages in (1, 2, 3, 4, 5):
        assert store.grow(seq, 4 * pages)
        store.check()
        taken.append(seq.pages[-1])
    assert taken == [5, 2, 3, 4, 1] and store.evictions == 4
    assert not store.grow(seq, 21)
    store.release(seq)
    store.check()
    assert store.free_pages == 5


def test_pages_given_back_come_again_in_order() -> None:
    store = PageStore(pages=8, page_tokens=4)
    for _ in range(2):
        seq, _ = start(store, "a", needed=12)
        assert seq.pages == [1, 2, 3]
        store.release(seq)


def test_a_sequence_begins_with_its_admission() -> None:
    store = PageStore(pages=8, page_tokens=4)
    seq = store.open()
    store.forget()
    assert store.admit(seq, ids("aaaab"), 5) == (0, [], [], 0)
    store.commit(seq, ids("aaaa"))  # of the new weights
    assert start(store, "aaaab")[1] == (4, [], [], 4)


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
    """A store, the contents of its pages as the device would have them, and sequences that do random things."""

    def __init__(self, seed: int, pages: int, page_tokens: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.store = PageStore(pages, page_tokens)
        self.pool = np.zeros((pages, page_tokens), np.int64)
        self.context = 6 * page_tokens
        self.live: list[tuple[PagedSequence, np.ndarray, int]] = []  # handle, its tokens, the weights that compute it
        self.past: list[np.ndarray] = [np.zeros(0, np.int32)]  # sequences to begin like
        self.committed: list[np.ndarray] = []  # since the last forget
        self.life = 0
        self.seen = dict.fromkeys(("shared", "copied", "refused", "swapped", "stuck"), 0)

    def text(self, size: int) -> np.ndarray:
        return self.rng.integers(0, 2, size, np.int32) * 1000

    def expect(self, seq: PagedSequence, tokens: np.ndarray, life: int) -> None:
        at = np.arange(len(tokens))
        held = self.pool[np.array(seq.pages, int)[at // self.store.page_tokens], at % self.store.page_tokens]
        np.testing.assert_array_equal(held, hashes(tokens, life))

    def write(self, seq: PagedSequence, tokens: np.ndarray, since: int, life: int) -> None:
        at = np.arange(since, len(tokens))
        pages = np.array(seq.pages, int)[at // self.store.page_tokens]
        self.pool[pages, at % self.store.page_tokens] = hashes(tokens, life)[since:]

    def admit(self) -> None:
        store, page_tokens = self.store, self.store.page_tokens
        like = self.past[self.rng.integers(len(self.past))]
        like = like[: self.rng.integers(len(like) + 1)] if self.rng.random() < 0.6 else like
        tokens = np.concatenate([like, self.text(self.rng.integers(1, 5))])[: self.context]
        needed = int(self.rng.integers(len(tokens), self.context + 4))
        pages, _ = store._tree.match(tokens[:-1])
        busy = {p for seq, _, _ in self.live for p in seq.pages} | set(pages)
        possible = -(-needed // page_tokens) - len(pages) <= len(self.pool) - 1 - len(busy)
        seq = store.open()
        before = state(store)
        admission = store.admit(seq, tokens, needed)
        assert (admission is not None) == possible
        if admission is None:
            assert state(store) == before
            store.release(seq)
            self.seen["refused"] += 1
            return
        cached, copies, *_ = admission
        if store.evictions == 0:
            assert cached == max((common(c, tokens[:-1]) for c in self.committed), default=0)
        assert len(seq.pages) == -(-needed // page_tokens) and TRASH not in seq.pages
        assert cached < len(tokens)
        for source, target in copies:
            assert source not in seq.pages[len(pages) :]
            self.pool[target] = self.pool[source]
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
        self.committed = []

    def step(self) -> None:
        acts = ["admit", "turn", "commit", "release", "forget"]
        act = self.rng.choice(acts, p=[0.3, 0.3, 0.2, 0.19, 0.01])
        if act == "forget":
            self.forget()
        elif act == "admit" or not self.live:
            self.admit()
        else:
            i = int(self.rng.integers(len(self.live)))
            if act == "release":
                self.store.release(self.live.pop(i)[0])
            else:
                getattr(self, act)(i)
        self.store.check()
        for seq, tokens, life in self.live:
            self.expect(seq, tokens[:-1], life)  # nobody has written into what it reads


@pytest.mark.parametrize(
    ("seed", "pages", "page_tokens"), [(0, 14, 4), (1, 30, 4), (2, 12, 1), (3, 24, 3), (4, 40, 2), (5, 1000, 4)]
)
def test_random_steps_against_simulated_pages(seed, pages, page_tokens) -> None:
    sim = Simulation(seed, pages, page_tokens)
    for _ in range(300 if pages > 100 else 1500):
        sim.step()
    roomy = pages > 100
    assert (sim.store.evictions == 0) == roomy
    assert sim.seen["shared"] and (sim.seen["copied"] or page_tokens == 1)
    assert sim.seen["swapped"]
    assert bool(sim.seen["refused"]) == bool(sim.seen["stuck"]) == (not roomy)
    for seq, _, _ in sim.live:
        sim.store.release(seq)
        sim.store.check()
    seq = sim.store.open()
    assert sim.store.grow(seq, (pages - 1) * page_tokens)  # evicts all there is
    assert sim.store.used_pages == pages - 1
    sim.store.release(seq)
    sim.store.check()
    assert sim.store.free_pages == pages - 1


def test_the_same_steps_give_the_same_pages() -> None:
    a, b = Simulation(9, 20, 4), Simulation(9, 20, 4)
    for _ in range(300):
        a.step()
        b.step()
    assert state(a.store) == state(b.store)
