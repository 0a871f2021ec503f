"""Waiting for what runs in the rollouts' loop, for as long as this process itself runs."""

from __future__ import annotations

import concurrent.futures
from typing import TypeVar

from jaxagent.config.errors import WaitedInVainError

T = TypeVar("T")
SLICE_S = 1.0  # of waiting


class OverdueError(WaitedInVainError, TimeoutError):
    """What ran in the rollouts' loop did not end by its own limits."""


def result(future: concurrent.futures.Future[T], timeout_s: float, what: str) -> T:
    """The future's result; its exception is raised.

    Time in which this process was stopped (SIGSTOP, a machine that paused) does not count: the loop was stopped, too,
    and what it has in hand ends by limits of its own as soon as both go on.

    Args:
      future: of a coroutine.
      timeout_s: of time in which this process ran; more than the limits of all that the coroutine waits for.
      what: its name, for the message.

    Raises:
      OverdueError: it took longer; it has been cancelled.
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
