"""What generated datasets have in common: the files of one, the texts of a tokenizer, and a command line."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import amount, count, part
from jaxagent.data_pipelines.write import write_tasks
from jaxagent.envs.python import formats

# folder, number of tasks, seed, number of demonstrations, their style, how many of them end early
Write = Callable[[Path, int, int, int, formats.Format, float], None]


def write_dataset(
    folder: Path,
    splits: Mapping[str, Iterable[Mapping[str, Any]]],
    beside: Mapping[str, Iterable[Mapping[str, Any]]],
    need_answers: bool = True,
) -> None:
    """Writes tasks and the files beside them, all at once or not at all.

    Args:
      folder: where they will stand; must not exist.
      splits, need_answers: as `write.write_tasks` takes them.
      beside: file name -> JSON lines.
    """
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_tasks(partial, splits, need_answers=need_answers)
        for name, items in beside.items():
            write_jsonl(partial / name, items)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_jsonl(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(item, ensure_ascii=False) + "\n" for item in items)


def episode_texts(shown: Iterable[Mapping[str, Any]]) -> list[str]:
    """Prompts, actions and observations of demonstrations, as they occur."""
    texts = []
    for row in shown:
        parts = [part for turn in row["turns"] for part in (turn["action"], turn["observation"]) if part]
        texts += [row["prompt"], *parts]
    return texts


def as_rows(texts: Iterable[str]) -> Iterable[dict[str, str]]:
    """The lines of texts.jsonl."""
    return ({"text": text} for text in texts)


def finish(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    write: Callable[[argparse.Namespace], None],
    flags: str = "",
) -> int:
    """What the command line of every pipeline does; returns the exit status.

    Args:
      parser: has `--out`, the folder to write.
      argv: without the program's name; None = this process's.
      write: writes the dataset that the parsed arguments ask for.
      flags: that a run on this dataset needs beside its source, with a blank behind them.
    """
    args = parser.parse_args(argv)
    try:
        if args.out.exists():
            raise ConfigError(f"{args.out} exists; remove it or choose another --out")
        write(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {args.out}; train with {flags}--config.data.source={args.out}")
    return 0


def main(write: Write, description: str, num_demonstrations: int, early: str, argv: Sequence[str] | None) -> int:
    """The command line of a pipeline of Python tasks; returns the exit status.

    Args:
      write: writes the dataset.
      description: the pipeline's own docstring.
      num_demonstrations: unless the command says otherwise.
      early: which demonstrations `--early_frac` is about.
      argv: without the program's name; None = this process's.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="what to write; must not exist")
    parser.add_argument("--num", type=count, default=4000, help="tasks, all splits together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=amount, default=num_demonstrations)
    parser.add_argument("--style", choices=tuple(formats.PREFIXES), default="plain", help="of demonstrations")
    parser.add_argument("--early_frac", type=part, default=0.0, help=early)
    return finish(
        parser,
        argv,
        lambda args: write(args.out, args.num, args.seed, args.demonstrations, args.style, args.early_frac),
    )
