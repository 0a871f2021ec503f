"""Laying out prefills: which row of which tile holds which token."""

import numpy as np

from jaxagent.engine.batching import Span, choose_lanes, lay_out


def span(first: int, count: int, start: int, slot: int) -> Span:
    return Span(np.arange(first, first + count, dtype=np.int32), start, slot)


def test_each_shard_fills_its_part_of_the_tiles_in_order() -> None:
    # Two shards of three slots; tiles of two rows per shard.
    spans = [span(10, 3, 0, 1), span(20, 2, 7, 5), span(30, 1, 4, 2)]
    tokens, positions, slot, tiles = lay_out(spans, 2, 3, 3, 2, 1)
    assert tiles == 2
    assert tokens.tolist() == [[10, 11, 20, 21], [12, 30, 0, 0], [0, 0, 0, 0]]
    assert positions.tolist() == [[0, 1, 7, 8], [2, 4, 0, 0], [0, 0, 0, 0]]
    assert slot.tolist() == [[1, 1, 2, 2], [1, 2, -1, -1], [-1, -1, -1, -1]]


def test_nothing_to_do_is_no_tile() -> None:
    *_, slot, tiles = lay_out([], 2, 3, 3, 2, 1)
    assert tiles == 0 and (slot == -1).all()


def test_rows_that_share_belong_to_one_sequence() -> None:
    # Tiles of four rows, two share: a span of three takes four.
    tokens, positions, slot, tiles = lay_out([span(10, 3, 0, 1), span(20, 2, 7, 0)], 1, 2, 2, 4, 2)
    assert tiles == 2
    assert tokens.tolist() == [[10, 11, 12, 12], [20, 21, 0, 0]]
    assert positions.tolist() == [[0, 1, 2, 2], [7, 8, 0, 0]]
    assert slot.tolist() == [[1, 1], [0, -1]]


def test_lanes_are_the_active_slots_longest_first() -> None:
    active = np.array([1, 0, 1, 0, 0, 1, 0, 0], bool)
    lengths = np.array([5, 99, 7, 0, 0, 3, 0, 0])
    lanes, tiles = choose_lanes(active, lengths, 2, (2, 4))  # two shards of four slots, two active in one of them
    assert tiles == 1 and lanes.shape == (1, 4)
    assert lanes[0, :2].tolist() == [2, 0] and lanes[0, 2] == 1
    assert len({*lanes[0, 2:].tolist()}) == 2


def test_more_active_than_a_small_tile_take_whole_large_ones() -> None:
    active, lengths = np.ones(8, bool), np.arange(8)
    active[1] = False
    lanes, tiles = choose_lanes(active, lengths, 1, (2, 4))
    assert tiles == 2 and lanes.tolist() == [[7, 6, 5, 4], [3, 2, 0, 1]]
    none, tiles = choose_lanes(np.zeros(8, bool), lengths, 1, (2, 4))
    assert tiles == 0 and none.shape == (1, 2)
