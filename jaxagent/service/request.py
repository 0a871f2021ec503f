"""A submission, checked: JSON -> `TaskRequest`. Every mistake is one line that names the field and what it must be."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any, Self
from urllib.parse import urlsplit

from jaxagent.config import ConfigError
from jaxagent.data import codec
from jaxagent.fleet.wire import BadMessageError, json_object
from jaxagent.service import states
from jaxagent.types import Task

TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
NO_NAME = "'%s' must be 1 to 128 letters, digits and .:_-, and begin with a letter or a digit"
MOST_SAMPLES = 1024
MOST_SECONDS = 7 * 24 * 3600.0
# What the server hands to the node's player unread, in the task's metadata.
PASSED_ON = ("runtime", "agent", "builder", "evaluator")
FIELDS = (
    "task_id", "instruction", "task", "num_samples", "first_sample", "dispatch_priority", "timeout_seconds",
    "min_complete_accept_fraction", "early_stop_min_usable_sessions", "callback_url", "metadata", *PASSED_ON,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TaskRequest:
    """A group of sessions of one task."""

    task_id: str  # names the submission; the same id with the same body is the same submission
    task: Task  # what is played
    num_samples: int
    first_sample: int  # the number of the first attempt in its run, by which randomness is keyed
    dispatch_priority: int  # 0 to 100; higher ones go to nodes first
    timeout_s: float  # of an attempt, from INITIALIZING
    agent_timeout_s: float  # of RUNNING
    fraction: float  # min_complete_accept_fraction
    early_stop: int  # usable sessions from which the rest is cancelled; 0 = never
    callback_url: str  # told when the group has ended; "" = nobody
    digest: str  # of the body

    @property
    def needed(self) -> int:
        """Usable sessions from which the group is accepted."""
        return states.needed(self.num_samples, self.fraction)

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Raises BadMessageError."""
        return cls.of(json_object(raw))

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        """From a JSON object. Raises BadMessageError."""
        if unknown := sorted(row.keys() - set(FIELDS)):
            raise BadMessageError(f"there is no field '{unknown[0]}'; a task has {', '.join(FIELDS)}")
        task_id = row.get("task_id")
        if not isinstance(task_id, str) or not TASK_ID.fullmatch(task_id):
            raise BadMessageError(NO_NAME % "task_id")
        metadata = row.get("metadata", {})
        if not isinstance(metadata, dict):
            raise BadMessageError("'metadata' must be an object")
        timeout_s = _number(row, "timeout_seconds", 600.0, 0.001, MOST_SECONDS)
        samples = _whole_number(row, "num_samples", 1, 1, MOST_SAMPLES)
        fraction = _number(row, "min_complete_accept_fraction", 0.0, 0.0, 1.0)
        early = states.early_stop(samples, fraction)
        try:
            canonical = json.dumps(row, sort_keys=True, allow_nan=False)
        except ValueError:  # 1e999 is JSON, and no finite number
            raise BadMessageError("the body has a number that is not finite") from None
        early = _whole_number(row, "early_stop_min_usable_sessions", early, 0, samples)
        if 0 < early < (least := states.needed(samples, fraction)):
            raise BadMessageError(f"'early_stop_min_usable_sessions' is {early}, and acceptance needs {least} sessions")
        return cls(
            task_id=task_id,
            task=_task(row, task_id, metadata),
            num_samples=samples,
            first_sample=_whole_number(row, "first_sample", 0, 0, 2**62),
            dispatch_priority=_whole_number(row, "dispatch_priority", 0, 0, 100),
            timeout_s=timeout_s,
            agent_timeout_s=_number(metadata, "agent_timeout", timeout_s, 0.001, MOST_SECONDS, "metadata."),
            fraction=fraction,
            early_stop=early,
            callback_url=_url(row.get("callback_url", "")),
            digest=hashlib.sha256(canonical.encode()).hexdigest(),
        )


def _task(row: dict[str, Any], task_id: str, metadata: dict[str, Any]) -> Task:
    """What is played: the row's own "task", or one that its instruction makes."""
    sections = {name: row[name] for name in PASSED_ON if name in row}
    if wrong := next((name for name, section in sections.items() if not isinstance(section, dict)), ""):
        raise BadMessageError(f"'{wrong}' must be an object")
    if "task" in row:
        if "instruction" in row:
            raise BadMessageError("a task has 'task' or 'instruction', not both")
        try:
            task = codec.decode_task(row["task"], "'task'")
        except ConfigError as error:
            raise BadMessageError(str(error)) from None
    else:
        instruction = row.get("instruction")
        if not isinstance(instruction, str) or not instruction:
            raise BadMessageError("'instruction' must be a text that is not empty")
        task = Task(task_id, instruction, ())
    return dataclasses.replace(task, metadata={**task.metadata, **metadata, **sections})


def _url(value: Any) -> str:
    if value in ("", None):
        return ""
    parts = urlsplit(value) if isinstance(value, str) and len(value) <= 2000 and value.isprintable() else None
    try:
        good = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        good = False
    if not good:
        raise BadMessageError("'callback_url' must begin with http:// or https:// and name a host")
    return value


def _whole_number(row: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = row.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise BadMessageError(f"'{name}' must be a whole number from {low} to {high}, got {value!r:.40}")
    return value


def _number(row: dict[str, Any], name: str, default: float, low: float, high: float, where: str = "") -> float:
    value = row.get(name, default)
    if type(value) not in (int, float) or not low <= value <= high:  # written so that NaN fails
        raise BadMessageError(f"'{where}{name}' must be a number from {low:g} to {high:g}, got {value!r:.40}")
    return float(value)
