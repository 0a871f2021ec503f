"""SIGTERM, SIGHUP and Ctrl-C: while a stage trains, the first asks for a save after the step; else it ends the run.

Outside a stage (opening data, compiling) there is nothing to save: every bundle that was begun is complete by then. A
second Ctrl-C ends the process at once, whatever it does. Python runs handlers in the main thread between two bytecodes,
which a compilation of many minutes keeps it from, so a thread of its own reads the signals too and ends the process
where the main thread does not answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from jaxagent.config.errors import EXIT_CODES, Stopped, ending_signals
from jaxagent.learner import peers

ANSWER_S = 2.0  # for the main thread to run the handler
NOTHING_LOST = " while no step was under way: nothing is lost, and the same command continues."


class Stopping:
    """Listens while it is open, in the main thread; elsewhere it hears nothing.

    Attributes:
      end_signal: the signal that asked for a save and an end; None = none has.
      training: whether a stage is under way, which saves when it is asked.
    """

    def __init__(self) -> None:
        self.end_signal: signal.Signals | None = None
        self.training = False
        self._answered = threading.Event()
        self._ending = False

    def end_if_asked(self, step: int) -> None:
        """Ends the run where a signal has asked for it; everything up to `step` is on disk."""
        if self.end_signal is not None:
            raise Stopped(self.end_signal, f": saved at step {step}; the same command continues.")

    def __enter__(self) -> Stopping:
        self._stack = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            self._stack.enter_context(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def _listen(self) -> Iterator[None]:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = [(s, signal.signal(s, self._on_signal)) for s in ending_signals()]
        wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for signum, handler in before:
                signal.signal(signum, handler)
            os.close(writing)  # the watcher reads the end of the file
            watcher.join()
            os.close(reading)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """In the main thread."""
        self._answered.set()
        if self.training:
            self.end_signal = self.end_signal or signal.Signals(signum)
        elif not self._ending:  # a second SIGTERM must not cut short what the first one closes
            self._ending = True
            raise Stopped(signal.Signals(signum), NOTHING_LOST)

    def _watch(self, reading: int) -> None:
        """In a thread of its own: the numbers of the signals arrive as bytes."""
        interrupts = 0
        while received := os.read(reading, 1):
            if received[0] not in list(EXIT_CODES):
                continue
            signum = signal.Signals(received[0])
            interrupts += signum == signal.SIGINT
            if interrupts > 1:
                _end(signum, " twice: ended at once, at the last checkpoint; the same command continues from there.")
            if self.training:
                if signum == signal.SIGINT:
                    _say("interrupted: saving after this step; press Ctrl-C again to end at once.")
            elif not self._answered.wait(ANSWER_S):
                _end(signum, NOTHING_LOST)


def _end(signum: signal.Signals, text: str) -> None:
    _say(str(Stopped(signum, text)))
    os._exit(EXIT_CODES[signum])  # no clean-up: what we started ends with its pipe to us


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()


def asks_to_end(here_asks: bool, stopping: Stopping) -> bool:
    """Whether any process is to save after this step, and end; a signal that one has got is then everybody's."""
    answers = peers.meet("the end of a step", [here_asks, stopping.end_signal])
    if signals := [number for _, number in answers if number is not None]:
        stopping.end_signal = stopping.end_signal or signal.Signals(signals[0])
    peers.ending_together = any(ending for ending, _ in answers)
    return peers.ending_together
