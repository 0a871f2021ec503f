"""Oversampling: it ends when enough groups are complete, cancels the rest, and partial groups keep their real size."""

import asyncio

from jaxagent.rollout.selection import oversample_metrics, usable
from jaxagent.rollout.workers import run_until_enough
from jaxagent.types import Episode, Group, StopReason, Task

TASKS = [Task(f"t{i}", "?", ("a",)) for i in range(3)]
DONE, CUT = StopReason.ANSWER, StopReason.CANCELLED


def reasons(groups):
    return [[e.stop_reason for e in g.episodes] for g in groups]


class Script:
    """Attempts that end when they are told to; `hang` never do. Failing ones raise."""

    def __init__(self, hang=(), fail=()):
        self.hang, self.fail, self.started, self.cleaned = set(hang), set(fail), [], []
        self.running = self.most = 0

    async def __call__(self, task, sample):
        at = (int(task.id[1:]), sample)
        self.started.append(at)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if at in self.hang:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            if at in self.fail:
                raise ZeroDivisionError
            return Episode(task, sample, (), 1.0, {}, DONE, 1)
        except asyncio.CancelledError:
            self.cleaned.append(at)
            raise
        finally:
            self.running -= 1


def play(script, attempts=3, size=2, enough=2, concurrency=100, deadline_s=5.0):
    return asyncio.run(run_until_enough(TASKS, attempts, size, enough, script, concurrency, deadline_s))


def test_a_group_is_complete_without_its_slowest_attempt():
    script = Script(hang=[(0, 1), (1, 0), (2, 2)])
    groups = play(script, enough=3)
    assert reasons(groups) == [[DONE, CUT, DONE], [CUT, DONE, DONE], [DONE, DONE, CUT]]
    assert sorted(script.cleaned) == [(0, 1), (1, 0), (2, 2)] and script.running == 0
    assert [len(g.valid) for g in groups] == [2, 2, 2]


def test_enough_groups_end_the_round_and_partial_ones_keep_their_size():
    script = Script(hang=[(1, 0), (1, 1)])
    groups = play(script, enough=2)
    assert reasons(groups) == [[DONE, DONE, CUT], [CUT, CUT, DONE], [DONE, DONE, CUT]]
    assert [g.task.id for g in usable(groups, 2, 3)] == ["t0", "t2"]
    assert [g.task.id for g in usable(groups, 1, 3)] == ["t0", "t1", "t2"]
    assert [g.task.id for g in usable(groups, 1, 2)] == ["t0", "t2"]  # the larger ones
    metrics = oversample_metrics(groups, 2, usable(groups, 1, 3))
    assert metrics == {
        "sampling/attempts_cancelled": 4.0,
        "sampling/groups_partial": 1.0,
        "sampling/groups_dropped": 0.0,
    }


def test_attempts_of_complete_groups_do_not_begin_and_concurrency_is_bounded():
    script = Script()
    groups = play(script, attempts=3, size=2, enough=3, concurrency=1)
    assert script.started == [(t, s) for t in range(3) for s in range(2)] and script.most == 1
    assert reasons(groups) == [[DONE, DONE, CUT]] * 3


def test_a_failed_attempt_makes_no_group_complete():
    groups = play(Script(fail=[(0, 0), (0, 1)]), enough=3)
    assert reasons(groups)[0] == [StopReason.ENV_ERROR, StopReason.ENV_ERROR, DONE]
    assert len(groups[0].valid) == 1  # all attempts are over: it ends without ever having enough


def test_the_deadline_ends_it():
    groups = play(Script(hang=[(t, s) for t in range(3) for s in range(3)]), deadline_s=0.05)
    assert reasons(groups) == [[CUT] * 3] * 3 and "deadline" in groups[0].episodes[0].error


def test_groups_that_are_whole_are_not_partial():
    whole = Group(TASKS[0], tuple(Episode(TASKS[0], i, (), 0.0, {}, DONE, 1) for i in range(2)))
    assert oversample_metrics([whole], 2, [whole])["sampling/groups_partial"] == 0.0
