"""What a dry run says of a fleet, against arithmetic on paper."""

import dataclasses
import itertools

import pytest
from rich.console import Console

from configs import search_r1
from jaxagent.config import parse
from jaxagent.plan import fleet, fleet_table
from jaxagent.plan.fleet import Split, verdict
from jaxagent.plan.pace import Pace

# Episodes of 100 tokens; an engine takes 10 ms a token, whatever else it decodes, and an update is 1 s an episode.
ONE = Pace(0.01, 0.0, 0.0, 0.01, (((100.0, 2.0),),), True, ("measured on paper",))
# The same where each sequence has its own cost, and updates have none.
DECODES = dataclasses.replace(ONE, decode_s=0.0, sequence_s=0.01, update_s=0.0, episodes=(((100.0, 0.0),),))


def config(tasks: int, staleness: int, engines: int, attempts: int = 1, slots: int = 64):
    raw = search_r1.get_config()
    raw.fleet = {"engines": engines}
    raw.rl.update(tasks_per_step=tasks, group_size=attempts, staleness=staleness)
    raw.engine.update(slots=slots)
    return parse(raw)


def only(cfg, pace: Pace) -> fleet.Case:
    found = fleet.forecast(cfg, pace)
    assert found is not None and len(found.cases) == 1
    return found.cases[0]


def test_environments_that_wait_make_the_fleet_faster():
    case = only(config(1, 1, engines=2), ONE)
    assert case.synchronous_step_s == pytest.approx(1 + 2 + 1 / 3), "rollout, then an update on all three devices"
    assert case.asked.step_s == pytest.approx((1 + 2 + 1) / 2, rel=0.2) and case.asked is case.best
    assert case.wait_s == 2.0 and case.asked.engines == 2 and case.asked.trainer_devices == 1
    assert case.verdict.startswith("The fleet is 1.") and "leave" not in case.verdict


def test_engines_that_only_decode_want_all_devices():
    case = only(config(6, 1, engines=2), DECODES)
    assert case.synchronous_step_s == pytest.approx(6 * 1.0 / 3)
    assert case.asked.step_s == pytest.approx(6 * 1.0 / 2) and case.asked.engines_idle == pytest.approx(0.0, abs=1e-6)
    assert case.asked.trainer_waits == pytest.approx(1.0)
    assert case.verdict == "Synchronous is faster with the same 3 devices: leave config.fleet off."


def test_a_larger_staleness_is_never_slower_until_the_trainer_is_busy():
    seconds = [only(config(1, staleness, engines=5), ONE).asked.step_s for staleness in range(6)]
    assert seconds[0] == pytest.approx(4.0) and seconds[1] == pytest.approx(2.0, rel=0.2)
    assert all(more <= less * 1.001 for less, more in itertools.pairwise(seconds))
    assert seconds[-1] == pytest.approx(1.0), "the update"


def test_a_trainer_that_is_too_small_gets_more_devices():
    pace = dataclasses.replace(DECODES, update_s=0.01, episodes=(((100.0, 4.0),),))
    case = only(config(8, 1, engines=7), pace)
    assert case.synchronous_step_s == pytest.approx(1 + 4 + 1)
    assert case.asked.step_s == pytest.approx(8.0) and case.asked.trainer_waits < 0.1, "8 s of updates on one device"
    assert case.best.trainer_devices in (2, 3) and case.best.trainer_devices + case.best.engines == 8
    assert f"take a trainer of {case.best.trainer_devices} devices and {case.best.engines} engines" in case.verdict


def test_a_large_run_is_simulated_as_a_small_one_that_takes_as_long(monkeypatch):
    monkeypatch.setattr(fleet, "TURNS", 2000)
    case = only(config(512, 1, engines=15, attempts=2), dataclasses.replace(DECODES, update_s=0.001))
    assert case.synchronous_step_s == pytest.approx(1024 * 1.1 / 16, rel=0.05)
    assert case.asked.step_s == pytest.approx(1024 * 0.1, rel=0.05), "the trainer is busy"


def test_waits_that_nobody_measured_are_assumed_and_said_to_be(monkeypatch):
    monkeypatch.setattr(fleet, "TURNS", 3000)
    found = fleet.forecast(config(1, 1, engines=2), dataclasses.replace(ONE, waits_known=False))
    assert found is not None and [case.wait_s for case in found.cases] == list(fleet.ASSUMED_WAITS_S)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    fleet_table.show(found, console)
    told = console.export_text()
    assert told.count("assumed") == 3 and "1 + 2 asked fastest" in told and "measured on paper" in told
    for case in found.cases:
        assert case.verdict.startswith(f"If environments take {case.wait_s:g} s a turn: ") and case.verdict[:36] in told


def test_too_few_places_are_said():
    found = fleet.forecast(config(4, 1, engines=1, slots=4), DECODES)
    assert found is not None and any("room for 4 of the 8 episodes" in note for note in found.notes)


def test_nothing_is_said_of_engines_that_nobody_counts():
    assert fleet.forecast(config(4, 1, engines=0), ONE) is None


@pytest.mark.parametrize(
    ("asked", "best", "words"),
    [
        (0.5, 0.9, "Synchronous is faster with the same 8 devices: leave"),
        (0.9, 1.05, "At best 1.05 times"),
        (0.9, 2.0, "faster than this fleet with the same 8 devices: take a trainer of 4 devices and 4 engines"),
        (1.5, 2.0, "1.50 times as fast as synchronous with the same 8 devices; a trainer of 4 devices"),
        (1.5, 1.55, "The fleet is 1.50 times as fast as synchronous with the same 8 devices."),
    ],
)
def test_verdicts(asked, best, words):
    splits = [Split(1, 7, 10 / asked, 0.0, 0.0), Split(4, 4, 10 / best, 0.0, 0.0)]
    assert words in verdict(10.0, *splits, devices=8, staleness=1)


def test_without_staleness_the_reason_is_told():
    case = only(config(1, 0, engines=2), ONE)
    assert "rl.staleness is 0" in case.verdict and case.asked.step_s == pytest.approx(4.0)
