"""Workers: many episodes at once on one background asyncio loop, gathered into groups in task order.

Tasks and a rollout in -> `Group`s out. The loop thread is the only place where environments and rollouts run; the
caller's thread (the training loop) blocks in `collect` and never sees a coroutine. Episodes start in task order and
end in any order; groups come out in task order, so nothing downstream depends on timing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, Self, TypeVar

from jaxagent.rollout import waiting
from jaxagent.sandbox.base import SandboxLost
from jaxagent.types import Episode, Group, StopReason, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")
LATE = "the deadline of its group passed"
STOP_TIMEOUT_S = 30.0  # for cancelled episodes to clean up after themselves


class Rollout(Protocol):
    """A function that plays one attempt at a task, such as `multi_turn.MultiTurn`."""

    async def __call__(self, task: Task, sample: int) -> Episode:
        """Runs attempt number `sample`."""
        ...


async def run_groups(
    tasks: Sequence[Task],
    group_size: int,
    rollout: Rollout,
    concurrency: int,
    deadline_s: float,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Group]:
    """One group per task, in task order, with at most `concurrency` episodes running at any time.

    A rollout that raises comes back as ENV_ERROR. Attempts of a group that are not finished `deadline_s` seconds after
    its first one began come back CANCELLED, so every group has `group_size` episodes; other groups have their own
    time. `on_episode` is called on the loop's thread as each ends that is in time.
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
                    episode = table[t][s] = await guarded(rollout, tasks[t], s)
            except TimeoutError:
                logger.warning("task %s, sample %d: its group was cut off after %.0f s", tasks[t].id, s, deadline_s)
                continue
            if on_episode is not None:
                on_episode(episode)

    async with asyncio.TaskGroup() as workers:
        for _ in range(min(concurrency, len(tasks) * group_size)):
            workers.create_task(work())
    return [
        Group(task, tuple(e or no_episode(task, s, StopReason.CANCELLED, LATE) for s, e in enumerate(row)))
        for task, row in zip(tasks, table, strict=True)
    ]


async def guarded(rollout: Rollout, task: Task, sample: int, plays: int = 5) -> Episode:
    """The attempt's episode; if the rollout raises, an episode that failed.

    An attempt whose sandbox was lost has no result: it is played again under its number, `plays` times in all.
    """
    try:
        return await rollout(task, sample)
    except Exception as failure:
        if not isinstance(failure, SandboxLost) or plays <= 1:
            logger.exception("task %s, sample %d: the rollout raised", task.id, sample)
            return no_episode(task, sample, StopReason.ENV_ERROR, f"{type(failure).__name__}: {failure}")
        logger.warning("task %s, sample %d is played again: %s", task.id, sample, failure)
    return await guarded(rollout, task, sample, plays - 1)


def group_deadline_s(attempts: int, concurrency: int, episode_timeout_s: float) -> float:
    """Seconds from the beginning of a group's first attempt after which what is left of it is cut off.

    A safety, for episodes that their own deadline does not end. Attempts begin in order, so when the first one has
    begun the others get the next places that become free.
    """
    in_turn = 1 + math.ceil((attempts - 1) / concurrency)
    return in_turn * (episode_timeout_s + STOP_TIMEOUT_S)


def no_episode(task: Task, sample: int, stop_reason: StopReason, error: str) -> Episode:
    """The empty episode that stands for an attempt that returned none."""
    return Episode(task, sample, (), 0.0, {}, stop_reason, 0, error=error)


class Workers:
    """The background loop and its synchronous door. A context manager; `collect` may be called from any thread.

    Args:
      concurrency: episodes running at once. With the engine's number of slots nobody waits for a slot while the clock
        of its episode ticks; with more, slots do not stand empty while episodes wait for tools and other roles.
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
        """Runs a coroutine on the loop and waits for it, e.g. `run(retriever.close(), 5.0)`.

        Raises:
          OverdueError: it took longer than that of this process's own time (waiting.py); it has been cancelled.
        """
        what = getattr(coroutine, "__qualname__", "a coroutine").replace(".<locals>", "")
        return waiting.result(asyncio.run_coroutine_threadsafe(coroutine, self._loop), timeout_s, what)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begins a coroutine on the loop. Unlike `run`, its caller goes on, and bounds it itself."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def collect(
        self,
        tasks: Sequence[Task],
        group_size: int,
        rollout: Rollout,
        deadline_s: float,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[Group]:
        """`run_groups` on the background loop; blocks until it is done."""
        groups = run_groups(tasks, group_size, rollout, self._concurrency, deadline_s, on_episode)
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
