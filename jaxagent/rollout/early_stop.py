"""Oversampling with early stop: more attempts than needed, until enough groups are complete; the rest is cancelled.

Slow attempts do not hold up a step. The price: WHICH attempts are used depends on which ended first, so a run that
oversamples is not reproducible to the bit, and favours attempts that are fast. It is off by default (`rl.oversample`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence

from jaxagent.rollout.workers import Rollout, guarded, no_episode
from jaxagent.types import Episode, Group, StopReason, Task

logger = logging.getLogger(__name__)
ENOUGH = "enough groups were complete without it"
LATE = "the deadline of all rollouts passed"


async def run_until_enough(
    tasks: Sequence[Task],
    attempts: int,
    group_size: int,
    enough: int,
    rollout: Rollout,
    concurrency: int,
    deadline_s: float,
) -> list[Group]:
    """One group per task, in task order, ended when `enough` of them are complete.

    A group is complete when `group_size` of its `attempts` attempts ended without failing; then its others are
    cancelled. When `enough` groups are complete everything is. What was cancelled, or never began, comes back
    CANCELLED, so every group has `attempts` episodes and `Group.valid` is its real size.

    Args:
      tasks: in the order in which they start.
      attempts: started per task, at least `group_size`.
      group_size: attempts that make a group complete.
      enough: complete groups that end the round.
      rollout: runs one attempt.
      concurrency: attempts running at once.
      deadline_s: seconds after which the round ends in any case.
    """
    table: list[list[Episode | None]] = [[None] * attempts for _ in tasks]
    running: dict[tuple[int, int], asyncio.Task[Episode]] = {}
    over = asyncio.Event()
    waiting = iter([(t, s) for t in range(len(tasks)) for s in range(attempts)])

    def complete(t: int) -> bool:
        return sum(e is not None and not e.stop_reason.is_failure for e in table[t]) >= group_size

    def start() -> None:
        while len(running) < concurrency and not over.is_set():
            t, s = next((at for at in waiting if not complete(at[0])), (-1, -1))
            if t < 0:
                break
            job = running[t, s] = asyncio.create_task(guarded(rollout, tasks[t], s))
            job.add_done_callback(lambda job, at=(t, s): ended(at, job))
        if not running:
            over.set()

    def ended(at: tuple[int, int], job: asyncio.Task[Episode]) -> None:
        running.pop(at, None)
        t, s = at
        if over.is_set() or complete(t):  # also one that ended while its cancellation was on its way
            return start()
        if not job.cancelled():
            if job.exception() is not None:
                logger.error("task %s, sample %d was ended from outside", tasks[t].id, s)
            else:
                table[t][s] = job.result()
        if complete(t):
            for other in [job for (u, _), job in running.items() if u == t]:
                other.cancel()
        if sum(map(complete, range(len(tasks)))) >= enough:
            over.set()
        start()

    start()
    reason = ENOUGH
    try:
        async with asyncio.timeout(deadline_s):
            await over.wait()
    except TimeoutError:
        over.set()
        reason = LATE
        logger.warning("Rollouts were cut off after %.0f s.", deadline_s)
    finally:
        left = list(running.values())
        for job in left:
            job.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    return [
        Group(task, tuple(e or no_episode(task, s, StopReason.CANCELLED, reason) for s, e in enumerate(row)))
        for task, row in zip(tasks, table, strict=True)
    ]


def usable(groups: Sequence[Group], min_group: int, wanted: int) -> list[Group]:
    """The `wanted` groups with most counted attempts, of those with `min_group` or more; in task order.

    Partial groups are used as they are: advantages are of the attempts that count.
    """
    enough = [i for i, group in enumerate(groups) if len(group.valid) >= min_group]
    largest = sorted(enough, key=lambda i: (-len(groups[i].valid), i))[:wanted]
    return [groups[i] for i in sorted(largest)]


def oversample_metrics(groups: Sequence[Group], group_size: int, kept: Sequence[Group]) -> dict[str, float]:
    """Attempts that were cancelled, and groups used with fewer attempts than asked for."""
    cancelled = itertools.chain.from_iterable(group.episodes for group in groups)
    return {
        "sampling/attempts_cancelled": float(sum(e.stop_reason == StopReason.CANCELLED for e in cancelled)),
        "sampling/groups_partial": float(sum(len(group.valid) < group_size for group in kept)),
        "sampling/groups_dropped": float(len(groups) - len(kept)),
    }
