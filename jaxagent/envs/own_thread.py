"""`OwnThread`: a thread for one attempt, in which an interface that blocks is called, each call within its time.

`OwnLoop`: an event loop on a thread of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from jaxagent.config.errors import failure_line

STOP_S = 10.0  # for a loop to stop


class OwnThread:
    """Calls functions one after the other, in a thread that begins with the first of them.

    A thread cannot be killed, so a function that hangs costs a thread; it does not keep the program from ending.

    Args:
      timeout_s: for one function.
      whose: the functions are, for messages: "the environment's ".
    """

    def __init__(self, name: str, timeout_s: float, whose: str = "") -> None:
        self._name, self._timeout_s, self._whose = name, timeout_s, whose
        self._jobs: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, what: str, function: Callable[[], Any]) -> Any:
        """What the function returns.

        Raises:
          TimeoutError: it takes longer; `what` names it in the message. It goes on all the same, and what is called
            after it waits for it.
          RuntimeError: it wants to end the program, or raises what no coroutine may raise.
          Exception: what else it raises.
        """
        future = self._submit(function)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # the function's own
            raise TimeoutError(f"{self._whose}{what} takes longer than {self._timeout_s:g} s") from None

    def end(self, function: Callable[[], Any] | None = None) -> None:
        """Ends the thread behind what it is doing, after a last function for which nobody waits."""
        if function is not None and self._thread is not None:
            self._submit(function)
        self._jobs.put(None)

    def _submit(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._jobs.put((future, function))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except StopIteration as error:
                future.set_exception(RuntimeError(failure_line(error)))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # SystemExit ends a program that raises it, and this is not its program
                future.set_exception(RuntimeError(failure_line(error)))


class OwnLoop:
    """An event loop on a thread of its own, from `with` to the end of it."""

    def __enter__(self) -> OwnLoop:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="own loop", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._loop.close()

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Begins a coroutine on the loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
