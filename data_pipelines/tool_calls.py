"""Generates requests for one or two invented tools, in ToolRL's form, and demonstrations of how they are called.

    python -m data_pipelines.tool_calls --out=data/tool_calls --num=4000 --demonstrations=8000

    Tools: taxi(place, hour), weather(place, day)
    **Dialogue Records History**
    <user> What will the weather be in Oslo on Friday? And wake me at 7. </user>

A parameter has two names ("city" or "place"), and the list of tools says which one counts. A request's arguments stand
in it as they are. Requests of the family "one_call" need one call, those of "two_calls" two. Demonstrations of the
latter think of the first tool alone, and call it alone, with `--first_only_frac`: what RL then has to unlearn.

Writes, all at once or not at all:

    array_record, TFDS layout   splits train and heldout (requests never seen in training)
    full.jsonl, texts.jsonl     demonstrations, and what a tokenizer is trained on

A task's split follows from its request alone, so tasks of any two seeds never cross splits.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import amount, count, exit_code, part
from jaxagent.data_pipelines import generated
from jaxagent.envs.toolcalls import rows as toolcall_rows

TRAIN, HELDOUT = "train", "heldout"
HELDOUT_FRAC = 0.2
NAMES = {"city": ("city", "place"), "day": ("day", "date"), "hour": ("hour", "time"), "item": ("item", "thing")}
VALUES = {
    "city": [
        "Oslo",
        "Lima",
        "Cairo",
        "Delhi",
        "Tokyo",
        "Paris",
        "Rome",
        "Quito",
        "Accra",
        "Dakar",
        "Minsk",
        "Sofia",
        "Riga",
        "Bern",
        "Doha",
        "Hanoi",
        "Seoul",
        "Lagos",
        "Porto",
        "Turin",
        "Kyoto",
        "Perth",
        "Leeds",
        "Basel",
    ],
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
    "hour": [str(hour) for hour in range(1, 13)],
    "item": [
        "bread",
        "milk",
        "rice",
        "salt",
        "sugar",
        "soap",
        "tea",
        "flour",
        "honey",
        "butter",
        "cheese",
        "coffee",
        "pepper",
        "paper",
        "ink",
        "string",
    ],
}
TOOLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # name -> parameters, wordings
    "weather": (("city", "day"), ("What will the weather be in {city} on {day}?", "On {day}, is it dry in {city}?")),
    "taxi": (("city", "hour"), ("I need a taxi in {city} at {hour}.", "At {hour} a taxi in {city}, please.")),
    "alarm": (("hour",), ("Wake me at {hour}.", "I must be up at {hour}.")),
    "order": (("item", "day"), ("Order {item} for {day}.", "By {day} I want {item}.")),
    "price": (("item", "city"), ("What does {item} cost in {city}?", "In {city}, how much is {item}?")),
    "remind": (("item",), ("Remind me of the {item}.", "I must not forget the {item}.")),
}
LISTED = 3  # tools of a task's list
FAMILIES = {"one_call": 1, "two_calls": 2}
WORD_REPEATS = 20  # in the tokenizer's texts: a value should be one token


@dataclasses.dataclass(frozen=True)
class Draft:
    """One task before it is a row."""

    kind: str
    listed: tuple[str, ...]  # tools, in the list's order
    names: Mapping[str, str]  # parameter -> the name that counts
    calls: tuple[tuple[str, Mapping[str, str]], ...]  # (tool, parameter -> value), in the request's order
    request: str

    @property
    def prompt(self) -> str:
        """What the policy is asked, as `toolcall_rows.prompt` joins its two messages."""
        tools = ", ".join(f"{tool}({', '.join(self.names[p] for p in TOOLS[tool][0])})" for tool in self.listed)
        return toolcall_rows.prompt(f"Tools: {tools}", f"{toolcall_rows.HISTORY}<user> {self.request} </user>\n")

    def answer(self, count: int) -> str:
        """What a policy writes that makes the first so many of the calls."""
        calls = [
            json.dumps({"name": tool, "parameters": {self.names[p]: value for p, value in arguments.items()}})
            for tool, arguments in self.calls[:count]
        ]
        thought = " ".join(tool for tool, _ in self.calls[:count])
        return "\n".join([f"<think> {thought} </think>", "<tool_call>", *calls, "</tool_call>"])

    @property
    def id(self) -> str:
        """Of the row; no two prompts share one."""
        return f"tool_calls/{hashlib.blake2b(self.prompt.encode(), digest_size=6).hexdigest()}"

    @property
    def split(self) -> str:
        """Decided by the request, without the list of tools."""
        digest = hashlib.blake2b(self.request.encode(), digest_size=4).digest()
        return HELDOUT if int.from_bytes(digest, "big") < HELDOUT_FRAC * 2**32 else TRAIN


def generate(seed: int) -> Iterator[Draft]:
    """Endless stream of drafts, no two prompts equal; the families in turn."""
    seen: set[str] = set()
    for number in itertools.count():
        for family, calls in FAMILIES.items():
            drawn = draw(family, calls, random.Random(f"{seed}/{family}/{number}"))
            if drawn.id not in seen:
                seen.add(drawn.id)
                yield drawn


def draw(family: str, count: int, random_: random.Random) -> Draft:
    """One task of so many calls."""
    listed = random_.sample(sorted(TOOLS), LISTED)
    calls, clauses = [], []
    for tool in random_.sample(listed, count):
        parameters, wordings = TOOLS[tool]
        arguments = {parameter: random_.choice(VALUES[parameter]) for parameter in parameters}
        calls.append((tool, arguments))
        clauses.append(random_.choice(wordings).format(**arguments))
    names = {parameter: random_.choice(spellings) for parameter, spellings in NAMES.items()}
    return Draft(f"{family}/{calls[-1][0]}", tuple(listed), names, tuple(calls), " And: ".join(clauses))


def row(draft: Draft) -> dict[str, Any]:
    """The task's row (`jaxagent.data.rows`)."""
    return {"id": draft.id, "prompt": draft.prompt, "answers": [draft.answer(len(draft.calls))], "kind": draft.kind}


