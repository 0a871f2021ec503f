"""The coordinator's rules that random schedules (test_schedules.py) do not see, by hand."""

import pytest

from jaxagent.fleet import events
from jaxagent.fleet.admission import Coordinator, Outcome
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
