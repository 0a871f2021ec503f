"""Generates terminal tasks: real command-line work with a verified solution and a test that idle agents fail.

    python -m data_pipelines.terminal --out=data/terminal --num=500 --seed=0         # levels 1 to 3
    python -m data_pipelines.terminal --out=data/laptop --laptop --demonstrations=8000
    python -m data_pipelines.terminal check data/terminal                            # every oracle 1, idle agent 0
    python -m data_pipelines.terminal demonstrations data/terminal --out=full.jsonl  # of the training tasks

Writes, all at once or not at all:

    array_record, TFDS layout   splits train, heldout (parameters never seen in training) and, without --laptop,
                                heldout_templates (whole families never seen)
    full.jsonl, texts.jsonl     with --demonstrations: whole episodes, and what a tokenizer is trained on

A task's split follows from its template and its instruction alone, so tasks of any two seeds never cross splits.
--laptop: ten families of one short command over a vocabulary of 300 words (level 1), and the same followed by a
second one of them (level 2).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import amount, count, exit_code, part
from jaxagent.data.files import splits
from jaxagent.data.sources import load_tasks
from jaxagent.data_pipelines import generated
from jaxagent.data_pipelines.home_workspace import missing_programs
from jaxagent.data_pipelines.terminal_demonstrations import demonstrations
from jaxagent.data_pipelines.terminal_templates.draft import Draft, Draw, to_row
from jaxagent.data_pipelines.terminal_templates.table import HELD_OUT, LAPTOP, TEMPLATES, Template
from jaxagent.data_pipelines.terminal_templates.words import WORDS
from jaxagent.envs import check
from jaxagent.envs.terminal import dialogue

TRAIN, HELDOUT, HELDOUT_TEMPLATES = "train", "heldout", "heldout_templates"
HELDOUT_FRAC = 0.2  # of the instructions of a template that is trained on
WORD_REPEATS = 20  # in the tokenizer's texts: a word should be one token


def generate(seed: int, laptop: bool = False) -> Iterator[dict[str, Any]]:
    """Endless stream of rows (`jaxagent.data.rows`), no two of them equal; every template in turn."""
    templates = LAPTOP if laptop else TEMPLATES
    seen: set[str] = set()
    for round_ in itertools.count():
        for name, template in templates.items():
            row = _fresh(name, template, f"{seed}/{name}/{round_}", seen)
            if row is not None:
                seen.add(row["id"])
                yield row


def split_of(template: str, draft: Draft) -> str:
    """The split that a task belongs to, whatever the seed."""
    if template in HELD_OUT:
        return HELDOUT_TEMPLATES
    digest = hashlib.blake2b(f"{template}\0{draft.instruction}".encode(), digest_size=4).digest()
    return HELDOUT if int.from_bytes(digest, "big") < HELDOUT_FRAC * 2**32 else TRAIN


def write(
    folder: Path,
    num: int,
    seed: int,
    laptop: bool,
    num_demonstrations: int,
    style: dialogue.Style,
    early_done_frac: float = 0.0,
) -> None:
    """Writes the dataset described in the module's docstring into `folder`, which must not exist yet.

    Args:
      folder: where it will stand.
      num: tasks, all splits together.
      seed: of the draws; the same seed gives the same bytes.
      laptop: the narrow distribution.
      num_demonstrations: rows of full.jsonl, from training tasks: first the dataset's, then further ones.
      style: of the demonstrations.
      early_done_frac: demonstrations of two operations that say they have finished after the first.
    """
    stream = generate(seed, laptop)
    tasks: dict[str, list[dict[str, Any]]] = {}
    for row in itertools.islice(stream, num):
        tasks.setdefault(row["metadata"]["split"], []).append(row)
    if TRAIN not in tasks or HELDOUT not in tasks:
        raise ConfigError(f"--num={num} is too few for a train and a heldout split.")
    beside: dict[str, Iterable[Mapping[str, Any]]] = {}
    if num_demonstrations:
        training = itertools.chain(tasks[TRAIN], (row for row in stream if row["metadata"]["split"] == TRAIN))
        shown = list(demonstrations(itertools.islice(training, num_demonstrations), style, early_done_frac))
        beside = {"full.jsonl": shown, "texts.jsonl": generated.as_rows(tokenizer_texts(shown[:2000]))}
    generated.write_dataset(folder, {name: tasks[name] for name in sorted(tasks)}, beside, need_answers=False)


def tokenizer_texts(shown: list[dict[str, Any]]) -> list[str]:
    """What occurs in episodes, and every word often enough to be one token."""
    return generated.episode_texts(shown) + [f"{before}{word}" for word in WORDS for before in (" ", "")] * WORD_REPEATS


def _fresh(name: str, template: Template, key: str, seen: set[str]) -> dict[str, Any] | None:
    """A row that was not there before, or None when the template seems to be exhausted."""
    for attempt in range(20):
        draft = template.make(Draw(f"{key}/{attempt}"))
        row = to_row(draft, name, template.level, split_of(name, draft))
        if row["id"] not in seen:
            return row
    return None


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=("write", "check", "demonstrations"), default="write")
    parser.add_argument("folder", type=Path, nargs="?", help="a dataset (check, demonstrations)")
    parser.add_argument("--out", type=Path, help="what to write; must not exist")
    parser.add_argument("--num", type=count, default=500, help="tasks, all splits together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--laptop", action="store_true", help="short tasks over a small vocabulary")
    parser.add_argument("--demonstrations", type=amount, default=0, help="also write so many")
    parser.add_argument(
        "--style", choices=("plain", "endless", "qwen3_xml"), default="endless", help="of demonstrations"
    )
    parser.add_argument(
        "--early_done_frac", type=part, default=0.0, help="demonstrations of two operations that stop after one"
    )
    parser.add_argument("--jobs", type=count, default=2, help="tasks at once (check)")
    parser.add_argument(
        "--sandbox", default="auto", help="where check runs tasks: auto, names of back ends, or none (plain processes)"
    )
    args = parser.parse_args(argv)
    if args.action == "write" and args.folder is not None:
        parser.error("give the folder as --out")
    if args.action != "write" and args.folder is None:
        parser.error(f"{args.action} needs the folder of a dataset")
    if args.action != "check" and (args.out is None or args.out.exists()):
        parser.error("--out is needed" if args.out is None else f"{args.out} exists; remove it or choose another --out")
    try:
        if args.action == "check":
            if args.sandbox == "none" and (missing := missing_programs()):
                raise ConfigError(f"Generated tasks need programs that are missing here: {', '.join(missing)}.")
            backend = ["plain", "--config.env.sandbox.unsafe=True"] if args.sandbox == "none" else [args.sandbox]
            sandbox = [f"--config.env.sandbox.backend={backend[0]}", *backend[1:]]
            return check.main(["check", str(args.folder), f"--jobs={args.jobs}", *sandbox])
        if args.action == "demonstrations":
            tasks = [
                {"id": t.id, "prompt": t.prompt, "kind": t.kind, "metadata": t.metadata}
                for t in load_tasks(args.folder, TRAIN, False)
            ]
            generated.write_jsonl(args.out, demonstrations(tasks, args.style, args.early_done_frac))
            print(f"wrote {args.out}: {len(tasks)} demonstrations")
            return 0
        write(args.out, args.num, args.seed, args.laptop, args.demonstrations, args.style, args.early_done_frac)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    counts = Counter(f"{split}: {len(load_tasks(args.out, split, False))}" for split in sorted(splits(args.out)))
    print(f"wrote {args.out} ({', '.join(counts)})")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
