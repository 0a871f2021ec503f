"""Generates small programming tasks with hidden tests, and demonstrations, some of which read an error and revise.

    python -m data_pipelines.python_tasks --out=data/python_tasks --num=4000 --demonstrations=8000

    Write f(x) = lib.tulip(x) times 37.

`lib` is a small library that stands beside every program of the task. In tasks of the family "first" the description is
right. In those of the family "revise" it is out of date, which only running tells: a function has another name now
("AttributeError: lib.tulip is now lib.ember"), or gives text ("TypeError: can only concatenate str ..."). What the
functions compute is not told, and the hidden tests ask for values that follow from it.

Writes, all at once or not at all:

    array_record, TFDS layout   splits train and heldout (descriptions never seen in training)
    full.jsonl, texts.jsonl     whole episodes, and what a tokenizer is trained on

A task's split follows from its description alone, so tasks of any two seeds never cross splits.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import hashlib
import io
import itertools
import random
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import exit_code
from jaxagent.data_pipelines import generated
from jaxagent.data_pipelines.terminal_templates.words import WORDS
from jaxagent.envs.python import formats

TRAIN, HELDOUT = "train", "heldout"
HELDOUT_FRAC = 0.2
NUMBERS = range(11, 100)
TESTED = range(-20, 60)  # arguments of hidden tests
NUM_TESTS = 4
SHOWN = 2  # the argument that demonstrations try their f with
WORD_REPEATS = 20  # in the tokenizer's texts: a word should be one token
# What f is: its description and its expression. {a} and {b} are functions of lib, {k} is a number.
FORMS: dict[str, tuple[tuple[str, ...], str]] = {
    "plus": (("lib.{a}(x) plus {k}", "lib.{a}(x) and {k} more"), "lib.{a}(x) + {k}"),
    "minus": (("lib.{a}(x) minus {k}", "lib.{a}(x) and {k} less"), "lib.{a}(x) - {k}"),
    "times": (("lib.{a}(x) times {k}", "lib.{a}(x), but {k} times as much"), "lib.{a}(x) * {k}"),
    "sum": (("lib.{a}(x) plus lib.{b}(x)", "lib.{a}(x) and lib.{b}(x) more"), "lib.{a}(x) + lib.{b}(x)"),
    "nested": (("lib.{a} of lib.{b}(x)", "lib.{b}(x), and lib.{a} of that"), "lib.{a}(lib.{b}(x))"),
}
TEXT_FORMS = ("plus", "minus")  # of text and a number these fail; times and nested would go wrong in silence


@dataclasses.dataclass(frozen=True)
class Draft:
    """One task before it is a row."""

    form: str
    wording: int
    fault: str  # "", "renamed" or "text"
    names: Mapping[str, str]  # a, b and, for "renamed", new: what a is called now
    number: int
    linear: tuple[int, int, int, int]  # a(x) = [0] x + [1], b(x) = [2] x + [3]

    @property
    def kind(self) -> str:
        """The family and the kind of the task."""
        return f"revise/{self.fault}" if self.fault else f"first/{self.form}"

    @property
    def description(self) -> str:
        """What the policy is asked for."""
        return f"Write f(x) = {FORMS[self.form][0][self.wording].format(k=self.number, **self.names)}."

    def program(self, mended: bool) -> str:
        """The program that the description asks for, or the one that works."""
        names = dict(self.names)
        if mended and self.fault == "renamed":
            names["a"] = names["new"]
        body = FORMS[self.form][1].format(k=self.number, **names)
        if mended and self.fault == "text":
            body = body.replace(f"lib.{names['a']}(x)", f"int(lib.{names['a']}(x))")
        return f"import lib\ndef f(x): return {body}\nprint(f({SHOWN}))"

    def library(self) -> str:
        """lib.py."""
        p, q, r, s = self.linear
        name = self.names["new"] if self.fault == "renamed" else self.names["a"]
        value = f"str({p} * x + {q})" if self.fault == "text" else f"{p} * x + {q}"
        lines = [f"def {name}(x): return {value}", f"def {self.names['b']}(x): return {r} * x + {s}"]
        if self.fault == "renamed":
            old = self.names["a"]
            lines.append(f"def __getattr__(name): raise AttributeError('lib.{old} is now lib.{name}')")
        return "\n".join(lines) + "\n"

    def value(self, x: int) -> int:
        """What f must return, computed without Python's help from the library's text."""
        p, q, r, s = self.linear
        a, b, k = p * x + q, r * x + s, self.number
        return {"plus": a + k, "minus": a - k, "times": a * k, "sum": a + b, "nested": p * b + q}[self.form]


def draw(family: str, random_: random.Random) -> Draft:
    """A draft of the family "first" or "revise"; forms and faults are equally likely."""
    fault = random_.choice(("renamed", "text")) if family == "revise" else ""
    form = random_.choice(TEXT_FORMS if fault == "text" else tuple(FORMS))
    a, b, new = random_.sample(WORDS, 3)
    factors = random_.sample(range(2, 10), 2)
    linear = (factors[0], random_.randrange(1, 50), factors[1], random_.randrange(1, 50))
    names = {"a": a, "b": b, **({"new": new} if fault == "renamed" else {})}
    return Draft(form, random_.randrange(2), fault, names, random_.choice(NUMBERS), linear)


def generate(seed: int) -> Iterator[tuple[Draft, dict[str, Any]]]:
    """Endless stream of drafts with their rows, no two descriptions equal; the two families in turn."""
    seen: set[str] = set()
    for number in itertools.count():
        draft = draw(("first", "revise")[number % 2], random.Random(f"{seed}/{number}"))
        if draft.description not in seen:
            seen.add(draft.description)
            yield draft, to_row(draft)


def split_of(draft: Draft) -> str:
    """The split that a task belongs to, whatever the seed."""
    digest = hashlib.blake2b(draft.description.encode(), digest_size=4).digest()
    return HELDOUT if int.from_bytes(digest, "big") < HELDOUT_FRAC * 2**32 else TRAIN


def to_row(draft: Draft) -> dict[str, Any]:
    """A row of `jaxagent.data.rows`."""
    arguments = random.Random(draft.description).sample(TESTED, NUM_TESTS)
    tests = {f"t{i}": {"call": f"f({x})", "value": draft.value(x)} for i, x in enumerate(arguments)}
    digest = hashlib.blake2b(repr(draft).encode(), digest_size=6).hexdigest()
    return {
        "id": f"python/{digest}",
        "prompt": draft.description,
        "answers": [],
        "kind": draft.kind,
        "metadata": {
            "hidden_tests": tests,
            "fail_to_pass": list(tests),
            "files": {"lib.py": draft.library()},
            "solution": draft.program(mended=True),
        },
    }


def demonstration(draft: Draft, row: Mapping[str, Any], style: formats.Format, early_frac: float) -> dict[str, Any]:
    """An episode in which the agent does what it was told, reads what comes, and mends what failed.

    Args:
      draft: the task.
      row: the task's row.
      style: how programs are written.
      early_frac: of the tasks whose first program fails, those whose demonstration stops there: what reinforcement
        learning then has to unlearn. Which they are depends on the task alone.

    Raises:
      ConfigError: the mended program fails, or the first one does where it should not: then a template is wrong.
    """
    library = row["metadata"]["files"]["lib.py"]
    turns, failed = [], False
    early = random.Random(f"early/{row['id']}").random() < early_frac
    for mended in (False, True):
        code = draft.program(mended)
        output, failed = play(code, library)
        turns.append({"action": formats.program(style, code), "observation": formats.observation(style, output)})
        if failed != (bool(draft.fault) and not mended):
            raise ConfigError(f"{row['id']}: a generated program {'fails' if failed else 'works'}: {output}")
        if not failed or early:
            break
    turns.append({"action": formats.end(style, None), "observation": ""})
    return {"prompt": row["prompt"], "turns": turns, "id": row["id"], "kind": row["kind"]}


def play(code: str, library: str) -> tuple[str, bool]:
    """Runs a program of ours in this process, beside its library; (what is shown of its output, whether it failed).

    A process each would cost a hundred times as much; the tests compare with real sandboxes.
    """
    module = types.ModuleType("lib")
    exec(library, module.__dict__)
    imports = {"__import__": lambda name, *rest: module if name == "lib" else builtins.__import__(name, *rest)}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "__main__", "__builtins__": {**vars(builtins), **imports}})
    except Exception as error:
        return printed.getvalue() + "".join(traceback.format_exception_only(error)).rstrip(), True
    return printed.getvalue().rstrip(), False


def write(
    folder: Path, num: int, seed: int, num_demonstrations: int, style: formats.Format, early_frac: float = 0.0
) -> None:
    """Writes the dataset described in the module's docstring into `folder`, which must not exist yet.

    Args:
      folder: where it will stand.
      num: tasks, both splits together.
      seed: of the draws; the same seed gives the same bytes.
      num_demonstrations: rows of full.jsonl, from training tasks: first the dataset's, then further ones.
      style: of the demonstrations.
      early_frac: see `demonstration`.
    """
    stream = generate(seed)
    tasks: dict[str, list[tuple[Draft, dict[str, Any]]]] = {TRAIN: [], HELDOUT: []}
    for draft, row in itertools.islice(stream, num):
        tasks[split_of(draft)].append((draft, row))
    if not tasks[TRAIN] or not tasks[HELDOUT]:
        raise ConfigError(f"--num={num} is too few for a train and a heldout split.")
    training = itertools.chain(tasks[TRAIN], (pair for pair in stream if split_of(pair[0]) == TRAIN))
    shown = [demonstration(*pair, style, early_frac) for pair in itertools.islice(training, num_demonstrations)]
    texts = generated.as_rows(tokenizer_texts(shown[:2000]))
    rows = {split: (row for _, row in tasks[split]) for split in tasks}
    generated.write_dataset(folder, rows, {"full.jsonl": shown, "texts.jsonl": texts}, need_answers=False)


def tokenizer_texts(shown: list[dict[str, Any]]) -> list[str]:
    """What occurs in episodes, and every name and number often enough to be one token."""
    return generated.episode_texts(shown) + [*WORDS, *(f" {number}" for number in NUMBERS)] * WORD_REPEATS


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return generated.main(write, __doc__, 8000, "demonstrations that stop at the error", argv)


if __name__ == "__main__":
    sys.exit(exit_code(main))
