"""The stop automaton against a string search, over real tokenizers and arbitrary tokenisations."""

import gzip
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.engine import automaton

DATA = pathlib.Path(__file__).resolve().parents[2].parent / "shared/data"
STOPS = ("</search>", "</answer>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes, from its definition: printable bytes stand for themselves."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(rest)}


def load(name: str) -> list[bytes]:
    folder = DATA / name
    path = folder / "tokenizer.json"
    if not folder.exists():
        pytest.skip(f"shared data {name} is not there")
    raw = path.read_bytes() if path.exists() else gzip.decompress((folder / "tokenizer.json.gz").read_bytes())
    tokenizer = json.loads(raw)
    alphabet = byte_alphabet()
    vocab = tokenizer["model"]["vocab"]
    special = {t["id"]: t["content"].encode() for t in tokenizer["added_tokens"]}
    token_bytes = [b""] * (max([*vocab.values(), *special]) + 1)
    for text, i in vocab.items():
        token_bytes[i] = special.get(i) or bytes(alphabet[c] for c in text)
    for i, text in special.items():
        token_bytes[i] = text
    return token_bytes


_LOADED: dict[str, tuple] = {}


def compiled(name: str) -> tuple[list[bytes], dict[bytes, int], automaton.Automaton]:
    if name not in _LOADED:
        token_bytes = load(name)
        ids = {b: i for i, b in enumerate(token_bytes) if b}
        _LOADED[name] = token_bytes, ids, automaton.build(STOPS, token_bytes, len(token_bytes) + 64)
    return _LOADED[name]


def split(text: bytes, ids: dict[bytes, int], random) -> list[int]:
    """A random, usually non-canonical, split of bytes into vocabulary tokens."""
    tokens = []
    while text:
        options = [n for n in range(1, min(len(text), 16) + 1) if text[:n] in ids]
        size = random.choice(options)
        tokens.append(ids[text[:size]])
        text = text[size:]
    return tokens


pieces = st.lists(
    st.one_of(
        st.sampled_from(
            [*STOPS, "<search>", "<answer>", "</sea", "</answer", "</", "<", "rch>", "\n\n", ">\n", "</</search>"]
        ),
        st.text(max_size=6),
    ),
    max_size=10,
).map("".join)


@pytest.mark.parametrize("name", ["gpt2-tokenizer", "deepseek-r1-tokenizer"])
@settings(max_examples=300, deadline=None)
@given(text=pieces, random=st.randoms(use_true_random=False))
def test_stops_where_a_string_search_stops(name: str, text: str, random) -> None:
    token_bytes, ids, stops = compiled(name)
    data = text.encode()
    tokens = split(data, ids, random)
    ends = {s: data.find(s.encode()) + len(s) for s in STOPS if s.encode() in data}
    count, stop, overshoot = stops.walk(tokens)
    consumed = sum(len(token_bytes[t]) for t in tokens[:count])
    if not ends:
        assert (count, stop, overshoot) == (len(tokens), None, 0)
    else:
        stop_expected, end = min(ends.items(), key=lambda item: item[1])
        assert (stop, consumed - overshoot) == (stop_expected, end)
        assert 0 <= overshoot < len(token_bytes[tokens[count - 1]])


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    tokens=st.lists(st.text("ab<", max_size=4), max_size=12),
)
def test_any_stop_strings_that_overlap(stops: list[str], tokens: list[str]) -> None:
    vocabulary = sorted(set(tokens)) or [""]
    built = automaton.build(stops, [t.encode() for t in vocabulary], len(vocabulary))
    count, stop, overshoot = built.walk([vocabulary.index(t) for t in tokens])
    text = "".join(tokens)
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)]
    if not ends:
        assert stop is None
    else:
        end = ends[0]
        assert len("".join(tokens[:count])) - overshoot == end
        assert stop == max((s for s in stops if text[:end].endswith(s)), key=len)


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
        assert built.walk([0, 0, 1]) == (3, "aab", 0) and built.walk([0, 1]) == (2, "ab", 0)
