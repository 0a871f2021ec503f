"""Where a process of several threads stands, and since when nothing has gone on: for its beats and for its supervisor.

A thread that does something which may hang says so while it does it. What has gone on longest without a sign of
progress is not the question, since some threads wait for ever and rightly: the phases have an order, and the first one
that is under way is where the process stands. Signs of progress are counted, never made by a clock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from jaxagent.fleet.vitals import Vitals

WEIGHTS = "taking weights"  # the phase of an engine that waits for a version; the coordinator asks for it, too


class Whereabouts:
    """Of one process. Every method may be called from any thread.

    Args:
      order: the names of phases; one that comes earlier hides the later ones.
      budget_s: without progress for so long, whoever watches takes a phase for a hang.
      watch: is told of phases and signs; None: nobody.
    """

    def __init__(self, order: Sequence[str], budget_s: float, watch: Vitals | None = None):
        self._order, self._budget_s, self._watch = list(order), budget_s, watch
        self._lock = threading.Lock()
        self._under_way = dict.fromkeys(order, 0)
        self._phase, self._since = order[-1], time.monotonic()
        self._progress = 0.0
        self._done = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """While this is open, a thread is in the phase."""
        self._change(name, 1)
        try:
            yield
        finally:
            self._change(name, -1)

    def sign(self, results: int = 0) -> None:
        """Something went on.

        Args:
          results: results since the last sign.
        """
        with self._lock:
            self._done += results
            self._tick()

    def progress(self, value: float) -> None:
        """A number that grows while anything goes on: a sign where it is another than the last one."""
        with self._lock:
            if value != self._progress:
                self._progress = value
                self._tick()

    def now(self) -> tuple[str, float]:
        """The phase, and seconds since its last sign of progress."""
        with self._lock:
            return self._phase, time.monotonic() - self._since

    def _change(self, name: str, by: int) -> None:
        with self._lock:
            self._under_way[name] += by
            phase = next((name for name in self._order if self._under_way[name]), self._order[-1])
            if phase == self._phase:
                return
            self._phase, self._since = phase, time.monotonic()
            if self._watch is not None:
                self._watch.phase(f"is {phase}", self._budget_s, self._done)

    def _tick(self) -> None:
        self._since = time.monotonic()
        if self._watch is not None:
            self._watch.tick()
