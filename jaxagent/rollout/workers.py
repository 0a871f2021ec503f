"""Workers: many episodes at once on one background asyncio loop, gathered into groups in task order.

Tasks and a rollout in -> `Group`s out. The loop thread is the only place where environments and rollouts run; the
caller's thread (the training loop) blocks in `collect` and never sees a coroutine. Episodes start in task order and
end in any order; groups come out in task order, so nothing downstream depends on timing. The one exception is
`run_until_enough`, oversampling with early stop: WHICH attempts it uses depends on which ended first, so a run that
oversamples is not reproducible to the bit, and favours attempts that are fast. It is off by default (`rl.oversample`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

from jaxagent.config.errors import AttemptLost, WaitedInVainError
from jaxagent.types import Episode, Group, StopReason, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")
LATE = "the deadline of its group passed"
STOP_TIMEOUT_S = 30.0  # for cancelled episodes to clean up after themselves


# Plays an attempt, by its number, at a task: `multi_turn.MultiTurn` is one.
Rollout = Callable[[Task, int], Awaitable[Episode]]


async def run_groups(
    tasks: Sequence[Task],
    group_size: int,
    rollout: Rollout,
    concurrency: int,
    deadline_s: float,
) -> list[Group]:
    """One group per task, in task order, with at most `concurrency` episodes running at any time.

    A rollout that raises comes back as ENV_ERROR. Attempts of a group that are not finished `deadline_s` seconds after
    its first one began come back CANCELLED, so every group has `group_size` episodes; other groups have their own
    time.
    """
    table: list[list[Episode | None]] = [[None] * group_size for _ in tasks]
    attempts = iter([(t, s) for t in range(len(tasks)) for s in range(group_size)])
    now, ends = asyncio.get_running_loop().time, [math.inf] * len(tasks)

    async def work() -> None:
        for t, s in attempts:  # shared by all workers: each takes the next attempt
            ends[t] = min(ends[t], now() + deadline_s)
            if now() >= ends[t]:
                continue
            try:
                async with asyncio.timeout_at(ends[t]):
                    table[t][s] = await guarded(rollout, tasks[t], s)
            except TimeoutError:
                logger.warning("task %s, sample %d: its group was cut off after %.0f s", tasks[t].id, s, deadline_s)

    async with asyncio.TaskGroup() as workers:
        for _ in range(min(concurrency, len(tasks) * group_size)):
            workers.create_task(work())
    return _groups(tasks, table, LATE)


async def guarded(rollout: Rollout, task: Task, sample: int, plays: int = 5) -> Episode:
    """The attempt's episode; if the rollout raises, an episode that failed.

    An attempt that was lost has no result: it is played again under its number, `plays` times in all.
    """
    try:
        return await rollout(task, sample)
    except Exception as failure:
        if not isinstance(failure, AttemptLost) or plays <= 1:
            logger.exception("task %s, sample %d: the rollout raised", task.id, sample)
            return no_episode(task, sample, StopReason.ENV_ERROR, f"{type(failure).__name__}: {failure}")
        logger.warning("task %s, sample %d is played again: %s", task.id, sample, failure)
    return await guarded(rollout, task, sample, plays - 1)


def group_deadline_s(attempts: int, concurrency: int, episode_timeout_s: float, rounds: int = 1) -> float:
    """Seconds from the beginning of a group's first attempt after which what is left of it is cut off.

    A safety, for episodes that their own deadline does not end. Attempts begin in order, so when the first one has
    begun the others get the next places that become free. `rounds`: of attempts that wait for those before them.
    """
    in_turn = rounds + math.ceil((attempts - 1) / concurrency)
    return in_turn * (episode_timeout_s + STOP_TIMEOUT_S)


def batch_deadline_s(episodes: int, concurrency: int, episode_timeout_s: float) -> float:
    """Seconds after which a batch of episodes is cut off: a full episode deadline for every turn of `concurrency`."""
    return math.ceil(episodes / concurrency) * episode_timeout_s


def no_episode(task: Task, sample: int, stop_reason: StopReason, error: str) -> Episode:
    """The empty episode that stands for an attempt that returned none."""
    return Episode(task, sample, (), 0.0, {}, stop_reason, 0, error=error)


def _groups(tasks: Sequence[Task], table: list[list[Episode | None]], late: str) -> list[Group]:
    """The episodes, task by task; those that are not there were cancelled."""
    return [
        Group(task, tuple(e or no_episode(task, s, StopReason.CANCELLED, late) for s, e in enumerate(row)))
        for task, row in zip(tasks, table, strict=True)
    ]


class Workers:
    """The background loop and its synchronous door. A context manager; `collect` may be called from any thread.

    With a `concurrency` of the engine's number of slots nobody waits for a slot while the clock of its episode ticks;
    with more, slots do not stand empty while episodes wait for tools and other roles.
    """

    def __init__(self, concurrency: int):
        self._concurrency = concurrency
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-workers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Cancels what still runs, lets it clean up, and ends the thread."""
        try:
            self.run(_cancel_all(), STOP_TIMEOUT_S)
        except TimeoutError:
            logger.warning("Some episodes did not clean up within %.0f s.", STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs a coroutine on the loop and waits for it as `result_of` does, e.g. `run(retriever.close(), 5.0)`."""
        what = getattr(coroutine, "__qualname__", "a coroutine").replace(".<locals>", "")
        return result_of(asyncio.run_coroutine_threadsafe(coroutine, self._loop), timeout_s, what)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begins a coroutine on the loop and returns at once; the caller sets its own timeout."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def collect(self, tasks: Sequence[Task], group_size: int, rollout: Rollout, deadline_s: float) -> list[Group]:
        """`run_groups` on the background loop; blocks until it is done."""
        groups = run_groups(tasks, group_size, rollout, self._concurrency, deadline_s)
        return self.run(groups, self.longest_s(len(tasks) * group_size, deadline_s))

    def longest_s(self, attempts: int, deadline_s: float) -> float:
        """Seconds that `collect` takes at most."""
        in_turn = math.ceil(attempts / self._concurrency)  # nobody runs for longer than its group may
        return max(1, in_turn) * (deadline_s + STOP_TIMEOUT_S)


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


SLICE_S = 1.0  # of waiting


class OverdueError(WaitedInVainError, TimeoutError):
    """What ran in the rollouts' loop did not end by its own limits."""


def result_of(future: concurrent.futures.Future[T], timeout_s: float, what: str) -> T:
    """The result of a coroutine's future, or its exception. Raises OverdueError where it took longer, and cancels it.

    Time in which this process was stopped (SIGSTOP, a machine that paused) does not count: the loop was stopped, too,
    and what it has in hand ends by limits of its own as soon as both go on.
    """
    left_s = timeout_s
    while left_s > 0:
        slice_s = min(left_s, SLICE_S)
        try:
            return future.result(slice_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # it is the coroutine's own, or there is a result by now
                return future.result()
            left_s -= slice_s  # whatever the clock says
    future.cancel()
    raise OverdueError(
        f"The rollouts' loop has not ended '{what}' within {timeout_s:g} s, which is more than the limits of all that "
        "it waits for: it hangs."
    )


ENOUGH = "enough groups were complete without it"
ALL_LATE = "the deadline of all rollouts passed"


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
    CANCELLED, so every group has `attempts` episodes (at least `group_size`) and `Group.valid` is its real size. After
    `deadline_s` seconds the round ends in any case.
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
            job.add_done_callback(lambda job, at=(t, s): on_end(at, job))
        if not running:
            over.set()

    def on_end(at: tuple[int, int], job: asyncio.Task[Episode]) -> None:
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
        reason = ALL_LATE
        logger.warning("Rollouts were cut off after %.0f s.", deadline_s)
    finally:
        remaining = list(running.values())
        for job in remaining:
            job.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)
    return _groups(tasks, table, reason)
