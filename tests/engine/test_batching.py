"""Laying out prefills: which row of which tile holds which token."""

import numpy as np

from jaxagent.engine.batching import Span, lay_out


def span(first: int, count: int, start: int, slot: int) -> Span:
    return Span(np.arange(first, first + count, dtype=np.int32), start, slot)


def test_each_shard_fills_its_part_of_the_tiles_in_order() -> None:
    # Two shards of three slots; tiles of two rows per shard.
    call = lay_out([span(10, 3, 0, 1), span(20, 2, 7, 5), span(30, 1, 4, 2)], 2, 3, 3, 2)
    assert call.tiles == 2 and call.used_tokens == 6
    assert call.tokens.tolist() == [[10, 11, 20, 21], [12, 30, 0, 0], [0, 0, 0, 0]]
    assert call.positions.tolist() == [[0, 1, 7, 8], [2, 4, 0, 0], [0, 0, 0, 0]]
    assert call.slot.tolist() == [[1, 1, 2, 2], [1, 2, -1, -1], [-1, -1, -1, -1]]


def test_nothing_to_do_is_no_tile() -> None:
    call = lay_out([], 2, 3, 3, 2)
    assert call.tiles == 0 and (call.slot == -1).all()
