"""Open-domain questions as Search-R1 trains on them -> one TFDS/array_record dataset with a train and a test split.

    python -m data_pipelines.nq_hotpotqa --train=train.parquet --test=test.parquet --out=data/nq_hotpotqa
    python -m data_pipelines.nq_hotpotqa --train=nq=nq/train.jsonl --train=hotpotqa=hotpotqa/train.jsonl \\
        --test=hotpotqa=hotpot_dev_v1_simplified.json --out=data/nq_hotpotqa

Then `--config.data.source=data/nq_hotpotqa --config.stages=rl`. The passages are indexed by `data_pipelines.corpus`.
Inputs, freely mixed:
  .parquet  Search-R1's files (data_source, prompt, reward_model, extra_info; columns checked in jaxagent/data/rows.py)
  .jsonl    FlashRAG's raw sets ({"id", "question", "golden_answers"})
  .json     one list of {"question", "answer": text or [text]}: HotpotQA's own release and copies of it
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import amount, exit_code
from jaxagent.data import files, rows

# AgentFlow's copies of the test sets end every question with an instruction for its own agent, from here on.
_APPENDED_INSTRUCTION = "When ready, output the final answer enclosed in"


@dataclasses.dataclass(frozen=True)
class Input:
    """One `--train` or `--test` argument: a file, and the name of the set it holds ("" = the rows say it)."""

    path: Path
    data_source: str

    @classmethod
    def parse(cls, argument: str) -> Input:
        """Reads "PATH" or "NAME=PATH"."""
        name, equals, path = argument.partition("=")
        return cls(Path(path), name) if equals and "/" not in name else cls(Path(argument), "")


class Reader:
    """Yields the good rows of inputs in our own layout, and keeps count of what was left out."""

    def __init__(self, skip_malformed: bool, max_rows_per_source: int):
        self._skip = skip_malformed
        self._max = max_rows_per_source
        self.kept: Counter[str] = Counter()  # rows per data source
        self.problems: list[str] = []  # one line per malformed row that was skipped

    def read(self, inputs: Sequence[Input], split: str) -> Iterator[dict[str, Any]]:
        """Yields task rows of a split.

        Raises:
          ConfigError: a malformed row, named by file, row and column (unless they are skipped).
        """
        for source in inputs:
            data = files.open_rows(source.path, "")
            for index in range(len(data)):
                try:
                    task = rows.check(_named(data[index], source.data_source, split, index), data.place(index), True)
                    row = rows.row_to_store(task, data.place(index))
                except ConfigError as error:
                    if not self._skip:
                        raise
                    self.problems.append(str(error))
                    continue
                if self._max and self.kept[task.kind] == self._max:
                    continue
                self.kept[task.kind] += 1
                yield row


def build(
    train: Sequence[Input],
    test: Sequence[Input],
    out: Path,
    skip_malformed: bool,
    max_test_rows_per_source: int,
    progress: Callable[[str, int], None],
) -> dict[str, Reader]:
    """Writes the dataset at `out`. Returns what each split's reader kept and skipped.

    Raises:
      ConfigError: a missing file, a malformed row, two rows with one id, or an empty split.
    """
    from jaxagent.data_pipelines import write  # imports TFDS: not for --help

    readers = {"train": Reader(skip_malformed, 0), "test": Reader(skip_malformed, max_test_rows_per_source)}
    splits = {"train": readers["train"].read(train, "train")}
    if test:
        splits["test"] = readers["test"].read(test, "test")
    write.write_tasks(out, splits, description="Open-domain questions in Search-R1's selection.", progress=progress)
    return readers


def _named(row: Any, data_source: str, split: str, index: int) -> Any:
    """The row with the columns that its file leaves to the file's name: data source and id."""
    if not isinstance(row, Mapping) or "reward_model" in row:
        return row
    row = dict(row)
    if "answer" in row and "golden_answers" not in row:
        row["golden_answers"] = [row["answer"]] if isinstance(row["answer"], str) else row["answer"]
        row["id"] = row.get("_id") or f"{split}_{index}"
        row = {name: row[name] for name in ("id", "question", "golden_answers") if name in row}  # without paragraphs
        if isinstance(row.get("question"), str):
            row["question"] = row["question"].partition(_APPENDED_INSTRUCTION)[0]
    if data_source:
        row["data_source"] = data_source
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a mistake of the user's, told in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m data_pipelines.nq_hotpotqa",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    file = dict(type=Input.parse, action="append", metavar="[NAME=]FILE")
    parser.add_argument("--train", required=True, help="training questions; may be given again", **file)
    parser.add_argument("--test", default=[], help="held-out questions; may be given again", **file)
    parser.add_argument("--out", required=True, type=Path, help="folder of the dataset; an older one is replaced")
    parser.add_argument(
        "--max_test_rows_per_source", type=amount, default=0, help="first rows of each test set; 0 = all"
    )
    parser.add_argument("--skip_malformed", action="store_true", help="leave malformed rows out and count them")
    args = parser.parse_args(argv)

    from rich.console import Console  # not for --help

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with console.status("reading") as status:
            readers = build(
                args.train,
                args.test,
                args.out,
                args.skip_malformed,
                args.max_test_rows_per_source,
                lambda split, count: status.update(f"{split}: {count:,} rows"),
            )
    except ConfigError as error:
        console.print(f"error: {error}", soft_wrap=True, markup=False)
        return 2
    for split, reader in readers.items():
        kept = ", ".join(f"{name or 'unnamed'} {count:,}" for name, count in sorted(reader.kept.items()))
        console.print(f"{split}: {sum(reader.kept.values()):,} rows ({kept})" if kept else f"{split}: not asked for")
        if reader.problems:
            console.print(
                f"  {len(reader.problems):,} malformed rows left out; the first: {reader.problems[0]}", markup=False
            )
    console.print(f"written to {args.out}; train with --config.data.source={args.out} --config.stages=rl", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
