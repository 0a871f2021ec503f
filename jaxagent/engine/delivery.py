"""How results get from the driver's thread into event loops: futures are only ever settled in their own loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any


def deliver(loop: asyncio.AbstractEventLoop, outcomes: Sequence[tuple[asyncio.Future, Any]]) -> None:
    """Settles futures of one loop with a result or an exception each: one wake-up, however many there are."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(_settle, outcomes)


def _settle(outcomes: Sequence[tuple[asyncio.Future, Any]]) -> None:
    for future, outcome in outcomes:
        if future.done():  # cancelled, or out of time
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
