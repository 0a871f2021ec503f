"""The coordinator's rules, one by one and by hand."""

import pytest

from jaxagent.fleet import events
from jaxagent.fleet.admission import Coordinator, Outcome, UnknownWorkerError
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from jaxagent.fleet.record import BoundError


def made(steps=6, groups_per_step=2, attempts=1, **settings) -> Coordinator:
    return Coordinator(Plan(steps, groups_per_step, attempts, **settings), "v0")


def worker(coordinator, now=0.0, holding=()):
    return coordinator.join(now, holding)[0]


def taken(coordinator, name, places=100, holding=(), now=0.0):
    """Takes until nothing comes, or all places are filled; an answer holds a group at most."""
    works, holding = [], list(holding)
    while len(works) < places:
        more = coordinator.take(now, name, places - len(works), [*holding, *(work.lease for work in works)])
        assert len(more) <= coordinator.plan.attempts and len({work.episode.group for work in more}) <= 2
        if not more:
            break
        works += more
    return works


def played(coordinator, group, version=None, usable=True, lease="x", samples=None):
    """A group's attempts come in, and it is judged."""
    version = coordinator.plan.version(group.step) if version is None else version
    for sample in range(coordinator.plan.attempts) if samples is None else samples:
        answer = coordinator.put(EpisodeId(group, sample), lease, version, f"{group}{sample}")
        assert answer.outcome is Outcome.STORED, answer
    assert coordinator.close(group, usable).outcome is Outcome.STORED


def ids(step, numbers, number=0):
    return tuple(GroupId(step, number, k) for k in numbers)


# -------------------------------------------------------------------- admission and versions


def test_an_engine_plays_one_version_at_a_time_and_cohorts_arise():
    coordinator = made(staleness=1, groups_per_step=4)
    names = [worker(coordinator) for _ in range(4)]
    leases = {name: taken(coordinator, name, 2) for name in names}
    assert [leases[name][0].episode.group.step for name in names] == [0, 0, 1, 1]
    first = leases[names[0]]
    assert taken(coordinator, names[0], 9, [work.lease for work in first]) == []  # step 1 has none left either
    late = worker(coordinator)
    for group in ids(0, range(4)):
        played(coordinator, group)
    coordinator.batch(0)
    coordinator.publish(1, "v1")
    # Step 2 is version 1: for the engines that became empty, and for the new one, not for those of step 1.
    steps = {name: {work.episode.group.step for work in taken(coordinator, name, 1)} for name in (*names[:2], late)}
    assert steps == {names[0]: {2}, names[1]: {2}, late: {2}}
    held = [work.lease for work in leases[names[2]]]
    assert taken(coordinator, names[2], 9, held) == []


def test_an_empty_engine_helps_a_step_whose_engines_are_full_or_silent():
    coordinator = made(staleness=1, groups_per_step=4)
    first, second = worker(coordinator), worker(coordinator)
    zero = taken(coordinator, first)
    one = taken(coordinator, second, 2)
    assert [work.episode.group.step for work in zero + one] == [0] * 4 + [1] * 2
    for group in ids(0, range(4)):
        played(coordinator, group)
    assert len(taken(coordinator, first, 1)) == 1  # the second one is full
    coordinator.leave(first)
    third = worker(coordinator)
    assert coordinator.put(one[0].episode, one[0].lease, 0, "d").outcome is Outcome.STORED
    assert taken(coordinator, third) == []  # the second one has room again, and will ask
    assert len(coordinator.take(0.0, second, 2, [one[1].lease])) == 1 and taken(coordinator, third) == []
    for name in (second, third):
        coordinator.beat(9.0, name, [])
    assert len(taken(coordinator, third, now=10.5)) == 1  # the second one beats, and asks for nothing


