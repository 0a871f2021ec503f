"""A path of the config -> `TaskSource`: a checked, random-access sequence of `types.Task`. No JAX, no TensorFlow.

All rows are looked at once when a source opens, so that a malformed row is an error before any device work and not
after an hour of training. Tasks themselves stay on disk (or in Arrow memory) and are decoded when asked for.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError, DataConfig, nearest
from jaxagent.data import files, rows
from jaxagent.types import Task

TRAIN = "train"
HELD_OUT = ("heldout", "test", "validation", "dev")  # names of the held-out split, the first that exists is taken


class TaskSource(Sequence[Task]):
    """Tasks of one split, by index. Deterministic, thread-safe, picklable: a grain source.

    Attributes:
      name: where it came from, for messages.
      fingerprint: hex digest of every task's content, in order: equal data, equal fingerprint.
    """

    def __init__(self, data: files.Rows, name: str, need_answers: bool):
        """Checks every row of `data`.

        Raises:
          ConfigError: no rows, a malformed row (file, row and column are named), or two rows with one id.
        """
        self.name = name
        self._rows = data
        self._need_answers = need_answers
        if len(data) == 0:
            raise ConfigError(f"{name} has no rows.")
        self.fingerprint = _digest(self._distinct())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Task:  # type: ignore[override]  # slices are not offered
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} tasks, got index {index}.")
        return rows.check(self._rows[index], self._rows.place(index), self._need_answers)

    def __iter__(self) -> Iterator[Task]:
        return (self[i] for i in range(len(self)))

    def place(self, task: Task) -> str:
        """File and row of a task, for messages: looks through the rows. "" = it is none of these."""
        return next((self._rows.place(index) for index, one in enumerate(self) if one == task), "")

    def _distinct(self) -> Iterator[dict[str, Any]]:
        """All tasks as rows; raises ConfigError where one has the id of an earlier one, or cannot be written."""
        seen: dict[str, int] = {}
        for index, task in enumerate(self):
            if task.id in seen:
                place, first = self._rows.place(index), self._rows.place(seen[task.id])
                raise ConfigError(f"{place}: column 'id': {task.id!r} is also the id of {first}.")
            seen[task.id] = index
            yield rows.stored(task, self._rows.place(index))

    def __repr__(self) -> str:
        return f"TaskSource({self.name}, {len(self)} tasks)"


def fingerprint(tasks: Iterable[Task]) -> str:
    """A hex digest of tasks' contents, in order: equal data, equal fingerprint."""
    return _digest(map(rows.to_row, tasks))


def _digest(stored: Iterable[dict[str, Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for row in stored:
        digest.update(repr(row).encode())
    return digest.hexdigest()


def load_tasks(path: str | os.PathLike[str], split: str = "", need_answers: bool = True) -> TaskSource:
    """Opens and checks one split.

    Args:
      path: a TFDS folder; a folder of <split>.parquet / .jsonl / .array_record files; or one such file.
      split: its name; "" takes the only split there is.
      need_answers: refuse rows without a gold answer.

    Raises:
      ConfigError: one line, naming the path, and for a malformed row also row and column.
    """
    path = Path(path)
    found = files.splits(path)
    if not split and len(found) > 1:
        raise ConfigError(f"{path} has several splits: {', '.join(found)}. Name one.")
    name = split or next(iter(found), "")
    if "" in found and path.name.partition(".")[0] == name:  # of the one file "train.jsonl" the split is "train"
        name = ""
    if name not in found:
        if "" in found:
            raise ConfigError(f"{path} is one file without a split '{split}'.")
        raise ConfigError(f"{path} has no split '{split}'. {nearest(split, found)}")
    return TaskSource(files.open_rows(path, name), f"{path}:{name}" if name else str(path), need_answers)


def open_train_and_held_out(
    path: str | os.PathLike[str], data: DataConfig, need_answers: bool = True
) -> tuple[TaskSource, TaskSource]:
    """The two sources of a run.

    Args:
      path: the dataset: `data.source`, or where a built-in one was written.
      data: its `eval_source` says where the held-out tasks are; "" = the held-out split of `path`.
      need_answers: see `load_tasks`.

    Raises:
      ConfigError: as `load_tasks`; also when there are no held-out tasks, or they are the training tasks.
    """
    path = Path(path)
    train = load_tasks(path, TRAIN if TRAIN in files.splits(path) else "", need_answers)
    place = Path(data.eval_source or path)
    found = files.splits(place)
    split = next((name for name in HELD_OUT if name in found), None)
    if split is None and data.eval_source and len(found) == 1:
        split = next(iter(found))
    if split is None:
        raise ConfigError(
            f"{place} has no held-out split ({', '.join(HELD_OUT)}): set data.eval_source to the held-out tasks."
        )
    held_out = load_tasks(place, split, need_answers)
    if held_out.fingerprint == train.fingerprint:
        raise ConfigError(f"data.eval_source: {held_out.name} holds the same tasks as {train.name}.")
    return train, held_out


def corpus_of(path: str | os.PathLike[str]) -> Path | None:
    """The dataset's own passages (corpus.jsonl inside its folder), or None."""
    place = Path(path) / files.CORPUS
    return place if place.is_file() else None
