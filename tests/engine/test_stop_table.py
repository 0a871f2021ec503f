"""Each request ends at its own stop strings: the stacked table against string search, and the engine that uses it."""

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError
from jaxagent.engine import automaton, executor
from jaxagent.engine.automaton import StopTable
from tests.engine import toys
from tests.engine.test_driver import chain, letters

VOCABULARY = [b"a", b"b", b"ab", b"ba", b"aab", b"<", b"b<"]
ROWS = 12


def table(default=("ab<",), rows=ROWS) -> StopTable:
    return StopTable(automaton.build(default, VOCABULARY, len(VOCABULARY)), rows)


def ends(built: StopTable, block, tokens: list[int]) -> tuple[int, str] | None:
    """Walks the stacked table as the device does: how many tokens until which stop string."""
    row = block.first
    for count, token in enumerate(tokens, 1):
        entry = int(built.table[row, token])
        if entry < 0:
            return count, block.decode(entry)[0]
        row = entry
    assert row == block.state_after(tokens)
    return None


strings = st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=2, unique=True)


@settings(max_examples=60, deadline=None)
@given(sets=st.lists(strings, min_size=1, max_size=6), tokens=st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=8))
def test_every_set_stops_where_a_search_for_its_own_strings_stops(sets, tokens):
    built = table()
    for wanted in sets:
        block = built.block(wanted, ())
        text, found = "", None
        for count, token in enumerate(tokens, 1):
            text += VOCABULARY[token].decode()
            at = [(text.find(s) + len(s), -len(s), s) for s in wanted if s in text]
            if at:
                found = count, min(at)[2]
                break
        assert ends(built, block, tokens) == found
        assert ends(built, built.default, [2, 5]) == (2, "ab<")  # the default's rows are nobody else's


def test_blocks_in_use_stay_and_the_least_recently_used_makes_room():
    built = table()  # 3 states of 12 are the default's
    assert built.block(("ab<",), ()) is built.default and built.changed
    built.changed = False
    first, second = built.block(("aaaa",), ()), built.block(("bbb",), ())  # 4 and 3 states: 2 rows are left
    assert built.changed and built.block(("aaaa",), ()) is first  # used again: the second is older now
    third = built.block(("<<<",), ())
    assert third.first == second.first
    assert built.block(("bbb",), (first, third)) is None
    assert ends(built, first, [4, 0]) is None and ends(built, third, [5, 5, 5]) == (3, "<<<")
    assert built.block(("bbb",), (first,)).first == third.first


def test_strings_for_which_there_is_never_room_are_refused():
    with pytest.raises(ConfigError, match=r"engine.stop_states=2 is too small: the stop strings \['ab<'\] need 3"):
        table(rows=2)
    with pytest.raises(ValueError, match=r"^engine.stop_states leaves 9 states, and a stop string has 10 bytes"):
        table().block(("a" * 10,), ())
    with pytest.raises(ValueError, match="leaves 9 states, and the stop strings need 11"):
        table().block(("aaaaaa", "bbbbbb"), ())
    table().block(("aaaa", "bbbbbb"), ())  # 9: one more than the strings' letters without their last, for the start
    with pytest.raises(ValueError, match="must not be empty"):
        table().block(("",), ())


def test_strings_that_cannot_be_are_refused_before_a_table_is_made():
    """A policy's environment or a client may ask for anything; the thread of all turns must not walk it."""
    vocabulary = [b"a"] * 1_000_000  # of which one row of the table is 2 MB
    built = StopTable(automaton.build((), [b"a"], len(vocabulary)), 12)
    built.default = dataclasses.replace(built.default, token_bytes=vocabulary)
    for strings in (("a" * 10_000_000,), tuple(map(chr, range(1, 50_000))), ("abcdefgh", "bcdefghi")):
        with pytest.raises(ValueError, match=r"engine\.stop_states leaves") as error:
            built.block(strings, ())
        assert len(str(error.value)) < 200
    assert not built._blocks


def test_states_fit_the_numbers_of_the_table():
    assert table(rows=automaton.MOST_STATES).table.dtype == np.int16
    assert table(rows=automaton.MOST_STATES + 1).table.dtype == np.int32  # a block may begin beyond an int16


def test_turns_side_by_side_end_at_their_own_strings_and_nothing_compiles():
    async def one(driver, number, stop_strings):
        session = await driver.open("t", number)
        try:
            return await driver.generate(session, letters("a"), 5, toys.GREEDY, 0, 20.0, stop_strings=stop_strings)
        finally:
            driver.close(session)

    async def play(driver):
        programs_before = executor.generate._cache_size()
        sets = [None, ("bc",), ("cd", "zz"), (), ("de",)]
        found = await asyncio.gather(*[one(driver, number, stops) for number, stops in enumerate(sets)])
        assert executor.generate._cache_size() == programs_before
        return found

    with toys.running(params=chain("abcdefghij"), stops=("ef",)) as driver:
        found = asyncio.run(play(driver))
    assert [generation.stop_string for generation in found] == ["ef", "bc", "cd", None, "de"]
    assert [generation.tokens.tolist() for generation in found] == [
        letters(t) for t in ("bcdef", "bc", "bcd", "bcdef", "bcde")
    ]


def test_a_turn_waits_for_room_among_the_stop_strings():
    """More sets of stop strings at once than there are states: every turn is played, and no row leaks."""

    async def one(driver, number, stop_strings, deadline_s=20.0):
        session = await driver.open("t", number)
        try:
            return await driver.generate(
                session, letters("a"), 20, toys.GREEDY, 0, deadline_s, stop_strings=stop_strings
            )
        finally:
            driver.close(session)

    async def play(driver):
        programs_before = executor.generate._cache_size()
        slow = asyncio.create_task(one(driver, 0, ("wxyz",)))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(one(driver, i + 1, (f"{chr(98 + i)}zzz",))) for i in range(12)]
        late = asyncio.create_task(one(driver, 13, ("qqqq",), deadline_s=1e-4))
        gone = asyncio.create_task(one(driver, 14, ("rrrr",)))
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        gone.cancel()
        found = await asyncio.gather(slow, *waiting)
        assert [len(generation.tokens) for generation in found] == [20] * 13
        with pytest.raises(TimeoutError):
            await late
        assert (await asyncio.gather(gone, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        assert not driver._held_requests and not driver._queue and len(driver._stops._blocks) <= 1
        assert executor.generate._cache_size() == programs_before

    with toys.running(params=np.asarray(toys.weights()), stops=(), stop_states=6) as driver:
        asyncio.run(asyncio.wait_for(play(driver), 60))
