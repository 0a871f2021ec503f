"""How many episodes an engine holds: the rule by itself, and on the engine's real scheduler in virtual time."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxagent.fleet import in_flight
from jaxagent.fleet.in_flight import Counted
from tests.fleet.virtual_engine import Device, play

STATE = in_flight.State(limit=16, most=64, slots=8, step=4)


def seen(state, free=0.0, again=0.0, saved=0.0, queued=0.0):
    """After ten seconds in which a limit was held."""
    state, nothing = in_flight.decide(state, Counted(5.0, state.limit, 100, 1.0, 1.0, 1.0, 2.0, 1000, 7000))
    assert nothing is None
    counted = Counted(
        at_s=15.0, held=state.limit, turns=100 + 4 * state.limit, free_s=1.0 + 10 * free, queued_s=1.0 + 10 * queued,
        again_s=1.0 + 10 * again, prefill_s=2.0 + 5.0, prefill_tokens=1000 + 500, cached_tokens=7000 + 1000 * saved,
    )  # fmt: skip
    return in_flight.decide(state, counted)


@pytest.mark.parametrize(
    ("numbers", "limit"),
    [
        (dict(free=0.4), 20),  # nobody asks for a slot, and nothing is prefilled again
        (dict(free=0.4, saved=0.9), 20),  # there are pages for all: what they save is no price
        (dict(free=0.4, again=0.2, saved=0.1), 20),  # prefilling everything would cost less
        (dict(free=0.4, again=0.2, saved=0.3), 12),
        (dict(free=0.4, again=0.2, saved=0.22), 16),  # about the same
        (dict(again=0.2), 12),
        (dict(queued=7.0), 16),
        (dict(queued=9.0), 12),  # more wait than there are slots
    ],
)
def test_an_episode_more_is_held_where_it_gains_more_than_it_costs(numbers, limit):
    after, decision = seen(STATE, **numbers)
    assert after.limit == decision.limit == limit and decision.before == 16
    assert decision.turns == 64 and decision.seconds == 10.0
    assert (decision.free, decision.again) == (
        pytest.approx(numbers.get("free", 0)),
        pytest.approx(numbers.get("again", 0)),
    )
    assert decision.saved == pytest.approx(numbers.get("saved", 0.0))
    assert str(decision).startswith(f"episodes in flight: {'16 stay' if limit == 16 else f'16 -> {limit}'}. In 10.0 s")


def test_changes_grow_while_the_direction_stays_and_are_halved_when_it_turns():
    state, limits = STATE, []
    for numbers in [dict(free=0.5)] * 5 + [dict(again=0.5)] * 5:
        state, _ = seen(state, **numbers)
        limits.append(state.limit)
    assert limits == [20, 24, 30, 39, 52, 46, 40, 31, 18, 9]
    for _ in range(9):
        state, _ = seen(state, again=0.5)
    assert state.limit == 1
    state = dataclasses.replace(STATE, most=18)
    assert seen(state, free=0.5)[0].limit == 18


def test_times_in_which_the_limit_was_not_held_decide_nothing():
    state, _ = in_flight.decide(STATE, Counted(0.0, 16, 0, 0.0, 0.0, 0.0, 0.0, 0, 0))
    short, nothing = in_flight.decide(state, Counted(1.0, 13, 64, 1.0, 0.0, 0.0, 0.0, 0, 0))
    assert nothing is None and short.since is None
    state, nothing = in_flight.decide(short, Counted(2.0, 14, 128, 2.0, 0.0, 0.0, 0.0, 0, 0))
    assert nothing is None and state.since.at_s == 2.0
    state, nothing = in_flight.decide(state, Counted(3.0, 16, 191, 3.0, 0.0, 0.0, 0.0, 0, 0))
    assert nothing is None, "not every episode has had its turns"
    state, decision = in_flight.decide(state, Counted(4.0, 16, 192, 4.0, 0.0, 0.0, 0.0, 0, 0))
    assert decision.limit == 20 and state.since is None, "the next time begins when the new limit is held"


def test_the_scheduler_counts_slots_that_nobody_asked_for(monkeypatch):
    device = Device(slots=2)
    alone = play(device, 1, lambda number: [(16, 24, 3.0), (16, 24, 1.0)], 1, monkeypatch.setattr)
    assert alone.stats["free_slot_s"] == pytest.approx(2 * 24 * 10.3e-3 + 3.0)
    three = play(device, 3, lambda number: [(16, 24, 0.0)], 3, monkeypatch.setattr)
    assert three.stats["free_slot_s"] == pytest.approx(24 * 10.3e-3), "the last one's"
    assert three.stats["queued_turn_s"] == pytest.approx(24 * 10.6e-3)


def test_the_scheduler_counts_what_it_prefills_a_second_time(monkeypatch):
    """All that it prefilled, without what each episode needs once: its observations but for the last token."""

    def turns(number):
        rng = np.random.default_rng(number)
        return [(int(rng.integers(9, 70)), int(rng.integers(5, 40)), float(rng.random())) for _ in range(3)]

    once = sum(sum(seen for seen, _, _ in turns(number)) - 1 for number in range(20))
    for pages in (20, 30, 400):
        stats = play(Device(pages=pages, context=320), 20, turns, 12, monkeypatch.setattr).stats
        assert (stats["prefill_again_s"] > 0) == (stats["preemptions"] > 0) == (pages < 400)
        assert stats["prefill_again_s"] == pytest.approx((stats["prefill_tokens"] - once) * Device.prefill_s)


# ---------------------------------------------------------------- lengths double in the middle of a run

STEP, BEFORE, AFTER = 48, 5, 15  # episodes of a step; steps before lengths double, and after
DEVICE = Device(slots=32, pages=300, prefill_s=1e-3)


def growing(number):
    """Five turns, waits of 3.8 s on the mean. Lengths double after some steps."""
    rng, longer = np.random.default_rng((7, number)), 1 + (number >= BEFORE * STEP)
    return [
        ((16 if turn else 64) * longer, int(longer * rng.integers(24, 72)), float(rng.lognormal(np.log(3), 0.7)))
        for turn in range(5)
    ]


def seconds(played, first, last):
    """Of a step, on the mean over some."""
    return (played.ends[last * STEP - 1] - played.ends[first * STEP - 1]) / (last - first)


@pytest.mark.slow
@pytest.mark.parametrize("prefill_s", [0.2e-3, 1e-3])
def test_ten_steps_after_lengths_have_doubled_an_engine_is_as_fast_as_with_the_best_fixed_number(
    monkeypatch, prefill_s
):
    """Where prefilling is dear the best number halves and any other one is slow; where it is cheap many are best."""
    device = dataclasses.replace(DEVICE, prefill_s=prefill_s)
    episodes = (BEFORE + AFTER + 1) * STEP  # the last step ends with fewer in hand
    auto = play(device, episodes, growing, in_flight.begin(device.slots, 96), monkeypatch.setattr)
    early, late = {}, {}
    for limit in (8, 12, 16, 24, 32, 64):
        fixed = play(device, episodes, growing, limit, monkeypatch.setattr)
        early[limit], late[limit] = seconds(fixed, 2, BEFORE), seconds(fixed, BEFORE + 10, BEFORE + AFTER)
    best = min(late, key=late.get)
    found = seconds(auto, BEFORE + 10, BEFORE + AFTER)
    assert found < 1.1 * late[best], (found, late, auto.decisions)
    assert late[8] > 1.2 * late[best], "too few do not cost anything here"
    if prefill_s == 1e-3:
        assert best == 12 and late[min(early, key=early.get)] > 1.2 * late[best], (early, late)
    changes = [decision for decision in auto.decisions if decision.limit != decision.before]
    assert all(a.limit == b.before for a, b in itertools.pairwise(changes))
