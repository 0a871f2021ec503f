"""What a tokenizer is trained on: a dataset's `texts.jsonl`, or else its prompts, answers and passages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.data import files
from jaxagent.types import Task

TEXTS = "texts.jsonl"  # rows {"text": ...} in a dataset's folder
MOST_ROWS = 50_000  # of tasks and of passages, the first ones: more change a vocabulary little and take long


def of_dataset(
    dataset: Path, tasks: Iterable[Task], prompt: Callable[[str], Iterable[str]], corpus: Path | None
) -> Iterator[str]:
    """Yields texts, in an order that depends on the data alone. Raises ConfigError for a malformed row, and names it.

    Of a dataset with a `texts.jsonl` only that is read. `prompt`: a task's prompt -> the texts that the policy is shown
    for it; `corpus`: jsonl of passages.
    """
    if (own := dataset / TEXTS).is_file():
        yield from _column(own, "text")
        return
    for task in itertools.islice(tasks, MOST_ROWS):
        yield from prompt(task.prompt)
        yield from (f" {answer}" for answer in task.answers)  # a word in a sentence, as it is generated
    if corpus is not None and corpus.is_file():
        yield from itertools.islice(_column(corpus, "contents"), MOST_ROWS)


def _column(path: Path, name: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = files.from_json(line, f"{path}, row {number}")
            text = row.get(name) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise ConfigError(f'{path}, row {number}: must be an object with a text "{name}".')
            yield text
