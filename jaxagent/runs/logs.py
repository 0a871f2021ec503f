"""`Logs`: what a run writes as it goes. Metrics, evaluation episodes for the report, and whole episodes of stages.

Each is a file of lines, whose position a bundle keeps: what a file holds beyond it is dropped when the run goes on.
Of a trainer's several processes, process 0 writes what all have in common.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.data import episode_log
from jaxagent.learner import peers
from jaxagent.observe.episodes import episode_record
from jaxagent.observe.files import EPISODES_FILE, EPISODES_FOLDER
from jaxagent.observe.jsonl import JsonlLog
from jaxagent.observe.metrics import MetricsWriter
from jaxagent.types import Episode


class Logs:
    """Closed until `open`, which drops what the files hold beyond the bundle."""

    def __init__(self, workdir: Path, host: Mapping[str, Any]):
        self._workdir = workdir
        self._metrics_position = host.get("metrics_position", 0)
        self._shown_position = host.get("episodes_position", 0)
        self._positions: dict[str, int] = dict(host.get("episode_positions", {}))
        self._metrics: MetricsWriter | None = None  # None in a process that does not write
        self._shown: JsonlLog | None = None
        self._named: dict[str, JsonlLog] = {}
        self._stack = contextlib.ExitStack()

    def open(self) -> None:
        """Opens metrics and evaluation episodes, where this process writes them."""
        if not peers.is_first():
            return
        self._metrics = MetricsWriter(self._workdir, self._metrics_position)
        self._stack.callback(self._metrics.close)
        self._shown = JsonlLog(self._workdir / EPISODES_FILE, self._shown_position)
        self._stack.callback(self._shown.close)

    def close(self) -> None:
        """Closes what is open."""
        self._stack.close()

    @property
    def positions(self) -> dict[str, Any]:
        """What a bundle keeps of them."""
        return {
            "metrics_position": self._metrics.position if self._metrics else 0,
            "episodes_position": self._shown.position if self._shown else 0,
            "episode_positions": self._positions,
        }

    def metrics(self, stage: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """One line of metrics.jsonl, and of TensorBoard's events."""
        if self._metrics:
            self._metrics.write(stage, step, metrics)

    def show(self, episodes: Sequence[Episode], token_bytes: Sequence[bytes], stage: str, step: int) -> None:
        """Keeps evaluation episodes, token by token, for the report."""
        for episode in episodes if self._shown else ():
            self._shown.append(episode_record(episode, token_bytes, stage=stage, step=step, split="eval"))

    def keep(self, name: str, step: int, episodes: Iterable[Episode]) -> None:
        """Appends to `episodes/<name>.jsonl`, losslessly (data/episode_log.py)."""
        if not peers.is_first():
            return
        if name not in self._named:
            path = self._workdir / EPISODES_FOLDER / f"{name}.jsonl"
            self._named[name] = JsonlLog(path, self._positions.get(name, 0))
            self._stack.callback(self._named[name].close)
        log = self._named[name]
        log.extend(episode_log.record(episode, name.partition(".")[0], step) for episode in episodes)
        self._positions[name] = log.position
