"""What a process says of itself, so that whoever started it can tell work from a hang: a small file, and its stacks.

A process writes its file when it gets somewhere: when a phase begins, and at every sign of progress within one. It
never writes by a clock, since a thread that ticks says nothing of the others. A phase comes with its budget, which only
the process itself knows; whoever watches compares it with the time since the last sign. On SIGUSR1 the process writes
the stacks of all its threads, also where Python waits in a library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence

FOLDER = "vitals"
WEIGHTS = "taking weights"  # the phase of an engine that waits for a version; the coordinator asks for it, too
LEAST_BETWEEN_S = 0.2  # signs of progress that come faster are not written


@dataclasses.dataclass(frozen=True)
class Sign:
    """The newest sign of life."""

    pid: int
    phase: str
    budget_s: float  # without another sign for so long, it hangs
    at: float  # seconds of the machine's monotonic clock
    done: int  # how far it has come, of whatever it counts (a trainer the run's steps, others from their own start)

    def overdue_s(self, now: float) -> float:
        """Seconds beyond the budget; negative while it lasts."""
        return now - self.at - self.budget_s


class Vitals:
    """A process's own. Every method may be called from any thread.

    Args:
      path: of its file; None: nobody watches, and nothing is written.
    """

    def __init__(self, path: pathlib.Path | None = None):
        self._path = path
        self._lock = threading.Lock()
        self._phase, self._budget_s, self._done = "starts", 0.0, 0
        self._written = 0.0

    def phase(self, name: str, budget_s: float, done: int | None = None) -> None:
        """Another phase begins, which gives a sign within so many seconds.

        Args:
          name: what follows "it", as in "it waits for step 3".
          budget_s: until the next sign.
          done: how far it has come; None: as far as before.
        """
        with self._lock:
            self._phase, self._budget_s = name, budget_s
            self._done = self._done if done is None else done
            self._write()

    def tick(self) -> None:
        """Something went on within the phase."""
        with self._lock:
            if time.monotonic() - self._written >= LEAST_BETWEEN_S:
                self._write()

    def now(self) -> tuple[str, float]:
        """The phase, and seconds since its last sign that was written."""
        with self._lock:
            return self._phase, time.monotonic() - self._written

    def _write(self) -> None:
        self._written = time.monotonic()
        if self._path is None:
            return
        sign = Sign(os.getpid(), self._phase, self._budget_s, self._written, self._done)
        temporary = self._path.with_name(f".{self._path.name}")
        with contextlib.suppress(OSError):  # a full disk: no sign, and no reason to end
            temporary.write_text(json.dumps(dataclasses.asdict(sign)), encoding="utf-8")
            os.replace(temporary, self._path)  # no fsync: it is of no use after a power cut


class Whereabouts:
    """Where a process of several threads stands, and since when nothing has gone on: for its beats and its supervisor.

    A thread that does something which may hang says so while it does it. What has gone on longest without a sign of
    progress is not the question, since some threads wait for ever and rightly: the phases have an order, and the first
    one that is under way is where the process stands. Every method may be called from any thread.

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
        """Something went on."""
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


def read(path: pathlib.Path) -> Sign | None:
    """The newest sign; None before the first one, and where a power cut has left an empty file."""
    try:
        return Sign(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def register_stacks(path: pathlib.Path) -> None:
    """From now on SIGUSR1 adds the stacks of all threads to a file, and does nothing else."""
    if hasattr(faulthandler, "register"):
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115  open for as long as the process lives
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