def test_a_busy_engine_is_told_which_version_it_would_get_if_it_were_empty():
    coordinator = made(staleness=1, groups_per_step=2)
    first = worker(coordinator)
    zero = taken(coordinator, first)
    for group in ids(0, (0, 1)):
        played(coordinator, group)
    assert coordinator.soon(first) == -1, "it is empty, and asks"
    assert coordinator.batch(0) and len(taken(coordinator, first)) == len(zero) == 2  # of step 1
    assert coordinator.soon(first) == -1, "nothing waits"
    assert coordinator.publish(1, "v1").outcome is Outcome.STORED
    assert coordinator.soon(first) == 1, "step 2, which nobody plays"
    second = worker(coordinator)
    assert len(coordinator.take(0.0, second, 2, [])) == 1
    assert coordinator.soon(first) == coordinator.soon(second) == -1, "step 2 has its share, with a free place"
    assert coordinator.soon("0-99") == -1


def test_engines_are_spread_over_the_steps_as_they_come():
    coordinator = made(staleness=1, groups_per_step=4)
    names = [worker(coordinator) for _ in range(2)]
    assert [taken(coordinator, name, 1)[0].episode.group.step for name in names] == [0, 1]
    third = worker(coordinator)
    assert taken(coordinator, third, 1)[0].episode.group.step == 0  # a share is two engines of three now
    assert taken(coordinator, worker(coordinator), 9)[0].episode.group.step == 1
    assert taken(coordinator, worker(coordinator), 9)[0].episode.group.step == 0  # three engines of five
    assert taken(coordinator, worker(coordinator), 9) == []


# -------------------------------------------------------------------- leases


def test_a_silent_worker_loses_its_episodes_and_a_beating_one_does_not():
    coordinator = made(steps=1, lease_s=10.0)
    silent, beating = worker(coordinator), worker(coordinator)
    lost, kept = taken(coordinator, silent, 1), taken(coordinator, beating, 1)
    assert coordinator.beat(9.0, beating, [kept[0].lease]) == ()
    assert coordinator.expire(10.0) == [] and coordinator.expire(10.5) == [silent]
    with pytest.raises(UnknownWorkerError, match="join again"):
        coordinator.beat(11.0, silent, [])
    again = taken(coordinator, beating, 5, [kept[0].lease], now=11.0)
    assert [work.episode for work in again] == [lost[0].episode] and again[0].lease != lost[0].lease
    # The silent one's result comes after all: it is as good as the other, which is told to stop.
    assert coordinator.put(lost[0].episode, lost[0].lease, 0, "d").outcome is Outcome.STORED
    assert coordinator.beat(12.0, beating, [kept[0].lease, again[0].lease]) == (again[0].lease,)
    assert coordinator.put(again[0].episode, again[0].lease, 0, "d").outcome is Outcome.DUPLICATE


def test_workers_go_on_through_a_restart_of_the_coordinator():
    before = made(steps=1)
    name = worker(before)
    works = taken(before, name)
    after = Coordinator(before.plan, "v0", epoch=1, past=before.take_events())
    with pytest.raises(UnknownWorkerError):
        after.beat(0.0, name, [])
    hasty = worker(after)
    double = taken(after, hasty, 1)  # begun before the older play is known
    holding = [(work.lease, work.episode) for work in works]
    name, cancel = after.join(0.0, holding)
    assert cancel == () and after.beat(0.0, hasty, [double[0].lease]) == (double[0].lease,)
    assert taken(after, hasty) == []
    # What is stored, or never was, is no work for anybody.
    assert after.put(works[1].episode, works[1].lease, 0, "d").outcome is Outcome.STORED
    stray = EpisodeId(GroupId(0, 0, 0), 7)
    _, cancel = after.join(0.0, [("0-8", works[1].episode), ("0-9", stray)])
    assert cancel == ("0-8", "0-9")
    # Of two plays under this coordinator, the one that has the lease goes on.
    _, cancel = after.join(0.0, [("1-99", works[0].episode)])
    assert cancel == ("1-99",) and after.beat(0.0, name, [works[0].lease]) == ()


