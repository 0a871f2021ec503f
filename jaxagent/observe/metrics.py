"""Metrics of a run: `metrics.jsonl` (the truth) and TensorBoard events (a view of it).

A record is {"stage": str, "step": int, name: number, ...}; names are "topic/what", with units as suffixes.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxagent.hidden import hidden
from jaxagent.observe import jsonl
from jaxagent.observe.files import METRICS_FILE, TENSORBOARD_FOLDER

# It loads torch where that is installed, two seconds of every process's start, and nothing here is a tensor of torch.
with hidden("torch"):
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.summary import scalar

_FLUSH_S = 30.0  # after which TensorBoard sees a record at the latest, when another one follows


class MetricsWriter:
    """Writes records to both logs. Checkpoints keep `position`, and a resumed run passes it to `__init__`."""

    def __init__(self, workdir: str | os.PathLike[str], position: int = 0):
        """Opens the workdir's logs at `position` records; what an interrupted run wrote after it is dropped."""
        workdir = pathlib.Path(workdir)
        self._log = jsonl.JsonlLog(workdir / METRICS_FILE, position)
        # Event files cannot be cut: they are written anew from the records that stay.
        shutil.rmtree(workdir / TENSORBOARD_FOLDER, ignore_errors=True)
        (workdir / TENSORBOARD_FOLDER).mkdir()
        # Written by this thread: the library's own writer has one that a full disk ends unseen.
        self._board = EventsWriter(str(workdir / TENSORBOARD_FOLDER / "events"))
        self._flushed_s = time.monotonic()
        for record in jsonl.read(self._log.path):
            self._show(record)
        self._flush()

    @property
    def position(self) -> int:
        """Number of records written since the run's very first start."""
        return self._log.position

    def write(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one record of scalars (Python, NumPy or JAX)."""
        record = {"stage": stage, "step": int(step), **metrics}
        self._log.append(record)
        self._show(record)
        if time.monotonic() - self._flushed_s >= _FLUSH_S:
            self._flush()

    def close(self) -> None:
        """Flushes and closes both logs; a second call does nothing."""
        self._log.close()
        with contextlib.suppress(OSError, ValueError):  # a view, written anew when the run goes on; closed already
            self._board.close()

    def _show(self, record: Mapping[str, Any]) -> None:
        event = Event(wall_time=time.time(), step=record["step"])
        for name, value in record.items():
            # A value that is not finite has no place on a curve; in metrics.jsonl it is null.
            if name not in ("stage", "step") and value is not None and math.isfinite(value):
                event.summary.value.extend(scalar(f"{record['stage']}/{name}", float(value)).value)
        with self._full_disk():
            self._board.write_event(event)

    def _flush(self) -> None:
        self._flushed_s = time.monotonic()
        with self._full_disk():
            self._board.flush()

    @contextlib.contextmanager
    def _full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            folder = self._log.path.parent / TENSORBOARD_FOLDER
            raise OSError(error.errno, error.strerror, str(folder)) from error
