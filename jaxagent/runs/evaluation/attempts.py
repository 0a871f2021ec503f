"""Attempts at tasks, each played once and kept in a file: what is there is not played again.

Every attempt is keyed by (task, sample), and its randomness by (seed, task, sample): which attempts are missing, and in
which calls they were played, changes none of them. An attempt is on disk as soon as it has ended, so a killed call
loses those in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data import codec, episode_log
from jaxagent.engine.requests import EngineError
from jaxagent.observe import jsonl
from jaxagent.rollout.groups import component
from jaxagent.rollout.workers import Rollout, guarded
from jaxagent.types import Episode, StopReason, Task

ATTEMPTS_FILE = "attempts.jsonl"
Key = tuple[str, int]  # task id, sample


@dataclasses.dataclass(frozen=True)
class ScoredAttempt:
    """What the numbers need of an episode."""

    score: float | None  # None: it failed for reasons outside the policy, and says nothing of it
    stop_reason: str
    turns: int
    action_tokens: int
    task: str = ""  # digest of all that the task says
    error: str = ""  # one line, of one that failed
    cost: float | None = None  # None: the environment counts none, or the attempt failed

    @classmethod
    def of(cls, record: Mapping[str, Any], score: str, cost: str = "") -> ScoredAttempt:
        """From a record of the log; `score` names the component of the verdict, `cost` a counter ("" = none)."""
        failed = StopReason(record["stop_reason"]).is_failure
        value = None if failed else float(component(record["rewards"], score))
        tokens = int(record["metrics"].get("action_tokens", 0))
        error = str(record.get("error", ""))
        spent = float(record["metrics"].get(cost, 0.0)) if cost and not failed else None
        return cls(value, record["stop_reason"], record["turns"], tokens, digest(record["task"]), error, spent)


def digest(task: Mapping[str, Any]) -> str:
    """Of a task as a log has it: prompt, answers, tests, whatever is in it."""
    return hashlib.sha256(json.dumps(task, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


class AttemptLog:
    """The file, and in memory what `ScoredAttempt`s keep of it. Lines are those of data/episode_log.py.

    Attributes:
      attempts: by key; of an attempt that was played again the last.
    """

    def __init__(self, path: Path, score: str, stage: str, step: int, cost: str = ""):
        """Opens `path`, and drops a last line that a killed process left unfinished.

        Raises:
          ConfigError: another process writes it, or a line is no attempt; names file and line.
        """
        self.attempts: dict[Key, ScoredAttempt] = {}
        self._score, self._stage, self._step, self._cost = score, stage, step, cost
        self._log = jsonl.JsonlLog(path, None)
        try:
            for row, record in enumerate(jsonl.read(path), 1):
                try:
                    self._keep(record)
                except (KeyError, TypeError, ValueError) as error:
                    what = f"{type(error).__name__}: {error}"
                    raise ConfigError(f"{path}, line {row}: not an attempt ({what}).") from error
        except ConfigError:
            self.close()
            raise

    def append(self, episode: Episode) -> None:
        """Appends an attempt that has ended; when this returns it is on disk."""
        record = episode_log.record(episode, self._stage, self._step)
        self._log.append(record)
        self._keep(record)

    def check_same(self, tasks: Sequence[Task]) -> None:
        """Raises ConfigError where an attempt is at another task that had the same id, of a dataset made anew, say."""
        now = {task.id: digest(codec.encode_task(task)) for task in tasks}
        for (name, _), attempt in self.attempts.items():
            if now.get(name, attempt.task) != attempt.task:
                raise ConfigError(
                    f"'{self._log.path.parent}' holds attempts at another task '{name}' than the dataset has now: "
                    "set another --out."
                )

    def close(self) -> None:
        """Closes the file."""
        self._log.close()

    def _keep(self, record: Mapping[str, Any]) -> None:
        self.attempts[record["task"]["id"], record["sample"]] = ScoredAttempt.of(record, self._score, self._cost)


async def play(
    todo: Sequence[tuple[Task, int]],
    rollout: Rollout,
    concurrency: int,
    deadline_s: float,
    on_episode: Callable[[Episode], None],
) -> None:
    """Plays attempts, at most `concurrency` at once, and hands over each one when it has ended, in any order.

    `on_episode` is called in a thread of its own, by one call at a time, so that a slow disk stops no other attempt.
    What is not finished after `deadline_s` seconds is dropped; every attempt has a deadline of its own far below it.

    Raises:
      EngineError: generation failed: that is nothing about one attempt. What was handed over before stays.
      OSError: from `on_episode`.
    """
    rest, writing = iter(todo), asyncio.Lock()

    async def work() -> None:
        for task, sample in rest:  # shared by all workers: each takes the next attempt
            episode = await guarded(rollout, task, sample)
            if episode.stop_reason is StopReason.ENGINE_ERROR:
                raise EngineError(episode.error)
            async with writing:
                await asyncio.to_thread(on_episode, episode)

    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as workers:
                for _ in range(min(concurrency, len(todo))):
                    workers.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
