"""The finite-state check against an independent one that splits, counts and walks as Search-R1's code is described."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.envs.search.rewards import MOVES
from jaxagent.rewards.text import follows


def test_of_two_tags_that_fit_the_longer_one_is_read():
    moves = {("start", "[a]"): "in_a", ("in_a", "[a][end]"): "end"}
    assert follows(moves, "[a]text[a][end]")
    assert not follows(moves, "[a]text[a]")


def test_other_ends_than_end():
    assert follows({("start", "<a>"): "in_a"}, "<a>whatever", end="in_a")
    assert not follows({("start", "<a>"): "in_a"}, "<a>whatever")


def reference(response: str) -> bool:
    """Search-R1's check as its description says: (a) counts of tags, (b) moves, (c) text inside tags only."""
    names = ("think", "search", "information", "answer")
    if any(response.count(f"<{n}>") != response.count(f"</{n}>") for n in names):
        return False
    state = "start"
    for piece in re.split(r"(</?(?:think|search|information|answer)>)", response):
        if re.fullmatch(r"</?(?:think|search|information|answer)>", piece):
            if (state, piece) not in MOVES:
                return False
            state = MOVES[state, piece]
        elif piece.strip() and state not in ("in_think", "in_search", "in_information", "in_answer"):
            return False
    return state == "end"


ROUND = ["<think>", "x", "</think>", "<search>", "q", "</search>", "\n", "<information>", "d", "</information>"]
GOOD = [*ROUND, "<think>", "</think>", "<answer>", "y", "</answer>"]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2), st.lists(st.tuples(st.integers(0, 24), st.sampled_from([*GOOD, "", "<", "think>"])), max_size=2)
)
def test_search_r1_responses_with_up_to_two_pieces_replaced(rounds, edits):
    pieces = ROUND * rounds + GOOD[len(ROUND) :]
    for at, piece in edits:
        pieces[at % len(pieces)] = piece
    response = "".join(pieces)
    assert follows(MOVES, response) == reference(response)
    if not edits:
        assert follows(MOVES, response)
