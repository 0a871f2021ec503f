"""The order of admission, checked by hand."""

from jaxagent.engine.requests import OpenGroup, admission_order


def order(claims: str, held=None, served=None) -> str:
    """Claims like "a3 b1": domain and unfinished episodes, numbered as written; the same, in order of admission."""
    words = claims.split()
    made = [(word[0], int(word[1:]), i) for i, word in enumerate(words)]
    return " ".join(words[i] for i in admission_order(made, held or {}, served or {}))


def test_nearly_complete_groups_first_then_age() -> None:
    assert order("a3 a1 a2 a8") == "a1 a2 a3 a8"
    made = [("", 2, number) for number in (5, 3, 9, 4)]
    assert admission_order(made, {}, {}) == [1, 3, 0, 2]
    assert admission_order([], {"a": 1}, {"a": 0}) == []


def test_a_slot_goes_to_the_domain_that_holds_fewest() -> None:
    # a holds 2 slots, b none: b gets two before a gets one more; then they take turns.
    assert order("a1 a2 a3 b7 b8 b9", held={"a": 2}) == "b7 b8 a1 b9 a2 a3"
    # A flood that holds all slots, and one of another domain, younger and of a fresh group.
    assert order("a1 " * 50 + "b8", held={"a": 4}).startswith("b8 a1")


def test_equal_domains_take_turns() -> None:
    assert order("a1 a1 b8 b8 c9", served={}) == "a1 b8 c9 a1 b8"
    # One slot, nobody holds it: whoever was served last waits longest, whatever its groups say.
    assert order("a1 a2 b8", served={"a": 7, "b": 6}) == "b8 a1 a2"
    assert order("a1 a2 b8", served={"b": 7, "a": 6}) == "a1 b8 a2"


def test_unfinished_episodes_of_a_group() -> None:
    group = OpenGroup(4)
    assert group.unfinished == 4
    group.finished |= {8, 9}
    group.finished.add(9)
    assert group.unfinished == 2
