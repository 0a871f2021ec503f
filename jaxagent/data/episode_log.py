"""Episodes as lines: one JSON object each, as data/codec.py writes it, with the stage and the step.

Attempts of evaluations are kept so, and what a stage learns from may be brought so; a run's own episodes are kept by
observe/episode_store.py, and were kept so by earlier versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data import codec
from jaxagent.types import Episode, Group

EVALUATION = ".eval"  # how the names of logs of held-out episodes end: nothing may train on those


def by_task(episodes: Iterable[Episode]) -> list[Group]:
    """The attempts at each task, in the order in which tasks first appear."""
    attempts_by_id: dict[str, list[Episode]] = {}
    for episode in episodes:
        attempts_by_id.setdefault(episode.task.id, []).append(episode)
    return [Group(attempts[0].task, tuple(attempts)) for attempts in attempts_by_id.values()]


def record(episode: Episode, stage: str, step: int) -> dict[str, Any]:
    """One line of a log."""
    return {"stage": stage, "step": step, **codec.encode_episode(episode)}


def read(path: str | Path) -> tuple[list[Episode], int]:
    """The episodes of one log, or of every log of training episodes in a folder, in the order of their names.

    The number is that of last lines that a killed process left unfinished, one per file at most: they are left out.

    Raises ConfigError: no such file, no rows, or a malformed row, named by file, row and column.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.glob("*.jsonl") if not f.stem.endswith(EVALUATION))
    if not files or not files[0].is_file():
        raise ConfigError(f"No logged episodes at '{path}'. Log some: a stage 'sample', or episodes.learn=true.")
    episodes: list[Episode] = []
    dropped = 0
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file}, row {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    if line.endswith(b"\n"):
                        raise ConfigError(f"{where}: not JSON ({error}).") from error
                    dropped += 1  # only a file's last line can lack its end: the process was killed while it wrote
                    continue
                episodes.append(codec.decode_episode(row, where))
    if not episodes:
        raise ConfigError(f"'{path}' holds no complete episode.")
    return episodes, dropped
