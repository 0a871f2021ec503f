"""Where process 0 plays for all, the others wait for as long as it may take."""

import pytest

from jaxagent.rollout.workers import STOP_TIMEOUT_S
from jaxagent.runs import replica
from jaxagent.types import Episode, StopReason, Task

DEADLINE_S = 10.0


@pytest.mark.parametrize(("tasks", "attempts", "turns"), [(1, 1, 1), (4, 2, 4), (5, 1, 3)])
def test_the_others_wait_longer_than_all_attempts_may_take(monkeypatch, tasks, attempts, turns):
    waited = []

    def share(what, make, timeout_s):
        waited.append(timeout_s)
        return make()

    async def rollout(task, sample):
        return Episode(task, sample, (), 0.0, {}, StopReason.ANSWER, 0)

    monkeypatch.setattr(replica.peers, "share", share)
    with replica.PlayedByFirst(2) as workers:  # two at once
        groups = workers.collect([Task(f"t{i}", "q", ()) for i in range(tasks)], attempts, rollout, DEADLINE_S)
    assert [len(group.episodes) for group in groups] == [attempts] * tasks
    assert waited == [turns * (DEADLINE_S + STOP_TIMEOUT_S) + STOP_TIMEOUT_S]
