"""Metrics of a run: `metrics.jsonl` (the truth) and TensorBoard events (a view of it).

A record is {"stage": str, "step": int, name: number, ...}; names are "topic/what", with units as suffixes.
"""

from __future__ import annotations

import math
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from tensorboardX import SummaryWriter

from jaxagent.observe import jsonl
from jaxagent.observe.files import METRICS_FILE, TENSORBOARD_FOLDER


class MetricsWriter:
    """Writes records to both. `position` goes into the checkpoint and comes back as `position=` on resume."""

    def __init__(self, workdir: str | os.PathLike[str], position: int = 0):
        """Opens the workdir's logs at `position` records; what an interrupted run wrote after it is dropped.

        Raises:
          ConfigError: `metrics.jsonl` holds fewer than `position` records.
        """
        workdir = pathlib.Path(workdir)
        self._log = jsonl.JsonlLog(workdir / METRICS_FILE, position)
        # Event files cannot be cut: they are written anew from the records that stay.
        shutil.rmtree(workdir / TENSORBOARD_FOLDER, ignore_errors=True)
        self._board = SummaryWriter(str(workdir / TENSORBOARD_FOLDER))
        for record in jsonl.read(self._log.path):
            self._show(record)

    @property
    def position(self) -> int:
        """Number of records written since the run's very first start."""
        return self._log.position

    def write(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one record of scalars (Python, NumPy or JAX)."""
        record = {"stage": stage, "step": int(step), **metrics}
        self._log.append(record)
        self._show(record)

    def close(self) -> None:
        """Flushes and closes both; a second call does nothing."""
        self._log.close()
        self._board.close()

    def _show(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            # A value that is not finite has no place on a curve; in metrics.jsonl it is null.
            if name not in ("stage", "step") and value is not None and math.isfinite(value):
                self._board.add_scalar(f"{record['stage']}/{name}", float(value), record["step"])
