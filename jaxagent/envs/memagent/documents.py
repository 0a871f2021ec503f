"""What a task's context is: a text in its row, or documents of a file, of which the row has only the numbers.

    metadata = {"context": "Document 1:\\n..."}                                        # a text
    metadata = {"documents": [4, 17], "pool": [0, 90000], "num_docs": 200}             # lines of documents.jsonl

A context of documents holds the task's own and others of its pool, in random order. Which others is keyed by the task's
id alone, and more documents add to fewer: one data set serves every length, and a task is some numbers however long its
context is. Documents stay on disk and are read when an attempt begins.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.types import Task

HEADER_BYTES = 32  # at most of what stands before a document in a context, as "Document 17:"
FILE = "documents.jsonl"  # of a dataset's folder: {"text": ...} per line


class Documents:
    """Texts of a file by line number from 0; only the offsets of its lines are in memory. Raises ConfigError."""

    def __init__(self, path: Path):
        self._path = path
        try:
            with path.open("rb") as file:
                ends = np.fromiter(itertools.accumulate(map(len, file)), np.int64)
        except OSError as error:
            raise ConfigError(f"Tasks have 'documents', and {path} cannot be read: {error.strerror}.") from None
        self._starts = np.concatenate((np.zeros(1, np.int64), ends))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def bytes(self, first: int, end: int) -> int:
        """The bytes of the lines from `first` to before `end`."""
        return int(self._starts[end] - self._starts[first])

    def texts(self, numbers: Sequence[int]) -> list[str]:
        """The texts of some lines, in their order."""
        with self._path.open("rb") as file:
            return [self._read(file, number) for number in numbers]

    def _read(self, file: Any, number: int) -> str:
        start, end = int(self._starts[number]), int(self._starts[number + 1])
        file.seek(start)
        place = f"{self._path}, row {number + 1}"
        try:
            row = json.loads(file.read(end - start))
        except ValueError as error:
            raise ConfigError(f"{place}: not JSON ({error}).") from None
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{place}: column 'text' must be text that is not empty.")
        return text


def numbered(texts: Sequence[str]) -> str:
    """A context as published: numbered documents with an empty line between them."""
    return "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(texts, 1))


def check(task: Task, documents: Documents | None, num_docs: int, length_tokens: int) -> None:
    """Looks at a task's context. Raises ConfigError: it is of neither kind; or it has not as many documents as are
    wanted; or its pool surely ends before the length. `tasks_with_short_pools` counts tokens, and knows of more."""
    metadata = task.metadata
    if "documents" not in metadata:
        if not isinstance(metadata.get("context"), str) or not metadata["context"].strip():
            raise ConfigError(f"Task '{task.id}': column 'metadata' must have a 'context' or 'documents'.")
        if num_docs or length_tokens:
            raise ConfigError(
                f"Task '{task.id}' brings its context as one text: env.num_docs and env.length_tokens, which choose "
                "documents, must be 0."
            )
        return
    assert documents is not None
    own: Any = metadata["documents"]
    pool: Any = metadata.get("pool")
    if not _numbers(own) or not own or not 0 <= min(own) <= max(own) < len(documents) or len(set(own)) < len(own):
        raise ConfigError(
            f"Task '{task.id}': column 'metadata.documents' must be different line numbers of {FILE}, from 0 to "
            f"{len(documents) - 1}, got {own!r:.80}."
        )
    if not _numbers(pool) or len(pool) != 2 or not 0 <= pool[0] <= pool[1] <= len(documents):
        raise ConfigError(
            f"Task '{task.id}': column 'metadata.pool' must be two line numbers of {FILE}, [first, behind the last], "
            f"got {pool!r:.80}."
        )
    if length_tokens:
        _check_long(task, documents, length_tokens)
        return
    count = num_docs or metadata.get("num_docs", len(own))
    available = pool[1] - pool[0] + sum(not pool[0] <= number < pool[1] for number in own)
    if type(count) is not int or not len(own) <= count <= available:
        field = "env.num_docs" if num_docs else "metadata.num_docs"
        raise ConfigError(
            f"Task '{task.id}' has {len(own)} documents of its own and {available} with its pool: {field}={count!r} is "
            "not between."
        )


def texts_of_context(
    task: Task, documents: Documents, num_docs: int, length_tokens: int, tokens: Callable[[str], int]
) -> list[str]:
    """The texts of a task's context, in their order.

    Args:
      task: with "documents"; see `check`.
      documents: the file.
      num_docs: how many; 0 = as the task says.
      length_tokens: if not 0, as many as a context of so many tokens holds, and the task's own in any case.
      tokens: counts a text's.
    """
    own = list(task.metadata["documents"])
    numbers = list(own)
    others = _others(task)
    if length_tokens:
        texts = documents.texts(own)
        token_count = sum(tokens(_part(i, text)) for i, text in enumerate(texts, 1))
        for number in others:
            (text,) = documents.texts([number])
            token_count += tokens(_part(len(texts) + 1, text))
            if token_count > length_tokens:
                break
            numbers.append(number)
            texts.append(text)
    else:
        numbers += itertools.islice(others, (num_docs or task.metadata.get("num_docs", len(own))) - len(own))
    random.Random(f"order/{task.id}/{len(numbers)}").shuffle(numbers)
    return documents.texts(numbers)


def tasks_with_short_pools(
    tasks: Sequence[Task], documents: Documents, length_tokens: int, tokens: Callable[[str], int]
) -> list[Task]:
    """The tasks whose pools end before the length, by so much that another document of their mean size would fit."""
    sizes: dict[int, int] = {}
    pools: dict[tuple[int, int], int] = {}

    def size(number: int) -> int:
        if number not in sizes:
            (text,) = documents.texts([number])
            sizes[number] = tokens(_part(number + 1, text))
        return sizes[number]

    def of_pool(first: int, end: int) -> int:
        if (first, end) not in pools:
            sums = itertools.accumulate(map(size, range(first, end)), initial=0)
            total = 0
            for total in sums:
                if total > length_tokens:
                    break  # it is long enough: the rest is not read
            pools[first, end] = total
        return pools[first, end]

    def is_short(task: Task) -> bool:
        first, end = task.metadata["pool"]
        total = of_pool(first, end)
        if total > length_tokens:
            return False
        apart = [number for number in task.metadata["documents"] if not first <= number < end]
        total += sum(map(size, apart))
        return total + total / (end - first + len(apart)) <= length_tokens

    return [task for task in tasks if is_short(task)]


def _check_long(task: Task, documents: Documents, length_tokens: int) -> None:
    """Raises ConfigError where pool and own documents have fewer bytes than the length has tokens."""
    first, end = task.metadata["pool"]
    apart = [number for number in task.metadata["documents"] if not first <= number < end]
    available = documents.bytes(first, end) + sum(documents.bytes(number, number + 1) for number in apart)
    if available + HEADER_BYTES * (end - first + len(apart)) < length_tokens:
        raise ConfigError(
            f"Task '{task.id}' has a pool that ends before env.length_tokens={length_tokens}: its documents have "
            f"{available} bytes in {FILE}. Set a shorter length, or bring more documents."
        )


def _others(task: Task) -> Iterator[int]:
    """Numbers of the pool that are not the task's own, each once, in an order of the task."""
    first, end = task.metadata["pool"]
    excluded = set(task.metadata["documents"])
    remaining = end - first - sum(first <= number < end for number in excluded)
    rng = random.Random(f"documents/{task.id}")
    while remaining > 0:
        number = rng.randrange(first, end)
        if 4 * remaining < end - first:  # most are taken: shuffle what is left, drawing would go on for long
            rest = [n for n in range(first, end) if n not in excluded]
            rng.shuffle(rest)
            yield from rest
            return
        if number not in excluded:
            excluded.add(number)
            remaining -= 1
            yield number


def _part(number: int, text: str) -> str:
    """A document with what stands before it: so it has as many tokens as in the whole context, nearly."""
    return f"\n\nDocument {number}:\n{text}"


def _numbers(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(type(n) is int for n in value)
