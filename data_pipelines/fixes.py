"""Generates small broken repositories with an issue and a hidden test, and demonstrations of how they are mended.

    python -m data_pipelines.fixes --out=data/fixes --num=4000 --demonstrations=8000

    In oak.py cedar(x) must give x - 37.

A repository is one module of three functions of one line, one of which is wrong in one place:

    flip     the operator is the opposite one                      x + 37
    bound    a limit is taken in that should not be, or left out   x <= 37 for x < 37
    number   the constant is another                               x - 73
    name     another function is called                            fig(x) - 37 for elm(x) - 37

The issue says what the function must give, and only the code says what it gives. An agent that looks can always mend it
by one `sed`; one that repairs from its head has to assume a mistake, and most demonstrations assume a flipped operator,
without looking: right in a quarter of the tasks. The hidden test calls all three functions.

Writes, all at once or not at all:

    array_record, TFDS layout   splits train and heldout (issues never seen in training)
    full.jsonl, texts.jsonl     whole episodes, and what a tokenizer is trained on

A task's split follows from its issue alone, so tasks of any two seeds never cross splits.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import hashlib
import itertools
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import amount, count, exit_code, part
from jaxagent.data_pipelines import generated
from jaxagent.data_pipelines.terminal_templates.words import WORDS
from jaxagent.envs.terminal import dialogue

TRAIN, HELDOUT = "train", "heldout"
KEY = "coding"  # of a row's metadata
HELDOUT_FRAC = 0.2
KINDS = ("flip", "bound", "number", "name")
NUMBERS = range(11, 100)
TESTED = range(-120, 220)  # arguments among which the hidden test chooses; every mistake shows at one of them
NUM_TESTS = 2  # of each kind: arguments at which the mistake shows, others, and for each other function
WORD_REPEATS = 20  # in the tokenizer's texts: a word should be one token
WORDINGS = (
    "In {module}.py {name}(x) must give {right}.",
    "Mend {name}(x) of {module}.py: it should be {right}.",
    "The result of {name}(x) in {module}.py has to be {right}.",
)
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub,
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip
FLIPPED = {"+": "-", "-": "+", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
BOUND = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}


@dataclasses.dataclass(frozen=True)
class Expression:
    """`x + 37` or `elm(x) + 37`."""

    called: str  # a function of the module, or ""
    operator: str
    number: int

    def __str__(self) -> str:
        """As Python has it."""
        return f"{self.called}(x) {self.operator} {self.number}" if self.called else f"x {self.operator} {self.number}"


@dataclasses.dataclass(frozen=True)
class Draft:
    """One task before it is a row."""

    kind: str
    wording: int
    module: str
    name: str  # of the function that is wrong
    right: Expression
    wrong: Expression
    others: Mapping[str, Expression]  # the two that are right, which call nothing
    position: int  # of the wrong function among the three

    @property
    def issue(self) -> str:
        """What the policy is asked for."""
        return WORDINGS[self.wording].format(name=self.name, module=self.module, right=self.right)

    def source(self, mended: bool) -> str:
        """The module, broken or mended."""
        functions = list(self.others.items())
        functions.insert(self.position, (self.name, self.right if mended else self.wrong))
        return "\n\n".join(f"def {name}(x):\n    return {body}\n" for name, body in functions)

    def value(self, body: Expression, x: int) -> int:
        """What a function of the module with this body gives, computed beside Python's own reading of the text."""
        left = self.value(self.others[body.called], x) if body.called else x
        return OPERATORS[body.operator](left, body.number)

    def shows(self) -> list[int]:
        """The arguments at which the mistake makes a difference."""
        return [x for x in TESTED if self.value(self.right, x) != self.value(self.wrong, x)]

    def test(self) -> str:
        """The hidden test: a program that ends with status 0 if all three functions are right. It has nothing but
        comparisons with constants, so that the judge need not run it: it compares the values outside the sandbox."""
        random_, shows = random.Random(self.issue), self.shows()
        arguments = random_.sample(shows, min(NUM_TESTS, len(shows))) + random_.sample(TESTED, NUM_TESTS)
        calls = [(self.name, self.right, x) for x in arguments]
        calls += [(name, body, x) for name, body in self.others.items() for x in random_.sample(TESTED, NUM_TESTS)]
        lines = [f"assert {self.module}.{name}({x}) == {self.value(body, x)}" for name, body, x in calls]
        head = [
            "import sys",
            "",
            'sys.path.insert(0, "")  # the directory that it is started in',
            f"import {self.module}",
        ]
        return "\n".join([*head, "", *lines]) + "\n"

    def patch(self) -> str:
        """The change that mends the repository."""
        path = f"{self.module}.py"
        before, after = (self.source(mended).splitlines(keepends=True) for mended in (False, True))
        return f"diff --git a/{path} b/{path}\n" + "".join(
            difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
        )


def look(draft: Draft) -> str:
    """The command that shows the wrong function."""
    return f"grep -A1 'def {draft.name}(' {draft.module}.py"


def repair(draft: Draft, assumed: Expression) -> str:
    """The command that puts the right expression where the assumed one stands."""
    return f"sed -i 's/return {assumed}/return {draft.right}/' {draft.module}.py"


def draw(kind: str, random_: random.Random) -> Draft:
    """A draft of one kind; everything else is equally likely."""
    name, module, *helpers = random_.sample(WORDS, 4)
    number, *numbers = random_.sample(NUMBERS, 3)
    others = {helper: Expression("", random_.choice("+-"), own) for helper, own in zip(helpers, numbers, strict=True)}
    called = random_.choice(helpers) if kind == "name" or random_.random() < 0.5 else ""
    right = Expression(called, random_.choice(tuple(BOUND if kind == "bound" else OPERATORS)), number)
    return Draft(
        kind=kind,
        wording=random_.randrange(len(WORDINGS)),
        module=module,
        name=name,
        right=right,
        wrong=_broken(kind, right, helpers, numbers, random_),
        others=others,
        position=random_.randrange(3),
    )