def test_a_worker_that_comes_back_goes_on_with_one_steps_episodes():
    holding = [(f"0-{step}", EpisodeId(GroupId(step, 0, 0), 0)) for step in range(2)]
    assert made(staleness=1).join(0.0, holding)[1] == ("0-1",)


# -------------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("episode", "version", "reason"),
    [
        ((2, 0, 0, 0), 0, "given to nobody"),  # not admitted yet
        ((0, 0, 0, 1), 0, "given to nobody"),  # no such attempt
        ((0, 0, 0, -1), 0, "given to nobody"),
        ((0, 1, 0, 0), 0, "given to nobody"),  # no such round
        ((0, 0, 0, 0), 1, "pinned to 0"),
    ],
)
def test_results_that_break_the_rules_are_refused_with_the_reason(episode, version, reason):
    coordinator = made(staleness=1)
    *group, sample = episode
    answer = coordinator.put(EpisodeId(GroupId(*group), sample), "a", version, "d")
    assert answer.outcome is Outcome.REFUSED and reason in answer.reason
    assert coordinator.take_events() == []


def test_a_batch_that_is_too_old_is_never_handed_out():
    """The rules exclude it, so the log is forged."""
    coordinator = made(staleness=1, groups_per_step=1)
    for step in range(3):
        if step == 2:
            coordinator.record.apply(events.EpisodeStored(GroupId(2, 0, 0), 0, "d", 0, "a"))
            coordinator.close(GroupId(2, 0, 0), True)
            with pytest.raises(BoundError, match="2 versions ago; the bound is 1"):
                coordinator.batch(2)
        else:
            played(coordinator, GroupId(step, 0, 0))
            coordinator.batch(step)
            coordinator.publish(step + 1, "v")


# -------------------------------------------------------------------- batches


def test_a_group_is_judged_once_it_is_complete():
    coordinator = made(attempts=2)
    group = GroupId(0, 0, 0)
    assert not coordinator.put(EpisodeId(group, 1), "a", 0, "d").complete
    assert coordinator.close(group, True).outcome is Outcome.REFUSED and coordinator.record.unjudged() == []
    assert coordinator.put(EpisodeId(group, 0), "a", 0, "d").complete and coordinator.record.unjudged() == [group]
    assert coordinator.close(group, True).outcome is Outcome.STORED and coordinator.record.unjudged() == []
    assert coordinator.close(group, True).outcome is Outcome.DUPLICATE
    assert coordinator.close(group, False).outcome is Outcome.CONFLICT


def test_dynamic_sampling_replaces_groups_by_others():
    coordinator, out = made(groups_per_step=3, rounds=2, staleness=1), 1
    assert "given to nobody" in coordinator.put(EpisodeId(GroupId(0, 1, 0), 0), "x", 0, "d").reason  # not yet
    for k in range(3):
        played(coordinator, GroupId(0, 0, k), usable=k != out)
    assert coordinator.batch(0) is None
    (again,) = ids(0, (0,), number=1)
    steps = [work.episode.group for work in taken(coordinator, worker(coordinator), 1)]
    assert steps == [again]  # before step 1's
    played(coordinator, again)
    batch = coordinator.batch(0)
    assert batch.groups == (*(g for g in ids(0, range(3)) if g.number != out), again)
    assert batch.left_out == (GroupId(0, 0, out),)


# -------------------------------------------------------------------- versions


def test_versions_come_in_order_and_a_replay_must_equal():
    coordinator = made()
    assert coordinator.publish(1, "v1").outcome is Outcome.REFUSED  # step 0 has no batch
    for group in ids(0, (0, 1)):
        played(coordinator, group)
    coordinator.batch(0)
    assert coordinator.publish(2, "v2").outcome is Outcome.REFUSED
    assert coordinator.publish(1, "v1").outcome is Outcome.STORED
    assert coordinator.publish(1, "v1").outcome is Outcome.DUPLICATE
    assert coordinator.publish(1, "w1").outcome is Outcome.CONFLICT and coordinator.publish(0, "v0").reason == ""
    assert coordinator.record.versions == ["v0", "v1"]
