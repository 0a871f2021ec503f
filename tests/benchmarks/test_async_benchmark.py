"""The arithmetic of benchmarks.async, by hand, and one small run of real processes."""

import dataclasses
import importlib
import json

import pytest

from benchmarks import async_figures as figures
from benchmarks import async_tiny as tiny
from benchmarks.async_processes import Setup, packed, tasks_of
from jaxagent.data import codec
from jaxagent.fleet.plan import EpisodeId, GroupId


def marks(times, ages):
    published = [{"what": "published", "number": v, "at": at, "ages": {}} for v, at in enumerate(times)]
    trains = [{"what": "trains", "number": t, "at": times[t] + 1.0, "ages": row} for t, row in enumerate(ages)]
    return published + trains


def test_wall_clock_counts_all_steps_and_the_mean_step_only_those_that_the_model_counts():
    setup = Setup(steps=3, staleness=1)
    run = figures.measured(marks([10.0, 12.0, 16.0, 30.0], [{"0": 32}, {"1": 32}, {"1": 32}]), setup)
    assert run == figures.Run(20.0, 3.0, {0: 32, 1: 32}, 1 / 3)  # two waits of a second in six


def test_between_versions():
    assert figures.between(marks([0, 9, 18, 27, 36, 45, 45.01, 45.03, 45.07], [])) == {"median": 20.0, "least": 10.0}


def test_how_far_the_model_is_off():
    real = figures.Run(0.0, 4.0, {0: 30, 1: 70}, 0.25)
    assert figures.off(figures.Run(0.0, 5.0, {0: 50, 1: 40, 2: 10}, 0.2), real) == {
        "step_percent": 25.0,
        "ages_percent": 30.0,  # of 100 episodes, 20 are younger there and 10 older
        "waits_points": -5.0,
    }


def test_the_model_of_a_synchronous_run_is_the_slowest_episode_and_the_update():
    setup = Setup(steps=2, groups=2, attempts=2, engines=1)
    episodes = [[EpisodeId(GroupId(t, 0, k), i) for k in range(2) for i in range(2)] for t in range(2)]
    by_hand = sum(max(sum(setup.waits(e)) for e in step) + setup.train_s for step in episodes) / 2
    found = figures.modelled(setup)
    assert found.step_s == pytest.approx(by_hand, abs=1e-3) and found.ages == {0: 8}


def test_an_episode_waits_by_its_id_alone_whatever_the_staleness():
    which = EpisodeId(GroupId(3, 0, 1), 2)
    waits = Setup().waits(which)
    assert len(waits) == 3 and waits == dataclasses.replace(Setup(), staleness=4, engines=1).waits(which)
    assert waits != Setup().waits(EpisodeId(GroupId(3, 0, 1), 1))
    codec.check(packed(which, 3), "here")


def test_every_step_gets_its_tasks_once():
    plan = Setup(steps=6, staleness=2).plan
    assert [step for version in range(7) for step in tasks_of(plan, version)] == list(range(6))


def test_times_of_steps_leave_out_the_warm_up_and_other_stages():
    rows = [{"time/step_s": 9.0}] + [{"time/rollout_s": 1.0, "time/step_s": float(i), "loss": 2.0} for i in range(8)]
    times = tiny.timed(rows)
    assert times == [{"time/rollout_s": 1.0, "time/step_s": float(i)} for i in (5, 6, 7)]
    assert tiny.medians(times)["time/step_s"] == 6.0


@pytest.mark.nightly
def test_the_command(monkeypatch, capsys):
    command = importlib.import_module("benchmarks.async")  # a keyword
    monkeypatch.setattr(command, "STALENESS", (0, 1))
    monkeypatch.setattr(command, "VARIED", {"s1_two_engines": command.VARIED["s1_two_engines"]})
    monkeypatch.setattr("sys.argv", ["async", "--quick", "--only=speed,protocol,recovery"])
    command.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["speedup_s1"] > 0 and "speedup_s1_two_engines" not in found
    assert set(found["model_off"]) == {"s0", "s1", "s2_in_flight", "s1_two_engines"}
    assert 0 < found["protocol_ms"]["least"] <= found["protocol_ms"]["median"]
    assert {"coordinator", "engine", "requeue", "trainer"} <= set(found["recovery_s"])
