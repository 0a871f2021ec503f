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
    assert admission == Admission(0, []) and first.pages == [1, 2, 3, 4]
    store.commit(first, ids(prompt[:-1]))
    store.check()
    for n in range(15):
        seq, admission = start(store, prompt, needed=16)
        assert admission == Admission(11, [(3, 5 + 2 * n)])
        assert seq.pages == [1, 2, 5 + 2 * n, 6 + 2 * n]
    assert store.used_pages == 2 + 16 * 2 and store.evictable_pages == 0
    assert store.hit_tokens == 15 * 11


def test_a_group_ending_in_the_same_words_is_stored_once() -> None:
    store = PageStore(pages=64, page_tokens=4)
    group = [start(store, "aaaab", needed=12)[0] for _ in range(3)]  # all before any is computed
    assert [seq.pages for seq in group] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for seq in group:
        store.commit(seq, ids("aaaabb"))
        store.check()
    assert [seq.pages for seq in group] == [[1, 2, 3], [1, 5, 6], [1, 8, 9]]
    assert 2 in store._tree and 5 not in store._tree and 8 not in store._tree
    store.commit(group[1], ids("aaaabbxx"))
    store.commit(group[2], ids("aaaabbxxyy"))
    store.commit(group[0], ids("aaaabbxxyz"))
    store.check()
    assert [seq.pages for seq in group] == [[1, 5, 3], [1, 5, 6], [1, 5, 9]]


def test_a_resent_history_needs_its_suffix_only() -> None:
    store = PageStore(pages=32, page_tokens=4)
    store.release(run(store, "aaaabbbbcc"))
    seq, admission = start(store, "aaaabbbbccnewtext", needed=20)
    assert admission == Admission(10, [(3, 4)]) and seq.pages == [1, 2, 4, 5, 6]
    store.commit(seq, ids("aaaabbbbccnewtex"))
    store.release(seq)
    store.check()
    _, admission = start(store, "aaaabbbbccnewtextmore")
    assert admission == Admission(16, [])


def test_the_last_token_is_never_cached() -> None:
    store = PageStore(pages=32, page_tokens=4)
    run(store, "aaaabbbb")
    seq, admission = start(store, "aaaabbbb")
    assert admission == Admission(7, [(2, 3)]) and seq.pages == [1, 3]
    _, admission = start(store, "a")
    assert admission == Admission(0, [])


def test_divergence_inside_a_page() -> None:
    store = PageStore(pages=32, page_tokens=4)
    run(store, "aaaabbbbcccc")
    seq, admission = start(store, "aaaabbxbcccc")
    assert admission == Admission(6, [(2, 4)]) and seq.pages == [1, 4, 5]
    store.commit(seq, ids("aaaabbxbcccc"))
    store.check()
    assert start(store, "aaaabbxbccccd")[0].pages[:3] == [1, 4, 5]
    assert start(store, "aaaabbbbccccd")[0].pages[:3] == [1, 2, 3]


def test_a_writer_appends_to_a_page_that_others_copy() -> None:
    store = PageStore(pages=32, page_tokens=4)
    seq = run(store, "ab")
    assert start(store, "abc")[1] == Admission(2, [(1, 2)])
    store.commit(seq, ids("abx"))
    store.check()
    assert start(store, "abxy")[1] == Admission(3, [(1, 3)])
    store.commit(seq, ids("abx"))
    store.commit(seq, ids("a"))  # what is known already changes nothing
    store.check()
    assert start(store, "abxy")[1] == Admission(3, [(1, 4)])


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


def test_exhaustion_changes_nothing() -> None:
    store = PageStore(pages=6, page_tokens=4)
    store.release(run(store, "aaaabbbb"))
    user = run(store, "cccc")
    seq = store.open()
    before = state(store)
    assert store.admit(seq, ids("aaaabbbbx"), 17) is None
    assert not store.grow(user, 21)
    assert state(store) == before
    assert store.admit(seq, ids("aaaabbbbx"), 16) == Admission(8, [])  # two shared, and the last two free ones
    store.check()
    assert store.free_pages == store.evictable_pages == 0
    other = store.open()
    before = state(store)
    assert store.admit(other, ids("c"), 1) is None
    assert state(store) == before
    store.release(user)
    assert store.admit(other, ids("d"), 1) == Admission(0, [])
    store.check()


def test_the_source_of_a_copy_is_given_up_when_the_pool_has_nothing_else() -> None:
    store = PageStore(pages=4, page_tokens=4)
    store.release(run(store, "aaaabb"))  # 1 2, and 3 is free
    seq, admission = start(store, "aaaabbcc", needed=8)
    assert admission == Admission(6, [(2, 3)])
    store.release(seq)
    seq, admission = start(store, "aaaabbcc", needed=12)
    assert admission == Admission(4, []) and seq.pages == [1, 2, 3]


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
    assert store.admit(seq, ids("aaaab"), 5) == Admission(0, [])
    store.commit(seq, ids("aaaa"))  # of the new weights
    assert start(store, "aaaab")[1] == Admission(4, [])


def test_forget() -> None:
    store = PageStore(pages=16, page_tokens=4)
    store.release(run(store, "cccc"))
    old = run(store, "aaaabb")
    also_old, _ = start(store, "aaaab", needed=8)
    store.forget()
    store.check()
    assert old.pages == [2, 3] and also_old.pages == [2, 4]
    assert store.evictable_pages == 0 and store.used_pages == 3
    store.grow(old, 12)
    store.commit(old, ids("aaaabbbbcc"))  # computed by other weights: not entered
    store.check()
    seq, admission = start(store, "aaaabbb")
    assert admission == Admission(0, [])
    store.commit(seq, ids("aaaabb"))
    store.release(old)
    store.check()
    assert start(store, "aaaabbb")[1].cached == 6
    for seq in list(store._open):
        store.release(seq)
    store.forget()
    store.check()
    assert store.free_pages == 15


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
        match = store._tree.match(tokens[:-1])
        busy = {p for seq, _, _ in self.live for p in seq.pages} | set(match.pages)
        possible = -(-needed // page_tokens) - len(match.pages) <= len(self.pool) - 1 - len(busy)
        seq = store.open()
        before = state(store)
        admission = store.admit(seq, tokens, needed)
        assert (admission is not None) == possible
        if admission is None:
            assert state(store) == before
            store.release(seq)
            self.seen["refused"] += 1
            return
        if store.evictions == 0:
            assert admission.cached == max((common(c, tokens[:-1]) for c in self.committed), default=0)
        assert len(seq.pages) == -(-needed // page_tokens) and TRASH not in seq.pages
        assert admission.cached < len(tokens)
        for source, target in admission.copies:
            assert source not in seq.pages[len(match.pages) :]
            self.pool[target] = self.pool[source]
        self.expect(seq, tokens[: admission.cached], self.life)
        self.write(seq, tokens[:-1], admission.cached, self.life)
        self.seen["shared"] += bool(match.pages)
        self.seen["copied"] += len(admission.copies)
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