def demonstration(draft: Draft, first_only_frac: float) -> dict[str, Any]:
    """An episode. Which two-call requests are answered by one call depends on the task alone."""
    count = len(draft.calls)
    if count > 1 and random.Random(f"first/{draft.id}").random() < first_only_frac:
        count = 1
    turns = [{"action": draft.answer(count), "observation": ""}]
    return {"prompt": draft.prompt, "turns": turns, "id": draft.id, "kind": draft.kind}


def write(folder: Path, num: int, seed: int, num_demonstrations: int, first_only_frac: float = 0.0) -> None:
    """Writes the dataset described in the module's docstring into `folder`, which must not exist yet.

    Args:
      folder: where it will stand.
      num: tasks, both splits together.
      seed: of the draws; the same seed gives the same bytes.
      num_demonstrations: rows of full.jsonl, from training tasks: first the dataset's, then further ones.
      first_only_frac: see `demonstration`.

    Raises:
      ConfigError: `num` is too small for two splits.
    """
    stream = generate(seed)
    tasks: dict[str, list[Draft]] = {TRAIN: [], HELDOUT: []}
    for draft in itertools.islice(stream, num):
        tasks[draft.split].append(draft)
    if not tasks[TRAIN] or not tasks[HELDOUT]:
        raise ConfigError(f"--num={num} is too few for a train and a heldout split.")
    training = itertools.chain(tasks[TRAIN], (draft for draft in stream if draft.split == TRAIN))
    shown = [demonstration(draft, first_only_frac) for draft in itertools.islice(training, num_demonstrations)]
    rows = {split: (row(draft) for draft in tasks[split]) for split in tasks}
    texts = generated.as_rows(tokenizer_texts(shown[:2000]))
    generated.write_dataset(folder, rows, {"full.jsonl": shown, "texts.jsonl": texts})


def tokenizer_texts(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """What occurs in episodes, and every value, behind a blank and behind a quotation mark, as one token."""
    values = [value for values in VALUES.values() for value in values]
    return (
        generated.episode_texts(shown) + [f"{before}{value}" for before in ("", " ") for value in values] * WORD_REPEATS
    )


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="what to write; must not exist")
    parser.add_argument("--num", type=count, default=4000, help="tasks, all splits together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=amount, default=8000)
    parser.add_argument("--first_only_frac", type=part, default=0.0, help="two-call demonstrations with one call")
    return generated.finish(
        parser,
        argv,
        lambda args: write(args.out, args.num, args.seed, args.demonstrations, args.first_only_frac),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
