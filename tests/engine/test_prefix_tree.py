"""The tree finds the longest prefix to the token and gives pages up in order of use; page numbers are made up."""

import numpy as np
import pytest

from jaxagent.engine.prefix_tree import ROOT, Match, PrefixTree


def ids(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def fill(tree: PrefixTree, text: str, pages: list[int]) -> list[int]:
    """Puts a sequence, four tokens a page; returns the pages that stand for it."""
    kept, parent = [], ROOT
    for i, page in enumerate(pages):
        parent = tree.put(parent, ids(text[4 * i : 4 * i + 4]), page)
        kept.append(parent)
    return kept


def everything(page: int) -> bool:
    return True


def evictions(tree: PrefixTree, idle=everything) -> list[int]:
    order = []
    while (page := tree.evict(idle)) is not None:
        order.append(page)
    return order


def offer_all(tree: PrefixTree, *pages: int) -> None:
    for page in pages:
        tree.offer(page)
    tree.check(everything)


def test_match_ends_anywhere() -> None:
    tree = PrefixTree(4)
    assert fill(tree, "aaaabbbbcc", [1, 2, 3]) == [1, 2, 3]
    for text, want in {
        "": Match([], None),
        "x": Match([], None),
        "a": Match([], (1, 1)),
        "aaab": Match([], (1, 3)),
        "aaaa": Match([1], None),
        "aaaax": Match([1], None),
        "aaaabbx": Match([1], (2, 2)),
        "aaaabbbb": Match([1, 2], None),
        "aaaabbbbc": Match([1, 2], (3, 1)),
        "aaaabbbbcc": Match([1, 2], (3, 2)),
        "aaaabbbbccccdddd": Match([1, 2], (3, 2)),
        "bbbb": Match([], None),
    }.items():
        assert tree.match(ids(text)) == want, text


def test_tokens_are_compared_whole() -> None:
    tree = PrefixTree(2)
    tree.put(ROOT, np.array([0x01020304, 7], np.int32), 1)
    assert tree.match(np.array([0x05020304, 7], np.int32)) == Match([], None)  # three of four bytes are equal
    assert tree.match(np.array([0x01020304, 0x0107], np.int32)) == Match([], (1, 1))


def test_the_best_of_many_siblings() -> None:
    rng = np.random.default_rng(0)
    rows = np.unique(rng.integers(0, 3, (300, 8), np.int32) * 200, axis=0)
    rng.shuffle(rows)
    tree = PrefixTree(8)
    for page, row in enumerate(rows, start=1):
        assert tree.put(ROOT, row, page) == page
    tree.check(lambda page: False)
    for _ in range(500):
        query = rng.integers(0, 3, 8, np.int32) * 200
        best = int(np.cumprod(rows == query, axis=1).sum(axis=1).max())
        match = tree.match(query)
        if best == 8:
            assert (rows[match.pages[0] - 1] == query).all()
        else:
            page, count = match.tail
            assert count == best and (rows[page - 1][:best] == query[:best]).all()


def test_first_come_first_kept() -> None:
    tree = PrefixTree(4)
    assert fill(tree, "aaaabb", [1, 2]) == [1, 2]
    assert fill(tree, "aaaabb", [3, 4]) == [1, 2]
    assert fill(tree, "aaaab", [3, 4]) == [1, 2]  # page 2 says this too
    assert fill(tree, "aaaabc", [1, 5]) == [1, 5]
    assert len(tree) == 3 and 3 not in tree and ROOT not in tree
    tree.check(lambda page: False)


def test_a_page_gains_tokens() -> None:
    tree = PrefixTree(4)
    fill(tree, "ab", [1])
    fill(tree, "abx", [2])
    assert tree.put(ROOT, ids("aby"), 1) == 1  # behind its sibling now
    tree.check(lambda page: False)
    assert tree.match(ids("aby")) == Match([], (1, 3)) and tree.match(ids("abx")) == Match([], (2, 3))
    assert tree.put(ROOT, ids("abyy"), 1) == 1
    assert tree.put(1, ids("z"), 3) == 3
    assert tree.put(ROOT, ids("abyy"), 2) == 1  # it came to equal another one: out
    assert 2 not in tree and tree.match(ids("abyyz")) == Match([1], (3, 1))
    tree.check(lambda page: False)


def test_leaves_go_first_the_oldest_first() -> None:
    tree = PrefixTree(4)
    fill(tree, "aaaabbbbcccc", [1, 2, 3])
    fill(tree, "aaaaxxxx", [1, 4])
    fill(tree, "zzzz", [5])
    offer_all(tree, 3, 2, 1, 4, 5)
    tree.touch([1, 2, 3])
    assert evictions(tree) == [4, 5, 3, 2, 1]
    assert len(tree) == 0 and tree.match(ids("aaaa")) == Match([], None)
    tree.check(everything)


def test_an_old_parent_waits_for_its_young_child() -> None:
    tree = PrefixTree(4)
    fill(tree, "aaaa", [1])
    fill(tree, "zzzz", [2])
    tree.put(1, ids("bbbb"), 3)
    fill(tree, "yyyy", [4])
    offer_all(tree, 1, 2, 3, 4)
    assert evictions(tree) == [2, 3, 1, 4]


def test_pages_in_use_stay_until_offered_again() -> None:
    tree = PrefixTree(4)
    fill(tree, "aaaabbbb", [1, 2])
    tree.offer(2)
    assert evictions(tree, lambda page: False) == []
    assert evictions(tree) == []  # nobody has said that it became idle
    tree.offer(2)
    tree.offer(2)
    assert evictions(tree, lambda page: page == 2) == [2]
    tree.offer(1)
    assert evictions(tree) == [1]


def test_clear() -> None:
    tree = PrefixTree(4)
    fill(tree, "aaaabbbb", [7, 2])
    offer_all(tree, 2, 7)
    assert tree.clear() == [7, 2]
    assert len(tree) == 0 and tree.evict(everything) is None
    tree.check(everything)


def test_check_sees_an_unqueued_leaf() -> None:
    tree = PrefixTree(4)
    fill(tree, "aaaa", [1])
    with pytest.raises(AssertionError, match="never be evicted"):
        tree.check(everything)
