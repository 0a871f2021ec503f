"""Groups come out complete and in task order, with bounded concurrency, whatever the episodes do."""

import asyncio
import random
import threading

import pytest

from jaxagent.rollout.workers import LATE, STOP_TIMEOUT_S, Workers, group_deadline_s
from jaxagent.sandbox.base import SandboxLost
from jaxagent.types import Episode, StopReason, Task

TASKS = [Task(f"t{i}", "?", ("a",)) for i in range(7)]


def episode(task, sample, reward=1.0):
    return Episode(task, sample, (), reward, {}, StopReason.ANSWER, 1)


class Attempts:
    """Episodes of random length that note how many run at once."""

    def __init__(self):
        self.running = self.most = 0
        self.order, self.threads = [], set()

    async def __call__(self, task, sample):
        self.order.append((task.id, sample))
        self.threads.add(threading.current_thread())
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(random.random() / 200)
        self.running -= 1
        return episode(task, sample)


def test_groups_in_task_order_with_bounded_concurrency():
    attempts = Attempts()
    with Workers(4) as workers:
        groups = workers.collect(TASKS, 3, attempts, 10.0)
    assert [g.task for g in groups] == TASKS
    assert all([e.sample for e in g.episodes] == [0, 1, 2] for g in groups)
    assert attempts.most == 4
    assert attempts.order == [(t.id, s) for t in TASKS for s in range(3)]
    assert threading.current_thread() not in attempts.threads and len(attempts.threads) == 1


def test_the_same_task_twice_in_a_batch():
    with Workers(4) as workers:
        groups = workers.collect([TASKS[0], TASKS[0]], 2, Attempts(), 10.0)
    assert [len(g.episodes) for g in groups] == [2, 2]


def test_no_tasks():
    with Workers(4) as workers:
        assert workers.collect([], 8, Attempts(), 1.0) == []


@pytest.mark.parametrize(("losses", "played"), [(0, 1), (4, 5), (5, 5)])
def test_an_attempt_whose_sandbox_was_lost_is_played_again_under_its_number(losses, played):
    """And fails when that was in vain for five times."""
    plays = []

    async def losing(task, sample):
        plays.append((task, sample))
        if len(plays) <= losses:
            raise SandboxLost("its host is gone")
        return episode(task, sample)

    with Workers(1) as workers:
        ((found,),) = (group.episodes for group in workers.collect(TASKS[:1], 1, losing, 10.0))
    assert plays == [(TASKS[0], 0)] * played
    assert found == episode(TASKS[0], 0) if losses < 5 else found.stop_reason is StopReason.ENV_ERROR


def test_a_raising_rollout_is_one_failed_episode():
    async def raising(task, sample):
        if (task.id, sample) == ("t2", 1):
            raise ZeroDivisionError("oops")
        return episode(task, sample)

    with Workers(3) as workers:
        groups = workers.collect(TASKS, 2, raising, 10.0)
    failed = [e for g in groups for e in g.episodes if e.stop_reason.is_failure]
    assert [(e.task.id, e.sample, e.stop_reason) for e in failed] == [("t2", 1, StopReason.ENV_ERROR)]
    assert "oops" in failed[0].error and len(groups[2].valid) == 1


def test_a_deadline_cancels_what_is_late_and_keeps_the_rest():
    cleaned = []

    async def slow(task, sample):
        if task.id == "t1" and sample == 0:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append(sample)
        return episode(task, sample)

    with Workers(2) as workers:
        groups = workers.collect(TASKS[:3], 2, slow, 0.3)
        assert cleaned == [0]
        again = workers.collect(TASKS[:1], 2, slow, 5.0)  # the loop is still good
    reasons = [[e.stop_reason for e in g.episodes] for g in groups]
    assert reasons == [
        [StopReason.ANSWER] * 2,
        [StopReason.CANCELLED, StopReason.ANSWER],
        [StopReason.ANSWER] * 2,
    ]
    assert len(again[0].valid) == 2


def test_a_group_that_hangs_takes_no_time_from_others():
    begun = []

    async def hangs(task, sample):
        begun.append((task.id, sample))
        if task.id == "t0":
            await asyncio.Event().wait()
        return episode(task, sample)

    with Workers(1) as workers:
        groups = workers.collect(TASKS[:3], 2, hangs, 0.1)
    cancelled, answered = [StopReason.CANCELLED] * 2, [StopReason.ANSWER] * 2
    assert [[e.stop_reason for e in g.episodes] for g in groups] == [cancelled, answered, answered]
    assert begun == [("t0", 0), *((task, s) for task in ("t1", "t2") for s in range(2))], "what is late does not begin"
    assert groups[0].episodes[1].error == LATE


def test_the_time_of_a_group_covers_attempts_that_wait_for_a_place():
    one = 60.0 + STOP_TIMEOUT_S
    assert group_deadline_s(1, 8, 60.0) == one
    assert group_deadline_s(9, 8, 60.0) == 2 * one  # eight get the places of those that run when the first begins
    assert group_deadline_s(10, 8, 60.0) == 3 * one


def test_leaving_cancels_what_runs():
    ended = threading.Event()

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with Workers(1) as workers, pytest.raises(TimeoutError):
        workers.run(forever(), 0.05)
    assert ended.is_set()
