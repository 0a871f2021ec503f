"""A request's stop strings, against a search of the whole text."""

import numpy as np
import pytest

from jaxagent.gateway.reading import Cut

TOKENS = [b"a", b"b", b"ab", b"ba", b"aba", "é".encode(), "é".encode()[:1], "é".encode()[1:], b"\n\n", b""]


def play(stops, tokens, parts):
    """(text, tokens taken, offsets, stop), fed in `parts` pieces."""
    cut, text, offsets = Cut(stops, TOKENS), "", []
    for part in np.array_split(tokens, parts):
        if cut.stop is None:
            more, at = cut.feed(part.tolist())
            text, offsets = text + more, offsets + at
    return text + cut.flush(), len(offsets), offsets, cut.stop


@pytest.mark.parametrize("stops", [(), ("ab",), ("bab", "ab"), ("aba", "abab", "bb"), ("é",), ("\n\na", "aé", "bbb")])
def test_against_a_search_of_the_whole(stops):
    rng = np.random.default_rng(0)
    for length in (*range(12), *[40] * 60):
        tokens = rng.integers(0, len(TOKENS), length)
        data, taken, found = b"", 0, None
        for token in tokens:
            data, taken = data + TOKENS[token], taken + 1
            ends = [(data.find(s.encode()) + len(s.encode()), data.find(s.encode()), s) for s in stops]
            if complete := sorted(e for e in ends if e[1] >= 0):
                _, at, found = complete[0]
                data = data[:at]
                break
        for parts in (1, 3, max(1, length)):
            text, count, offsets, stop = play(stops, tokens, parts)
            assert (text, count, stop) == (data.decode(errors="replace"), taken, found)
            before = np.cumsum([0, *(len(TOKENS[t]) for t in tokens[:taken])])[:taken]
            whole = b"".join(TOKENS[t] for t in tokens[:taken])
            if "\ufffd" not in whole.decode(errors="replace"):
                assert [len(whole[:n].decode(errors="ignore")) for n in before] == offsets


def test_what_cannot_be_a_stop_string_is_not_held_back():
    cut = Cut(["</answer>"], TOKENS)
    assert cut.feed([0, 1, 2])[0] == "abab"
    held = Cut(["aba"], TOKENS)
    assert held.feed([1, 0])[0] == "b" and held.feed([1])[0] == "" and held.feed([1])[0] == "abb"
