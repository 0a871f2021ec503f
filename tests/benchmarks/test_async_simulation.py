"""The model of a run against arithmetic on paper."""

import pytest

from benchmarks import async_model
from benchmarks.async_simulation import Costs, Layout, simulate
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan

ONE = Costs(decode_s=0.01, sequence_s=0.0, update_device_s=0.01, prefill_device_s=0.0)


def constant(*turns):
    return lambda episode: turns


def test_one_episode_after_another():
    report = simulate(Plan(5, 1, 1), Layout(1, 1), ONE, constant((100, 2.0), (50, 1.0)))
    assert report.step_s == pytest.approx(1.0 + 2.0 + 0.5 + 1.0 + 1.5)
    assert report.ages == {0: 3} and report.tokens_trained == report.tokens_sampled == 150
    assert report.trainer_waits == pytest.approx(4.5 / 6.0) and report.engines_idle == pytest.approx(1 - 1.5 / 6.0)


def test_sequences_share_a_decode_step():
    costs = Costs(decode_s=0.01, sequence_s=0.001, update_device_s=0.0)
    turns = lambda episode: ((100 if episode.sample else 300, 0.0),)  # noqa: E731
    report = simulate(Plan(4, 1, 2), Layout(1, 1), costs, turns)
    assert report.step_s == pytest.approx(100 * 0.012 + 200 * 0.011)
    assert simulate(Plan(4, 1, 2), Layout(2, 1), costs, turns).step_s == pytest.approx(300 * 0.011)


def test_engines_have_so_many_slots_and_places():
    turns = constant((100, 2.0), (50, 0.0))
    costs = Costs(decode_s=0.01, sequence_s=0.0, update_device_s=0.0)
    plan = Plan(4, 1, 2)
    assert simulate(plan, Layout(1, 1), costs, turns).step_s == pytest.approx(3.5)
    # The second decodes when the first one's environment works, and its first turn ends before that does.
    assert simulate(plan, Layout(1, 1, slots=1), costs, turns).step_s == pytest.approx(1.0 + 3.5)
    assert simulate(plan, Layout(1, 1, places=1), costs, turns).step_s == pytest.approx(2 * 3.5)
    waiting = constant((100, 0.5), (50, 0.0))
    assert simulate(plan, Layout(1, 1, slots=1), costs, waiting).step_s == pytest.approx(3.0), "always one decodes"


@pytest.mark.parametrize("rule", ["pinned", "in_flight"])
@pytest.mark.parametrize("staleness", range(6))
def test_the_gain_of_overlap_is_that_of_the_closed_form(rule, staleness):
    """Rollouts of r seconds and updates of u: S + 1 steps share r + u, unless the trainer alone takes longer."""
    plan = Plan(8 * (staleness + 1), 1, 1, staleness=staleness, rule=rule)
    r, u = 3.0, 1.0
    layout = Layout(staleness + 1, 1)
    report = simulate(plan, layout, ONE, constant((100, r - 1.0)), uncounted=staleness + 1 + staleness * staleness)
    counted = plan.steps - staleness - (staleness + 1 + staleness * staleness)
    assert report.step_s == pytest.approx(max(u, (r + u) / (staleness + 1)), rel=1.01 / counted)
    assert max(report.ages) == staleness


def test_new_weights_cost_the_contexts_in_hand_and_pinned_engines_nothing():
    steps = {}
    for rule in ("pinned", "in_flight"):
        for prefill_s in (0.0, 0.01):
            costs = Costs(decode_s=0.01, sequence_s=0.0, update_device_s=0.001, prefill_device_s=prefill_s)
            plan = Plan(24, 2, 1, staleness=1, rule=rule)
            turns = lambda e: ((100 + 100 * ((e.group.step + e.group.number) % 2), 0.0),)  # noqa: E731
            steps[rule, prefill_s] = simulate(plan, Layout(2, 1), costs, turns).step_s
    assert steps["pinned", 0.0] == steps["pinned", 0.01]
    assert steps["in_flight", 0.0] < steps["in_flight", 0.01]


def test_steps_that_leave_none_to_count_are_refused():
    with pytest.raises(ValueError, match="leave none"):
        simulate(Plan(4, 1, 1, staleness=1), Layout(1, 1), ONE, constant((1, 0.0)))


def test_workloads_have_the_lengths_that_they_say():
    for name, tokens in (("A", 3625), ("B", 2275), ("C", 2809)):
        workload = async_model.WORKLOADS[name]
        episodes = [workload.play(0, EpisodeId(GroupId(step, 0, k), 0)) for step in range(50) for k in range(50)]
        mean = sum(count for turns in episodes for count, _ in turns) / len(episodes)
        assert mean == pytest.approx(tokens, rel=0.08) and len(episodes[0]) == workload.turns
        waits = [wait for turns in episodes for _, wait in turns]
        assert sum(waits) / len(waits) == pytest.approx(workload.wait_s, rel=0.06)


def test_the_benchmark_ends_with_its_figures(capsys, monkeypatch):
    import json

    monkeypatch.setattr(
        "sys.argv", ["async_model", "--workloads=B", "--staleness=1", "--devices=8", "--groups=4", "--steps=3"]
    )
    async_model.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["devices"] == 8 and 1.0 < told["B"]["pinned_s1"] < 4 and 1.0 < told["B"]["in_flight_s1"] < 4
