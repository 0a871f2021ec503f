"""Counts XLA compilations, so that a run can show that nothing compiled after warm-up.

jax.monitoring events in -> counts and the names of what compiled.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"  # one per program handed to XLA or its cache


class CompileCounter:
    """A context manager that counts while it is open. Thread-safe: the engine compiles in its own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: list[tuple[str, bool]] = []  # (function, whether it compiled during warm-up)
        self._warming = 0
        self.seconds = 0.0  # spent compiling, all of it

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    @property
    def total(self) -> int:
        """Compilations since the counter was opened."""
        return len(self._names)

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        """While open, compilations are expected, in every thread. Outside it a compilation is a mistake."""
        with self._lock:
            self._warming += 1
        try:
            yield
        finally:
            with self._lock:
                self._warming -= 1

    @property
    def after_warm_up(self) -> int:
        """Compilations outside `warm_up()`."""
        return len(self.names_after_warm_up)

    @property
    def names_after_warm_up(self) -> list[str]:
        """The names of the functions that were compiled outside `warm_up()`."""
        with self._lock:
            return [name for name, expected in self._names if not expected]

    def _on_event(self, event: str, duration_s: float, **tags: str | int) -> None:
        if event == _EVENT:
            with self._lock:
                self._names.append((str(tags.get("fun_name", "?")), self._warming > 0))
                self.seconds += duration_s
