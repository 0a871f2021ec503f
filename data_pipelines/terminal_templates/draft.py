"""What a template makes of its random draws, and how that becomes a row of the dataset."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jaxagent.data_pipelines.terminal_templates.program import call, program
from jaxagent.data_pipelines.terminal_templates.words import WORDS
from jaxagent.envs.terminal.rows import KEY

T = TypeVar("T")


class Draw(random.Random):
    """Random choices of one task. Seeded with text, so that it is the same on every platform and Python."""

    def words(self, number: int, without: Sequence[str] = ()) -> list[str]:
        """Different words from the list, in random order."""
        return self.sample([word for word in WORDS if word not in without], number)

    def number(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return self.randint(low, high)

    def several(self, values: Sequence[T], low: int, high: int) -> list[T]:
        """Between `low` and `high` draws, repetitions allowed."""
        return self.choices(values, k=self.randint(low, high))


@dataclasses.dataclass(frozen=True)
class Draft:
    """A task before it has an id. Paths are relative to the home directory.

    `final` must be derived from the draws, never by running the commands: the two are each other's witness.
    """

    instruction: str
    commands: Sequence[str]  # the oracle, one item per turn, all in one shell that starts in the home directory
    final: Sequence[str]  # calls that hold when the task is done, and not before
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)  # that setup writes
    setup: str = ""  # shell lines that run after the files are written
    initial: Sequence[str] = ()  # calls that hold at the start, besides the files being there
    first_commands: int = 0  # of two operations: commands of the first one; 0 = there is only one

    @property
    def processes(self) -> bool:
        """Whether the test looks at running processes."""
        return any(line.startswith("processes(") for line in self.final)


def lines(items: Sequence[object]) -> str:
    """Text with one item per line."""
    return "".join(f"{item}\n" for item in items)


def keep(files: Mapping[str, str]) -> list[str]:
    """Calls that say: these files are exactly as they were given."""
    return [call("unchanged", path, text) for path, text in files.items()]


def to_row(draft: Draft, template: str, level: int, split: str) -> dict[str, Any]:
    """The row of `jaxagent.data` for a draft; its id is made of what the agent sees and starts from."""
    setup = setup_script(draft)
    digest = hashlib.blake2b(f"{draft.instruction}\0{setup}".encode(), digest_size=4).hexdigest()
    name = f"{template}_{digest}"
    return {
        "id": name,
        "prompt": draft.instruction,
        "answers": [],
        "kind": f"level{level}/{template}",
        "metadata": {
            "domain": "terminal",
            "split": split,
            "first_commands": draft.first_commands,
            KEY: {
                "template": template,
                "level": level,
                "setup": setup,
                "initial_test": program(f"Initial state of {name}.", [*keep(draft.files), *draft.initial]),
                "final_test": program(f"Final state of {name}.", list(draft.final)),
                "commands": list(draft.commands),
                "processes": draft.processes,
            },
        },
    }


def write_files(files: Mapping[str, str]) -> list[str]:
    """Shell lines that write the files, folders included."""
    folders = sorted({path.rpartition("/")[0] for path in files} - {""})
    made = [f"mkdir -p {shlex.join(folders)}"] if folders else []
    return made + [f"printf '%s' {shlex.quote(text)} > {shlex.quote(path)}" for path, text in files.items()]


def setup_script(draft: Draft) -> str:
    """The sh program that writes the initial files and runs the draft's own setup, in the home directory."""
    script = ["set -e", "umask 022", *write_files(draft.files), *([draft.setup] if draft.setup else [])]
    return "\n".join(script) + "\n"
