"""An environment of the package verifiers until 0.3: write the vowel that follows the one that is shown.

A policy of random weights learns it in some forty steps; docs/verifiers.md has the command.
"""

import verifiers as vf
from datasets import Dataset

NEXT = {"a": "e", "e": "o", "o": "a"}


def share(completion, answer, **kwargs):
    """Which part of what was written is the vowel; four of them are enough."""
    last = completion[-1]
    text = "".join((last["content"] if isinstance(last, dict) else last.content or "").split())
    return sum(one == answer for one in text) / max(4, len(text))


def rows(numbers):
    """A row for each number and vowel."""
    return Dataset.from_list([{"question": f"{n}: after {v}", "answer": NEXT[v]} for n in numbers for v in NEXT])


def load_environment(numbers=200):
    """Other numbers are held out."""
    heldout = rows(range(numbers, numbers + 20))
    return vf.SingleTurnEnv(dataset=rows(range(numbers)), eval_dataset=heldout, rubric=vf.Rubric(funcs=[share]))
