"""The tree finds the longest prefix to the token and gives pages up in order of use; page numbers are made up."""

import numpy as np
import pytest

from jaxagent.engine.prefix_tree import ROOT, PrefixTree


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
    while (leaf := tree.evict(idle)) is not None:
        order.append(leaf[0])
    return order


def offer_all(tree: PrefixTree, *pages: int) -> None:
    for page in pages:
        tree.offer(page)
    tree.check(everything)


def test_tokens_are_compared_whole() -> None:
    tree = PrefixTree(2)
    tree.put(ROOT, np.array([0x01020304, 7], np.int32), 1)
    assert tree.match(np.array([0x05020304, 7], np.int32)) == ([], None)  # three of four bytes are equal
    assert tree.match(np.array([0x01020304, 0x0107], np.int32)) == ([], (1, 1))


def test_leaves_go_first_the_oldest_first() -> None:
    tree = PrefixTree(4)
    fill(tree, "aaaabbbbcccc", [1, 2, 3])
    fill(tree, "aaaaxxxx", [1, 4])
    fill(tree, "zzzz", [5])
    offer_all(tree, 3, 2, 1, 4, 5)
    tree.touch([1, 2, 3])
    assert evictions(tree) == [4, 5, 3, 2, 1]
    assert len(tree) == 0 and tree.match(ids("aaaa")) == ([], None)
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
