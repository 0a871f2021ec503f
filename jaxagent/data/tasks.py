"""TaskSource -> an endless, shuffled, resumable stream of tasks (through grain), and a fixed sample for evaluation.

The order depends on the seed alone: epoch e is its own permutation of all tasks, so no task is seen twice before
every task was seen once. The position is one integer; it goes into the checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from jaxagent.config import ConfigError
from jaxagent.data.sources import TaskSource
from jaxagent.types import Task


class TaskIterator(Iterator[Task]):
    """Tasks without end. Not thread-safe: the loop owns it."""

    def __init__(self, source: TaskSource, seed: int, shuffle: bool):
        self._source = source
        # What decides the order. On resume it must be the same, or `next_index` would mean another task.
        self._identity = {"fingerprint": source.fingerprint, "num_tasks": len(source), "seed": seed, "shuffle": shuffle}
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
        """Goes to a position taken with `get_state`.

        Raises:
          ConfigError: the state belongs to other data, another seed or another order.
        """
        for key, mine in self._identity.items():
            if state.get(key) != mine:
                raise ConfigError(
                    f"The checkpoint's task position was taken with {key}={state.get(key)!r}, but {self._source.name} "
                    f"now has {key}={mine!r}. Restore the data, or use a new workdir."
                )
        self._places.set_state({"next_index": int(state["next_index"])})


def further(size: int, count: int, excluded: Collection[int], key: Sequence[int]) -> list[int]:
    """Indices of tasks for a further round of a step: a function of the key, so that the stream stays where it is.

    Different ones, and others than `excluded`, as long as there are any.

    Args:
      size: tasks of the source.
      count: of them.
      excluded: indices of earlier rounds.
      key: of the randomness.
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
