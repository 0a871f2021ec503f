"""The stop automaton against a string search, over arbitrary stop strings, vocabularies and tokenisations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.engine import automaton
from tests.engine.toys import walk

# Tokens are bytes: pieces of stop strings, characters of two bytes whole and cut in half, and bytes beyond them.
BYTES = st.sampled_from([b"a", b"b"]) | st.sampled_from([b"a", b"\xc3", b"\xa9"])
PIECES = st.lists(BYTES, max_size=5).map(b"".join) | st.binary(max_size=1)
STOPS = st.text("ab", min_size=1, max_size=5) | st.text("a\u00e9", min_size=1, max_size=3)


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(STOPS, min_size=1, max_size=4, unique=True),
    tokens=st.lists(PIECES, max_size=12),
)
def test_any_stop_strings_that_overlap(stops: list[str], tokens: list[bytes]) -> None:
    vocabulary = sorted(set(tokens)) or [b""]
    built = automaton.build(stops, vocabulary, len(vocabulary) + 3)
    count, stop, overshoot = walk(built, [vocabulary.index(t) for t in tokens])
    text = b"".join(tokens)
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s.encode()) for s in stops)]
    if not ends:
        assert (count, stop, overshoot) == (len(tokens), None, 0)
    else:
        end = ends[0]
        assert len(b"".join(tokens[:count])) - overshoot == end
        assert 0 <= overshoot < len(tokens[count - 1])
        assert stop == max((s for s in stops if text[:end].endswith(s.encode())), key=lambda s: len(s.encode()))


def test_by_hand() -> None:
    built = automaton.build(["ab"], [b"a", b"b", b"xab", b"abba", b"", b"c"], vocab_size=7)
    assert built.table.shape == (2, 7) and built.table.dtype == np.int16
    # From "nothing": a -> state 1; "xab" completes with 0 bytes over, "abba" with 2. From "a": b completes.
    assert built.table.tolist() == [[1, 0, -1, -3, 0, 0, 0], [1, -1, -1, -3, 1, 0, 1]]
    assert built.decode(-3) == ("ab", 2)


def test_no_stop_strings() -> None:
    assert automaton.build([], [b"a"], 3).table.tolist() == [[0, 0, 0]]


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="empty"):
        automaton.build([""], [b"a"], 1)
    with pytest.raises(ValueError, match="do not fit"):
        automaton.build(["a"], [b"a", b"b"], 1)


def test_of_strings_that_end_together_the_longest_is_reported():
    for stops in (["b", "aab", "ab"], ["aab", "ab", "b"]):
        built = automaton.build(stops, [b"a", b"b"], 2)
        assert walk(built, [0, 0, 1]) == (3, "aab", 0) and walk(built, [0, 1]) == (2, "ab", 0)
