"""A path of the config -> `TaskSource`: a checked, random-access sequence of `types.Task`. No JAX, no TensorFlow.

All rows are looked at once when a source opens, so that a malformed row is an error before any device work and not
after an hour of training. Tasks themselves stay on disk (or in Arrow memory) and are decoded when asked for.

A stage draws from an endless, shuffled, resumable stream of them (`TaskIterator`), an evaluation from a fixed sample.
The order depends on the seed alone: epoch e is its own permutation of all tasks, so no task is seen twice before every
task was seen once. The position is one integer; it goes into the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxagent.config import ConfigError, DataConfig, nearest
from jaxagent.data import files, rows
from jaxagent.types import Task

TRAIN, HELD_OUT = files.TRAIN, files.HELD_OUT
_BOOKKEEPING = ("split", "index", "idx", "id", "row", "uid", "uuid")  # metadata that say where a row stood
_PUNCTUATION = re.compile(r"[.,](?!\d)|[^\w\s.,+*/<>=^%-]")  # of answers; not of numbers and formulas
_NAMED = 3  # tasks that a message names


class TaskSource(Sequence[Task]):
    """Tasks of one split, by index. Deterministic, thread-safe, picklable: a grain source.

    `fingerprint` is a hex digest of every task's content, in order: equal data, equal fingerprint.
    """

    def __init__(
        self, data: files.Rows, name: str, need_answers: bool, how: rows.Reading = rows.AS_IT_IS, id_prefix: str = "row"
    ):
        """Checks every row of `data`; `need_answers` refuses those without a gold answer.

        The ids of rows without one are "train/0", "train/1", ... where the prefix is "train". Raises ConfigError: no
        rows, a malformed row (file, row and column are named), or two rows with one id.
        """
        self.name = name  # where it came from, for messages
        self._rows, self._need_answers, self._how, self.id_prefix = data, need_answers, how, id_prefix
        self._numbers = range(len(data))  # of the rows that are tasks
        self.left_out: list[str] = []  # what is wrong with rows that are left out
        self.not_json: dict[str, str] = {}  # what JSON cannot hold (bytes) of metadata: name -> one of its values
        if len(data) == 0:
            raise ConfigError(f"{name} has no rows.")
        self.ids: list[str] = []
        self.digests: list[str] = []  # hex digest of each task's content
        # Digests of each task's prompt, of prompt and answers, and of these with its metadata. Prompts and answers are
        # without case and space, answers without punctuation.
        self.contents: list[tuple[bytes, bytes, bytes]] = []
        self.fingerprint = _digest(self._distinct())
        if not self.digests:
            raise ConfigError(f"{name} has no row that is a task: {self.left_out[0]}")

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Task:  # type: ignore[override]  # slices are not offered
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} tasks, got index {index}.")
        return self._task(self._numbers[index])

    def _task(self, number: int) -> Task:
        place = self._rows.place(number)
        made_id = f"{self.id_prefix}/{number}"
        return rows.check(self._rows[number], place, self._need_answers, self._how, made_id, self.not_json)

    def __iter__(self) -> Iterator[Task]:
        return (self[i] for i in range(len(self)))

    def place(self, task: Task) -> str:
        """File and row of a task, for messages: looks through the rows. "" = it is none of these."""
        return next((self._rows.place(self._numbers[i]) for i, one in enumerate(self) if one == task), "")

    def _distinct(self) -> Iterator[bytes]:
        """All tasks as rows' bytes; raises ConfigError where one has the id of an earlier one, or cannot be written."""
        rows_by_id: dict[str, int] = {}
        numbers = []
        for number in range(len(self._rows)):
            try:
                task = self._task(number)
            except rows.LeftOut as error:
                self.left_out.append(str(error))
                continue
            if task.id in rows_by_id:
                place, first = self._rows.place(number), self._rows.place(rows_by_id[task.id])
                raise ConfigError(f"{place}: column 'id': {task.id!r} is also the id of {first}.")
            rows_by_id[task.id] = number
            numbers.append(number)
            row = repr(rows.row_to_store(task, self._rows.place(number))).encode()
            self.ids.append(task.id)
            self.digests.append(hashlib.blake2b(row, digest_size=8).hexdigest())
            self.contents.append(contents_of(task))
            yield row
        if self.left_out:
            self._numbers = numbers

    def __repr__(self) -> str:
        return f"TaskSource({self.name}, {len(self)} tasks)"


