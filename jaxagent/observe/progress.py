"""Live progress for a person: a bar and the numbers that matter on a terminal, plain lines elsewhere and in a file.

Records in (the same dicts that go to metrics.jsonl) -> text. Knows nothing of what the numbers mean beyond
which to show first.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import IO, Any, Self, cast

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from jaxagent.config.command import Display
from jaxagent.observe import headline
from jaxagent.observe.text import duration, number, sparkline

# Shown in this order where a record has them, the environment's score between the two; the rest is in metrics.jsonl.
_BEFORE_SCORE = ("loss", "gate/worst_accuracy")
_AFTER_SCORE = (
    "reward/mean",
    "policy/entropy",
    "policy/kl_reference",
    "policy/clip_frac",
    "policy/ratio_p99",
    "logprob_gap/max",
    "groups/zero_signal_frac",
    "episode/turns",
    "stop/answer",
    "tokens_per_s",
    "time/step_s",
    "fleet/trainer_wait_s",
    "fleet/engine_idle_frac",
    "fleet/engines",
)
# Shown once they are not 0.
FAILURES = ("stop/env_error", "stop/timeout", "stop/engine_error", "eval/failed", "eval/failed_sampled", "failed")
_HISTORY = 40  # points of a sparkline
MOST_BYTES = 8 * 2**20  # of the file of lines and of the one before it


class Progress:
    """A context manager. On a terminal that can, it redraws in place; elsewhere it prints a line per `log_every_s`.

    Nothing depends on it: when its display is gone (the reader of a pipe, a terminal), the run goes on without.

    Args:
      console: where to.
      log_every_s: see above.
      alive: called with the stage's name at every record and every line: they are signs that the run goes on.
    """

    def __init__(
        self,
        console: Console | None = None,
        log_every_s: float = 10.0,
        alive: Callable[[str], None] = lambda stage: None,
    ):
        self._alive = alive
        self._display = sys.stdout if isinstance(sys.stdout, Display) else Display(sys.stdout)
        self._console = console or Console(file=cast(IO[str], self._display))
        self._file: pathlib.Path | None = None
        self._unwritten: deque[str] = deque(maxlen=100)  # lines, until there is a file
        self._log_every_s = log_every_s
        self._last_line_s = -math.inf
        self._stage, self._total, self._started_s, self._first_step = "", 0, time.monotonic(), 0
        self._history: dict[str, deque[float | None]] = {}
        self._score = ""  # the environment's, known since the first evaluation
        self._bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = None
        self._display_loss_noted = False
        self._live = (
            Live(self._bars, console=self._console, refresh_per_second=4) if self._console.is_interactive else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        self._note_display_loss()  # the last redrawing may have been the first that failed
        self._write()

    def stage(self, name: str, total: int, step: int = 0) -> None:
        """Begins a stage of at most `total` steps, of which `step` are done already (after a resume)."""
        self._stage, self._total, self._first_step, self._started_s = name, total, step, time.monotonic()
        self._alive(name)
        self._history.clear()
        self._last_line_s = -math.inf
        if self._task is not None:
            self._bars.update(self._task, visible=False)
        self._task = self._bars.add_task(name, total=total, completed=step)
        self._line(f"{name}: {total} steps" + (f", going on from step {step}" if step else ""), not self._live)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows the record of a finished step. Lines with an evaluation are always printed."""
        self._alive(self._stage)
        self._score = headline.score_of(metrics) or self._score
        numbers = {name: metrics[name] for name in self._headlines(metrics) if name in metrics}
        for name in FAILURES:
            if metrics.get(name) or (name in metrics and name in self._history):
                numbers[name] = metrics[name]
        for name, value in numbers.items():
            self._history.setdefault(name, deque(maxlen=_HISTORY)).append(None if value is None else float(value))
        if self._live:
            self._bars.update(self._task, completed=step)
            self._live.update(Group(self._table(), self._bars))
        if self._is_due(step, metrics):
            self._last_line_s = time.monotonic()
            latest = "  ".join(f"{name} {self._latest(name)}" for name in numbers)
            self._line(f"{self._stage} {step}/{self._total}  {latest}  left {self._time_left(step)}", not self._live)

    def note(self, text: str) -> None:
        """Prints one line above the bar."""
        self._alive(self._stage)
        self._line(text)

    def append_lines_to(self, path: pathlib.Path) -> None:
        """Appends all lines to a file, too, those before this call included."""
        self._file = path
        self._write()

    def _line(self, text: str, show: bool = True) -> None:
        if show:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._unwritten.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self._note_display_loss()
        self._write()

    def _note_display_loss(self) -> None:
        if self._display.gone and not self._display_loss_noted:
            self._display_loss_noted = True
            self._unwritten.append(f"The display is gone ({self._display.gone}): the run goes on without it.\n")

    def _write(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # of a full disk the run's own files tell
            if self._file.exists() and self._file.stat().st_size > MOST_BYTES:
                os.replace(self._file, self._file.with_suffix(".old.txt"))
            with open(self._file, "a", encoding="utf-8", errors="replace") as file:
                file.writelines(self._unwritten)
        self._unwritten.clear()

    def _is_due(self, step: int, metrics: Mapping[str, Any]) -> bool:
        waited = time.monotonic() - self._last_line_s >= self._log_every_s
        return waited or step >= self._total or any(name.startswith("eval/") for name in metrics)

    def _time_left(self, step: int) -> str:
        steps_done = step - self._first_step
        if steps_done <= 0:
            return "?"
        return duration((time.monotonic() - self._started_s) / steps_done * max(0, self._total - step))

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name in (*self._headlines(self._history), *FAILURES):
            if name in self._history:
                values = [math.nan if value is None else value for value in self._history[name]]
                table.add_row(f"[dim]{escape(name)}", f"[bold]{self._latest(name)}", f"[cyan]{sparkline(values)}")
        return table

    def _headlines(self, names: Iterable[str]) -> list[str]:
        score = [f"reward/{self._score}", *headline.held_out(names, self._score)]
        return [*_BEFORE_SCORE, *score, *_AFTER_SCORE]

    def _latest(self, name: str) -> str:
        """The latest value as text; a dash if it was not measured."""
        value = self._history[name][-1]
        return "-" if value is None else number(value)