def _broken(
    kind: str, right: Expression, helpers: Sequence[str], taken: Sequence[int], random_: random.Random
) -> Expression:
    if kind == "flip":
        return dataclasses.replace(right, operator=FLIPPED[right.operator])
    if kind == "bound":
        return dataclasses.replace(right, operator=BOUND[right.operator])
    if kind == "name":
        (other,) = (helper for helper in helpers if helper != right.called)
        return dataclasses.replace(right, called=other)
    number = right.number
    near = {number + 1, number - 1, number + 10, number - 10, number % 10 * 10 + number // 10}
    fits = sorted(n for n in near if n in NUMBERS and n != number and n not in taken)
    return dataclasses.replace(right, number=random_.choice(fits))


def generate(seed: int) -> Iterator[tuple[Draft, dict[str, Any]]]:
    """Endless stream of drafts with their rows, no two issues equal; the kinds in turn."""
    seen: set[str] = set()
    for number in itertools.count():
        draft = draw(KINDS[number % len(KINDS)], random.Random(f"{seed}/{number}"))
        if draft.issue not in seen and draft.shows():
            seen.add(draft.issue)
            yield draft, to_row(draft)


def split_of(draft: Draft) -> str:
    """The split that a task belongs to, whatever the seed."""
    digest = hashlib.blake2b(draft.issue.encode(), digest_size=4).digest()
    return HELDOUT if int.from_bytes(digest, "big") < HELDOUT_FRAC * 2**32 else TRAIN


def to_row(draft: Draft) -> dict[str, Any]:
    """A row of `jaxagent.data.rows`."""
    digest = hashlib.blake2b(repr(draft).encode(), digest_size=6).hexdigest()
    return {
        "id": f"fixes/{digest}",
        "prompt": draft.issue,
        "answers": [],
        "kind": draft.kind,
        "metadata": {
            KEY: {
                "files": {f"{draft.module}.py": draft.source(mended=False)},
                "patch": draft.patch(),
                "check_status": {"script": draft.test()},
            }
        },
    }


def demonstration(draft: Draft, row: Mapping[str, Any], guess_frac: float) -> dict[str, Any]:
    """An episode in which the agent looks and mends, or mends without looking.

    Args:
      draft: the task.
      row: the task's row.
      guess_frac: of the tasks, those whose demonstration does not look and takes the operator for the opposite one:
        what reinforcement learning then has to unlearn. Which they are depends on the task alone.
    """
    if random.Random(f"guess/{row['id']}").random() < guess_frac:
        assumed = dataclasses.replace(draft.right, operator=FLIPPED[draft.right.operator])
        steps = [(repair(draft, assumed), "")]
    else:
        shown = f"def {draft.name}(x):\n    return {draft.wrong}"
        steps = [(look(draft), shown), (repair(draft, draft.wrong), "")]
    turns = [
        {
            "action": dialogue.action("plain", command),
            "observation": dialogue.observation("plain", command, printed, 0),
        }
        for command, printed in steps
    ]
    turns.append({"action": dialogue.finish("plain"), "observation": ""})
    return {"prompt": row["prompt"], "turns": turns, "id": row["id"], "kind": row["kind"]}


def write(folder: Path, num: int, seed: int, num_demonstrations: int, guess_frac: float = 0.0) -> None:
    """Writes the dataset described in the module's docstring into `folder`, which must not exist yet.

    Args:
      folder: where it will stand.
      num: tasks, both splits together.
      seed: of the draws; the same seed gives the same bytes.
      num_demonstrations: rows of full.jsonl, from training tasks: first the dataset's, then further ones.
      guess_frac: see `demonstration`.

    Raises:
      ConfigError: `num` is too small for two splits.
    """
    stream = generate(seed)
    tasks: dict[str, list[tuple[Draft, dict[str, Any]]]] = {TRAIN: [], HELDOUT: []}
    for draft, row in itertools.islice(stream, num):
        tasks[split_of(draft)].append((draft, row))
    if not tasks[TRAIN] or not tasks[HELDOUT]:
        raise ConfigError(f"--num={num} is too few for a train and a heldout split.")
    training = itertools.chain(tasks[TRAIN], (pair for pair in stream if split_of(pair[0]) == TRAIN))
    shown = [demonstration(*pair, guess_frac) for pair in itertools.islice(training, num_demonstrations)]
    texts = generated.as_rows(tokenizer_texts(shown[:2000]))
    rows = {split: (row for _, row in tasks[split]) for split in tasks}
    generated.write_dataset(folder, rows, {"full.jsonl": shown, "texts.jsonl": texts}, need_answers=False)


def tokenizer_texts(shown: list[dict[str, Any]]) -> list[str]:
    """What occurs in episodes, and every name and number often enough to be one token."""
    words = [f" {word}" for word in (*WORDS, *NUMBERS)]  # a blank stands before each, wherever it occurs
    return generated.episode_texts(shown) + words * WORD_REPEATS


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="what to write; must not exist")
    parser.add_argument("--num", type=count, default=4000, help="tasks, all splits together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=amount, default=8000)
    parser.add_argument("--guess_frac", type=part, default=0.0, help="demonstrations that mend without looking")
    return generated.finish(
        parser,
        argv,
        lambda args: write(args.out, args.num, args.seed, args.demonstrations, args.guess_frac),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
