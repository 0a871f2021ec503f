"""Logged episodes: `types.Episode` <-> one JSON object per line, with nothing lost that training reads.

In: episodes -> records for `<workdir>/episodes/<name>.jsonl` (written by `run.Run`). Back: files -> checked episodes.
Log-probs are float32 numbers written so that they are read back bit for bit; only `Episode.text`, which is for people,
is left out. Axis letters: T tokens of one trajectory, A its action tokens.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory

EVALUATION = ".eval.jsonl"  # how the names of logs of held-out episodes end: nothing may train on those


@dataclasses.dataclass(frozen=True)
class EpisodeLog:
    """The content of one log, or of several."""

    episodes: Sequence[Episode]
    dropped: int  # last lines that a killed process left unfinished, one per file at most

    def groups(self) -> list[Group]:
        """The attempts at each task, in the order in which tasks first appear."""
        by_task: dict[str, list[Episode]] = {}
        for episode in self.episodes:
            by_task.setdefault(episode.task.id, []).append(episode)
        return [Group(attempts[0].task, tuple(attempts)) for attempts in by_task.values()]


def task_record(task: Task) -> dict[str, Any]:
    """A task as lines of a log have it."""
    return dataclasses.asdict(task) | {"answers": list(task.answers), "metadata": dict(task.metadata)}


def record(episode: Episode, stage: str, step: int) -> dict[str, Any]:
    """One line of a log. Log-probs and versions are written for action tokens only; other tokens have none."""
    return {
        "stage": stage,
        "step": step,
        "task": task_record(episode.task),
        "sample": episode.sample,
        "reward": episode.reward,
        "rewards": dict(episode.rewards),
        "stop_reason": str(episode.stop_reason),
        "turns": episode.turns,
        "metrics": dict(episode.metrics),
        "error": episode.error,
        "trajectories": [
            {
                "tokens": t.tokens.tolist(),
                "kinds": t.kinds.tolist(),
                "turns": t.turns.tolist(),
                "logprobs": t.logprobs[t.action_mask].tolist(),
                "policy_versions": t.policy_versions[t.action_mask].tolist(),
            }
            for t in episode.trajectories
        ],
    }


def read(path: str | Path) -> EpisodeLog:
    """Reads one log, or every log of training episodes in a folder, in the order of their names.

    Raises:
      ConfigError: no such file, no rows, or a malformed row, named by file, row and column.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.glob("*.jsonl") if not f.name.endswith(EVALUATION))
    if not files or not files[0].is_file():
        raise ConfigError(f"No logged episodes at '{path}'. Log some: a stage 'sample', or log_episodes=true.")
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
                episodes.append(_episode(row, where))
    if not episodes:
        raise ConfigError(f"'{path}' holds no complete episode.")
    return EpisodeLog(episodes, dropped)


def _episode(row: Any, where: str) -> Episode:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, got {type(row).__name__}.")
    task = _get(row, "task", dict, where)
    answers = _get(task, "answers", list, f"{where}, task")
    reason = _get(row, "stop_reason", str, where)
    if reason not in list(StopReason):
        raise ConfigError(f"{where}: column 'stop_reason' must be one of {', '.join(StopReason)}, got '{reason}'.")
    return Episode(
        task=Task(
            id=_get(task, "id", str, f"{where}, task"),
            prompt=_get(task, "prompt", str, f"{where}, task"),
            answers=tuple(answers),
            kind=_get(task, "kind", str, f"{where}, task"),
            metadata=_get(task, "metadata", dict, f"{where}, task"),
        ),
        sample=_get(row, "sample", int, where),
        trajectories=tuple(
            _trajectory(t, f"{where}, trajectories[{i}]") for i, t in enumerate(_get(row, "trajectories", list, where))
        ),
        reward=_number(row, "reward", where),
        rewards=_get(row, "rewards", dict, where),
        stop_reason=StopReason(reason),
        turns=_get(row, "turns", int, where),
        metrics=_get(row, "metrics", dict, where),
        error=_get(row, "error", str, where),
    )


def _trajectory(row: Any, where: str) -> Trajectory:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, got {type(row).__name__}.")
    tokens = _integers(row, "tokens", where, 0, 2**31 - 1)
    kinds = _integers(row, "kinds", where, 0, max(TokenKind))
    turns = _integers(row, "turns", where, 0, 2**31 - 1)
    for name, column in (("kinds", kinds), ("turns", turns)):
        if len(column) != len(tokens):
            raise ConfigError(f"{where}: column '{name}' has {len(column)} entries for {len(tokens)} tokens.")
    actions = kinds == TokenKind.ACTION
    logprobs = _get(row, "logprobs", list, where)
    versions = _integers(row, "policy_versions", where, -1, 2**31 - 1)
    for name, column in (("logprobs", logprobs), ("policy_versions", versions)):
        if len(column) != actions.sum():
            raise ConfigError(f"{where}: column '{name}' has {len(column)} entries for {actions.sum()} action tokens.")
    if not all(type(value) in (int, float) and math.isfinite(value) for value in logprobs):
        raise ConfigError(f"{where}: column 'logprobs' must hold finite numbers.")
    every_logprob, every_version = np.zeros(len(tokens), np.float32), np.full(len(tokens), -1, np.int32)
    every_logprob[actions], every_version[actions] = logprobs, versions
    return Trajectory(
        tokens.astype(np.int32), kinds.astype(np.uint8), every_logprob, every_version, turns.astype(np.int32)
    )


def _get(row: Mapping[str, Any], column: str, kind: type, where: str) -> Any:
    value = row.get(column)
    if not isinstance(value, kind) or isinstance(value, bool):
        found = "is missing" if column not in row else f"must be {kind.__name__}, got {type(value).__name__}"
        raise ConfigError(f"{where}: column '{column}' {found}.")
    return value


def _number(row: Mapping[str, Any], column: str, where: str) -> float:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{where}: column '{column}' must be a finite number, got {value!r}.")
    return float(value)


def _integers(row: Mapping[str, Any], column: str, where: str, low: int, high: int) -> np.ndarray:
    values = _get(row, column, list, where)
    if not all(type(value) is int and low <= value <= high for value in values):
        raise ConfigError(f"{where}: column '{column}' must hold integers from {low} to {high}.")
    return np.array(values, np.int64)
