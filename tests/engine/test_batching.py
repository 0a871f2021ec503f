"""Every span lands in the right slots, whatever the buckets: simulated on a NumPy cache."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.engine import batching

SLOTS = 12


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6),
    lengths=st.sampled_from([(4,), (4, 16), (8, 32, 64)]),
    rows=st.sampled_from([(2,), (1, 4), (2, 8)]),
)
def test_plan_covers_every_span_once(sizes, lengths, rows) -> None:
    free = list(range(SLOTS))
    spans = []
    for i, (length, start, group) in enumerate(sizes):
        group = 1 if start else group  # only a whole prompt is shared
        slots, free = free[:group], free[group:]
        if slots:
            spans.append(batching.Span(np.arange(1, length + 1, dtype=np.int32) + 100 * i, start, tuple(slots)))
    cache = np.zeros((SLOTS + 1, 200), np.int64)
    for span in spans:
        cache[list(span.slots), : span.start] = -1  # what was cached before
    used = 0
    for calls in batching.plan(spans, lengths, rows, SLOTS):
        before = cache.copy()
        for call in calls:
            assert call.tokens.shape[0] in rows and call.tokens.shape[1] in lengths
            assert call.fresh == (not call.start.any())
            used += call.used_tokens
            for row, slot, start in call.inserts:
                assert len(row) == len(slot) == len(start) == call.tokens.shape[0]
                for r, s, p in zip(row, slot, start, strict=True):
                    if s < SLOTS:
                        assert (before[call.slot[r], :p] != 0).all()  # a chunk finds those before it
                        cache[s, p : p + call.tokens.shape[1]] = call.tokens[r]
    assert used == sum(len(s.tokens) for s in spans)
    for span in spans:
        for slot in span.slots:
            np.testing.assert_array_equal(cache[slot, span.start : span.start + len(span.tokens)], span.tokens)
