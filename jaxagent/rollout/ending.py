"""How an episode ends: whatever its code raises becomes a stop reason with one line, the same for every rollout."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from jaxagent.rollout.bookkeeping import one_line
from jaxagent.sandbox.base import SandboxLost
from jaxagent.types import StopReason, Task

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0  # for an environment's close(), which also runs after the episode's own deadline has passed


class Failed(Exception):
    """Ends an episode with a stop reason that is a failure, and with a line that says why."""

    def __init__(self, stop_reason: StopReason, told: str):
        super().__init__(told)
        self.stop_reason = stop_reason


async def ended(play: Callable[[], Awaitable[StopReason]], timeout_s: float) -> tuple[StopReason, str]:
    """Plays an episode under its deadline: (why it ended, "" or the first reason of a failure).

    Only cancellation of the caller's own task passes through, and `SandboxLost`: whoever called plays again.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await play(), ""
    except SandboxLost:
        raise
    except Failed as failure:
        return failure.stop_reason, str(failure)
    except TimeoutError as failure:
        return StopReason.TIMEOUT, one_line(failure, "the episode's deadline passed")
    except Exception as failure:  # environments are other people's code
        return StopReason.ENV_ERROR, one_line(failure, "")


async def close(attempt: Any, task: Task) -> None:
    """Closes an environment's attempt, if it was begun. What goes wrong is told and changes nothing of the verdict."""
    if attempt is None:
        return
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await attempt.close()
    except Exception as failure:  # a leak is the environment's to report
        logger.warning("task %s: closing the environment failed: %s", task.id, one_line(failure, "timeout"))


@contextlib.contextmanager
def engine_failures() -> Iterator[None]:
    """What generation raises is the engine's failure, and no environment's; cancellation stays what it is."""
    try:
        yield
    except TimeoutError as failure:
        raise Failed(StopReason.TIMEOUT, one_line(failure, "a generation's deadline passed")) from failure
    except Exception as failure:
        raise Failed(StopReason.ENGINE_ERROR, one_line(failure, "a generation's deadline passed")) from failure
