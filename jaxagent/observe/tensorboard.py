"""TensorBoard's events of a run, in its folder: written by the run itself, since they are but a file."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
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


class TensorBoard:
    """Scalars alone, as TensorBoard shows curves."""

    def __init__(self, workdir: Path):
        """Raises OSError, as all of it does: the disk is full, or failed."""
        # Event files cannot be cut: they are written anew from the records that stay.
        shutil.rmtree(workdir / TENSORBOARD_FOLDER, ignore_errors=True)
        (workdir / TENSORBOARD_FOLDER).mkdir()
        # Written by this thread: the library's own writer has one that a full disk ends unseen.
        self._board = EventsWriter(str(workdir / TENSORBOARD_FOLDER / "events"))
        for record in jsonl.read(workdir / METRICS_FILE):
            self._show(record)
        self._flush()

    def record(self, record: Mapping[str, Any]) -> None:
        """Shows one record."""
        self._show(record)
        if time.monotonic() - self._flushed_s >= _FLUSH_S:
            self._flush()

    def ask_to_end(self, finished: bool) -> None:
        """Has nothing to wait for."""

    def end(self, by_s: float) -> None:
        """Writes what is left."""
        self._board.close()

    def _show(self, record: Mapping[str, Any]) -> None:
        event = Event(wall_time=time.time(), step=record["step"])
        for name, value in record.items():
            # A value that is not finite has no place on a curve; in metrics.jsonl it is null.
            if name not in ("stage", "step") and value is not None and math.isfinite(value):
                event.summary.value.extend(scalar(f"{record['stage']}/{name}", float(value)).value)
        self._board.write_event(event)

    def _flush(self) -> None:
        self._flushed_s = time.monotonic()
        self._board.flush()