def fingerprint(tasks: Iterable[Task]) -> str:
    """A hex digest of tasks' contents, in order: equal data, equal fingerprint."""
    return _digest(repr(rows.to_row(task)).encode() for task in tasks)


def _digest(contents: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for row in contents:
        digest.update(row)
    return digest.hexdigest()


def contents_of(task: Task) -> tuple[bytes, bytes, bytes]:
    """Digests of a task's prompt, of prompt and answers, and of these with its metadata; see `TaskSource.contents`."""
    prompt = " ".join(task.prompt.split()).casefold()
    question = (prompt, *sorted(_PUNCTUATION.sub("", " ".join(one.split()).casefold()) or one for one in task.answers))
    rest = {name: value for name, value in task.metadata.items() if name not in _BOOKKEEPING}
    texts = (prompt, json.dumps(question), json.dumps([question, rest], sort_keys=True, default=str))
    return tuple(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest() for text in texts)  # type: ignore[return-value]


def _check_apart(train: TaskSource, held_out: TaskSource, note: Callable[[str], None]) -> None:
    """Says how many held-out tasks training has; raises ConfigError where it has all.

    Prompt and answers are the content where they tell the training tasks apart. Where several of these have the same
    ones ("Begin.", without an answer), metadata count as well. Other tasks with a training task's prompt are counted
    for themselves, unless all training tasks have one prompt. A world of so few tasks that training itself has some
    several times is not refused.
    """
    questions = Counter(question for _, question, _ in train.contents)
    prompts, contents = {prompt for prompt, _, _ in train.contents}, {content for _, _, content in train.contents}
    same, near = [], []
    for index, (prompt, question, with_metadata) in enumerate(held_out.contents):
        if questions[question] == 1 or (questions[question] and with_metadata in contents):
            same.append(index)
        elif prompt in prompts and len(prompts) > 1:
            near.append(index)
    if len(same) == len(held_out) and len(contents) == len(train):
        raise ConfigError(f"data.eval_source: {held_out.name} holds the same tasks as {train.name}.")
    own_ids = set(train.ids) - {f"{train.id_prefix}/{number}" for number in range(len(train))}
    of_others = sorted({index for index, id in enumerate(held_out.ids) if id in own_ids} - set(same))
    for indices, what in (
        (same, "are training tasks as well"),
        (near, "have the prompt of a training task, with another answer or other metadata"),
        (of_others, "have the id of another training task"),
    ):
        if indices:
            first = ", ".join(held_out.ids[index] for index in indices[:_NAMED])
            note(f"{held_out.name}: {len(indices)} of {len(held_out)} held-out tasks {what}, the first {first}")


def load_tasks(
    path: str | os.PathLike[str], split: str = "", need_answers: bool = True, how: rows.Reading = rows.AS_IT_IS
) -> TaskSource:
    """Opens and checks one split of a file or folder as `files` describes them; "" takes the only split there is.

    Raises ConfigError: one line, naming the path, and for a malformed row also row and column.
    """
    path = Path(path)
    splits = files.splits(path)
    if not split and len(splits) > 1:
        raise ConfigError(f"{path} has several splits: {', '.join(splits)}. Name one.")
    name = split or next(iter(splits), "")
    if "" in splits and path.name.partition(".")[0] == name:  # of the one file "train.jsonl" the split is "train"
        name = ""
    if name not in splits:
        if "" in splits:
            raise ConfigError(f"{path} is one file without a split '{split}'.")
        raise ConfigError(f"{path} has no split '{split}'. {nearest(split, splits)}")
    made = name or path.name.partition(".")[0]
    return TaskSource(files.open_rows(path, name), f"{path}:{name}" if name else str(path), need_answers, how, made)


def open_train_and_held_out(
    path: str | os.PathLike[str],
    data: DataConfig,
    need_answers: bool = True,
    messages: bool = True,
    note: Callable[[str], None] = lambda line: None,
) -> tuple[TaskSource, TaskSource]:
    """The two sources of a run, whose held-out tasks are in `data.eval_source`; "" = the held-out split of `path`.

    `note` is told of rows and columns that are left out, and of held-out tasks that are training tasks. Raises
    ConfigError as `load_tasks`; also when there are no held-out tasks, or all of them are training tasks.
    """
    path = Path(path)
    how = rows.Reading(data.layout, data.columns, messages)
    train = load_tasks(path, TRAIN if TRAIN in files.splits(path) else "", need_answers, how)
    place = Path(data.eval_source or path)
    splits = files.splits(place)
    split = next((name for name in HELD_OUT if name in splits), None)
    if split is None and data.eval_source and len(splits) == 1:
        split = next(iter(splits))
    if split is None:
        raise ConfigError(
            f"{place} has no held-out split ({', '.join(HELD_OUT)}): set data.eval_source to the held-out tasks."
        )
    held_out = load_tasks(place, split, need_answers, how)
    for source in (train, held_out):
        if source.left_out:
            note(f"{source.name}: {len(source.left_out)} rows are left out, the first: {source.left_out[0]}")
        for column, value in source.not_json.items():
            note(f"{source.name}: column '{column}' is left out of the metadata, as JSON cannot hold {value}")
    _check_apart(train, held_out, note)
    return train, held_out


def corpus_of(path: str | os.PathLike[str]) -> Path | None:
    """The dataset's own passages (corpus.jsonl inside its folder), or None."""
    place = Path(path) / files.CORPUS
    return place if place.is_file() else None


class TaskIterator(Iterator[Task]):
    """Tasks without end. Not thread-safe: the loop owns it."""

    def __init__(self, source: TaskSource, seed: int, shuffle: bool):
        self._source = source
        # What decides the order. On resume it must be the same, or `next_index` would mean another task.
        self._identity = {"fingerprint": source.fingerprint, "num_tasks": len(source), "seed": seed, "shuffle": shuffle}
        import grain  # a second

        places = grain.MapDataset.source(range(len(source))).seed(seed)
        if shuffle:
            places = places.shuffle()
        # No read-ahead threads, so the state is exactly the number of tasks handed out.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._places = iter(places.repeat(None).to_iter_dataset(options))

    def __next__(self) -> Task:
        return self._source[int(next(self._places))]

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks, no two alike while there are as many."""
        return [self._source[index] for index in self.take_indices(count)]

    def take_indices(self, count: int) -> list[int]:
        """Where in the source the next `count` tasks are.

        Where one epoch ends and the next begins a task could come twice; its second coming is left out, so that as many
        as there are tasks are all different. Where more are asked for, the same holds of every further so many.
        """
        task_numbers: list[int] = []
        while len(task_numbers) < count:
            distinct: dict[str, int] = {}
            while len(distinct) < min(count - len(task_numbers), len(self._source)):
                index = int(next(self._places))
                distinct.setdefault(self._source[index].id, index)
            task_numbers += distinct.values()
        return task_numbers

    def get_state(self) -> dict[str, Any]:
        """Position and identity, as JSON values."""
        return {"next_index": int(self._places.get_state()["next_index"]), **self._identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position taken with `get_state`. Raises ConfigError for one of other data or another order."""
        for key, mine in self._identity.items():
            if state.get(key) != mine:
                raise ConfigError(
                    f"The checkpoint's task position was taken with {key}={state.get(key)!r}, but {self._source.name} "
                    f"now has {key}={mine!r}. Restore the data, or use a new workdir."
                )
        self._places.set_state({"next_index": int(state["next_index"])})


def further(size: int, count: int, excluded: Collection[int], key: Sequence[int]) -> list[int]:
    """Indices of tasks for a further round of a step: a function of the key, so that the stream stays where it is.

    `count` different ones of `size`, and others than `excluded` of earlier rounds, as long as there are any.
    """
    drawn = np.random.default_rng(key).choice(size, min(size, count + len(excluded)), replace=False).tolist()
    line = [i for i in drawn if i not in excluded] + [i for i in drawn if i in excluded]
    return [line[place % len(line)] for place in range(count)]


def balanced_sample(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """At most `count` tasks, spread evenly over kinds, and over the families of kinds before that.

    "one_hop/capital" is of family "one_hop": with the families one_hop and two_hop, half of the sample is each, and
    inside a family every kind has its equal share, as far as there are enough tasks. Deterministic in (tasks, seed).
    """
    families: dict[str, dict[str, list[Task]]] = {}
    for task in tasks:
        families.setdefault(task.kind.partition("/")[0], {}).setdefault(task.kind, []).append(task)
    rng = random.Random(f"balanced_sample/{seed}")
    lines = []
    for family in sorted(families):
        kinds = [rng.sample(families[family][kind], len(families[family][kind])) for kind in sorted(families[family])]
        lines.append(_alternate(kinds))
    return _alternate(lines)[:count]


def _alternate(lines: Sequence[Sequence[Task]]) -> list[Task]:
    """First of each line, then second of each, ...; lines that have ended are skipped."""
    longest = max(map(len, lines), default=0)
    return [line[i] for i in range(longest) for line in lines if i < len(line)]
