"""GSM8K's own files -> one TFDS/array_record dataset with a train and a test split (Cobbe et al., arXiv 2110.14168).

    python -m data_pipelines.gsm8k --train=train.jsonl --test=test.jsonl --out=data/gsm8k

Then `--config.data.source=data/gsm8k`. Input rows are {"question", "answer"}; an answer is a solution with calculator
annotations, and ends with the number:

    Natalia sold 48/2 = <<48/2=24>>24 clips in May. ...
    #### 72

The number becomes the gold answer, without commas; the task's kind says how many calculations the solution has.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import exit_code
from jaxagent.data import files
from jaxagent.rewards import maths

MARK = "####"
_ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")


def to_row(raw: Any, split: str, index: int) -> dict[str, Any]:
    """A raw row as a task row.

    Returns:
      {"id", "prompt", "answers": [number], "kind": "gsm8k/<n>_calculations", "metadata": {"solution": the text without
      annotations, "calculations": ["48/2=24", ...]}}.

    Raises:
      ValueError: naming the column.
    """
    texts = {}
    for column in ("question", "answer"):
        value = raw.get(column) if isinstance(raw, Mapping) else None
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"column '{column}': must be text, got {str(value)[:60]!r}")
        texts[column] = value.strip()
    solution, mark, number = texts["answer"].rpartition(MARK)
    number = number.strip()
    if not mark or maths.parse_number(number) is None:
        raise ValueError(f"column 'answer': must end with '{MARK} number', got {texts['answer'][-40:]!r}")
    calculations = [f"{left}={right}" for left, right in _ANNOTATION.findall(solution)]
    if not solution.count("<<") == solution.count(">>") == len(calculations):
        raise ValueError("column 'answer': a calculator annotation is not <<calculation=result>>")
    return {
        "id": f"gsm8k/{split}/{index}",
        "prompt": texts["question"],
        "answers": [number.replace(",", "")],
        "kind": f"gsm8k/{len(calculations)}_calculations",
        "metadata": {"solution": _ANNOTATION.sub("", solution).strip(), "calculations": calculations},
    }


def read(path: Path, split: str) -> Iterator[dict[str, Any]]:
    """The task rows of a .jsonl or .parquet file.

    Raises:
      ConfigError: no such file, or a malformed row, named by file, row and column.
    """
    data = files.open_rows(path, "")
    for index in range(len(data)):
        try:
            yield to_row(data[index], split, index)
        except ValueError as error:
            raise ConfigError(f"{data.place(index)}: {error}.") from None


def build(train: Path, test: Path, out: Path, progress: Callable[[str, int], None]) -> dict[str, int]:
    """Writes the dataset at `out`; rows per split.

    Raises:
      ConfigError: as `read`; or an empty split.
    """
    from jaxagent.data_pipelines import write  # imports TFDS: not for --help

    splits = {"train": read(train, "train"), "test": read(test, "test")}
    return write.write_tasks(out, splits, description="GSM8K with numbers as answers.", progress=progress)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for a mistake of the user's, told in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m data_pipelines.gsm8k",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the dataset; an older one is replaced")
    args = parser.parse_args(argv)
    try:
        counts = build(args.train, args.test, args.out, lambda split, count: None)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    said = ", ".join(f"{split}: {count:,} problems" for split, count in counts.items())
    print(f"{said}; written to {args.out}, train with --config.data.source={args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
