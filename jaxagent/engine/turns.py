"""Whose round it is where several engines share one mesh: one at a time, in the order in which they asked.

Programs of two threads that run on several devices at once wait for each other's devices for ever, once each device
has begun with another one; and on one device they only slow each other down. So a `Driver` takes a turn for a round
(what has arrived, one prefill, one dispatch) and gives it back. Two engines with work alternate; one whose partner is
idle has every turn at once.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Turns:
    """A lock that is fair: who gives it back and asks again stands behind all who asked before."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._line: collections.deque[object] = collections.deque()  # in front whose turn it is

    @contextlib.contextmanager
    def turn(self, unwanted: Callable[[], bool]) -> Iterator[float | None]:
        """Waits for the turn, and gives it back at the end, whatever happens in between.

        Args:
          unwanted: whether who waits has no use for the turn any more; asked again at each `look`.

        Yields:
          The seconds waited; None if it is unwanted and has not come.
        """
        me, waited_s = object(), 0.0
        with self._change:
            self._line.append(me)
            if self._line[0] is not me:
                began = time.monotonic()
                self._change.wait_for(lambda: self._line[0] is me or unwanted())
                waited_s = time.monotonic() - began
            mine = self._line[0] is me
            if not mine:
                self._line.remove(me)
        try:
            yield waited_s if mine else None
        finally:
            if mine:
                with self._change:
                    self._line.popleft()
                    self._change.notify_all()

    def look(self) -> None:
        """Lets all who wait ask again whether their turn is unwanted."""
        with self._change:
            self._change.notify_all()
