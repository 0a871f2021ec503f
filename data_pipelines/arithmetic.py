"""Generates arithmetic word problems with numbers too large for the head, and demonstrations that use Python.

    python -m data_pipelines.arithmetic --out=data/arithmetic --num=4000 --demonstrations=20000

    Oscar packs 287 lemons into each of 46 boxes and has 118 more. How many lemons are there?

Problems of the family "one_step" need one operation, those of "two_step" two. Of the demonstrations of the latter a
part (`early_frac`) answers from the head, with an estimate ("13000"), and is wrong: what reinforcement learning then
has to unlearn in favour of the tool.

Writes, all at once or not at all:

    array_record, TFDS layout   splits train, heldout (numbers never seen together in training) and heldout_templates
                                (wordings never seen, with such numbers)
    full.jsonl, texts.jsonl     whole episodes, and what a tokenizer is trained on

A problem's split follows from its wording and its numbers alone, so problems of any two seeds never cross splits.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import exit_code
from jaxagent.data_pipelines import generated
from jaxagent.data_pipelines.terminal_templates.words import PEOPLE
from jaxagent.envs.python import formats

TRAIN, HELDOUT, HELDOUT_TEMPLATES = "train", "heldout", "heldout_templates"
HELDOUT_FRAC = 0.2
LARGE, SMALL = range(101, 400), range(12, 100)  # a and c; b
_ITEMS = """
acorns apples badges bagels beads berries bottles bricks buttons candles carrots cherries coins eggs figs lemons
marbles mangoes nails olives onions oranges peaches pears pebbles pencils plums ribbons roses shells stamps stones
"""
ITEMS = tuple(_ITEMS.split())
NUMBER_REPEATS = 20  # in the tokenizer's texts: numbers of three digits should be one token
# Kind -> (program with {a}, {b}, {c}; wordings, the last of which is never trained on). {who}, {items}.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "one_step/add": (
        "n = {a} + {c}\nprint(n)",
        (
            "{who} has {a} {items} and buys {c} more. How many {items} are there?",
            "There are {a} {items} here and {c} there. How many {items} are there?",
            "{who} buys {c} {items} and has {a} already. How many {items} are there?",
        ),
    ),
    "one_step/take": (
        "n = {a} - {b}\nprint(n)",
        (
            "{who} has {a} {items} and sells {b} of them. How many are left?",
            "Of {a} {items} {who} takes {b}. How many are left?",
            "{who} sells {b} of {a} {items}. How many are left?",
        ),
    ),
    "one_step/pack": (
        "n = {a} * {b}\nprint(n)",
        (
            "{who} packs {a} {items} into each of {b} boxes. How many {items} are there?",
            "There are {a} {items} in each of {b} boxes. How many {items} are there?",
            "Each of {b} boxes holds {a} {items}. How many {items} are there?",
        ),
    ),
    "two_step/pack_add": (
        "n = {a} * {b}\nprint(n + {c})",
        (
            "{who} packs {a} {items} into each of {b} boxes and has {c} more. How many {items} are there?",
            "There are {a} {items} in each of {b} boxes and {c} more here. How many {items} are there?",
            "Each of {b} boxes holds {a} {items}, and {who} has {c} more. How many {items} are there?",
        ),
    ),
    "two_step/pack_take": (
        "n = {a} * {b}\nprint(n - {c})",
        (
            "{who} packs {a} {items} into each of {b} boxes and sells {c} of them. How many are left?",
            "There are {a} {items} in each of {b} boxes, and {who} takes {c} of them. How many are left?",
            "Each of {b} boxes holds {a} {items}, and {who} sells {c}. How many are left?",
        ),
    ),
    "two_step/add_pack": (
        "n = {a} + {c}\nprint(n * {b})",
        (
            "{who} packs {a} {items} and then {c} more into each of {b} boxes. How many {items} are there?",
            "There are {a} {items} and then {c} more in each of {b} boxes. How many {items} are there?",
            "Each of {b} boxes holds {a} {items} and then {c} more. How many {items} are there?",
        ),
    ),
}


def value(kind: str, a: int, b: int, c: int) -> int:
    """The right answer."""
    return {
        "one_step/add": a + c,
        "one_step/take": a - b,
        "one_step/pack": a * b,
        "two_step/pack_add": a * b + c,
        "two_step/pack_take": a * b - c,
        "two_step/add_pack": (a + c) * b,
    }[kind]


def generate(seed: int) -> Iterator[dict[str, Any]]:
    """Endless stream of rows (`jaxagent.data.rows`), no two problems equal; every kind in turn."""
    seen: set[str] = set()
    for number in itertools.count():
        for kind in KINDS:
            row = draw(kind, random.Random(f"{seed}/{kind}/{number}"))
            if row["id"] not in seen:
                seen.add(row["id"])
                yield row


def draw(kind: str, random_: random.Random) -> dict[str, Any]:
    """One problem."""
    program, wordings = KINDS[kind]
    wording = random_.randrange(len(wordings))
    numbers = {"a": random_.choice(LARGE), "b": random_.choice(SMALL), "c": random_.choice(LARGE)}
    used = [number for name, number in numbers.items() if f"{{{name}}}" in program]
    who = random_.choice(PEOPLE).capitalize()
    prompt = wordings[wording].format(who=who, items=random_.choice(ITEMS), **numbers)
    return {
        "id": f"arithmetic/{hashlib.blake2b(prompt.encode(), digest_size=6).hexdigest()}",
        "prompt": prompt,
        "answers": [str(value(kind, **numbers))],
        "kind": kind,
        "metadata": {
            "program": program.format(**numbers),
            "split": split_of(used, trained=wording < len(wordings) - 1),
        },
    }


def split_of(numbers: Sequence[int], trained: bool) -> str:
    """The split of a problem: held-out numbers are held out of every wording, "" where only the wording would be new.

    So a problem of `heldout_templates` is new in both ways, and one with trained numbers in a new wording is dropped.
    """
    key = ",".join(map(str, sorted(numbers)))
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    if int.from_bytes(digest, "big") < HELDOUT_FRAC * 2**32:
        return HELDOUT if trained else HELDOUT_TEMPLATES
    return TRAIN if trained else ""


def demonstration(row: Mapping[str, Any], style: formats.Format, early_frac: float) -> dict[str, Any]:
    """An episode: one program and the answer it prints, or, for a part of the two-step problems, an estimate at once.

    Which they are depends on the problem alone.
    """
    (answer,) = row["answers"]
    turns = [
        {
            "action": formats.program(style, row["metadata"]["program"]),
            "observation": formats.observation(style, answer),
        }
    ]
    early = row["kind"].startswith("two_step/") and random.Random(f"early/{row['id']}").random() < early_frac
    if early:
        turns, answer = [], estimate(int(answer))
    turns.append({"action": formats.end(style, answer), "observation": ""})
    return {"prompt": row["prompt"], "turns": turns, "id": row["id"], "kind": row["kind"]}


def estimate(number: int) -> str:
    """What a head makes of it: two digits, then noughts; never the number itself."""
    unit = 10 ** max(len(str(abs(number))) - 2, 1)
    rounded = round(number / unit) * unit
    return str(rounded if rounded != number else rounded + unit)


def write(
    folder: Path, num: int, seed: int, num_demonstrations: int, style: formats.Format, early_frac: float = 0.0
) -> None:
    """Writes the dataset described in the module's docstring into `folder`, which must not exist yet.

    Args:
      folder: where it will stand.
      num: problems, all splits together.
      seed: of the draws; the same seed gives the same bytes.
      num_demonstrations: rows of full.jsonl, from training problems: first the dataset's, then further ones.
      style: of the demonstrations.
      early_frac: see `demonstration`.
    """
    stream = (row for row in generate(seed) if row["metadata"]["split"])
    tasks: dict[str, list[dict[str, Any]]] = {TRAIN: [], HELDOUT: [], HELDOUT_TEMPLATES: []}
    for row in itertools.islice(stream, num):
        tasks[row["metadata"]["split"]].append(row)
    if empty := [split for split in tasks if not tasks[split]]:
        raise ConfigError(f"--num={num} is too few for a split {empty[0]}.")
    training = itertools.chain(tasks[TRAIN], (row for row in stream if row["metadata"]["split"] == TRAIN))
    shown = [demonstration(row, style, early_frac) for row in itertools.islice(training, num_demonstrations)]
    texts = generated.as_rows(tokenizer_texts(shown[:2000]))
    generated.write_dataset(folder, tasks, {"full.jsonl": shown, "texts.jsonl": texts})


def tokenizer_texts(shown: list[dict[str, Any]]) -> list[str]:
    """What occurs in episodes, and every number of up to three digits often enough to be one token."""
    numbers = [f"{number:0{width}}" for width in (2, 3) for number in range(10**width)]
    return (
        generated.episode_texts(shown)
        + [*numbers, *(f" {number}" for numbers in (SMALL, LARGE) for number in numbers)] * NUMBER_REPEATS
    )


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return generated.main(write, __doc__, 20_000, "two-step demonstrations that only estimate", argv)


if __name__ == "__main__":
    sys.exit(exit_code(main))
