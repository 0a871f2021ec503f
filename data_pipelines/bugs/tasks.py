"""A candidate -> a task, if the tests say so: red with the bug, green without it, twice, in fresh sandboxes."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.data_pipelines.bugs.bench import Bench, Run, Take, check
from jaxagent.data_pipelines.bugs.candidates import Candidate
from jaxagent.envs.coding.task import from_task
from jaxagent.types import Task

SHOWN_TESTS = 8  # in a statement
SHOWN_CHARS = 160  # of what a failure says
LEAK_CHARS = 6  # a changed line of at least so many characters must not be in a statement
RED = ("FAILED", "ERROR")
_CHANGING = re.compile(r"\b0x[0-9a-f]{6,}|/tmp/pytest-of-\S+?/pytest-\d+")  # addresses and folders of one run


@dataclasses.dataclass(frozen=True)
class Options:
    """How candidates are tried."""

    timeout_s: float  # of one run of the tests
    max_failing: int  # tests of a task that fail, at most
    heldout_frac: float  # of modules


class Rejected(Exception):
    """Why a candidate became no task, in a few words."""


async def make(
    candidate: Candidate, base: Sequence[Run], bench: Bench, take: Take, folder: Path, tools: str, options: Options
) -> dict[str, Any]:
    """The row of a task.

    Args:
      candidate: the bug.
      base: two runs of the tests without it.
      bench: with the repository.
      take: gives sandboxes for the last checks.
      folder: of the data set, where the archives are.
      tools: relative path of the tests' tools.
      options: how.

    Raises:
      Rejected: it is none.
    """
    green = passed(base)
    if not green:
        raise Rejected("no test passes without the bug")
    fails = await _failing(candidate, green, bench)
    if len(fails) > options.max_failing:
        raise Rejected("too many tests fail")
    runs = [await bench.run(candidate.broken, candidate.repository.files, files_of(fails)) for _ in range(2)]
    if any(red(run, fails) != fails for run in runs):
        raise Rejected("flaky")
    also = sorted(passed(runs) & {name for name in green if name.partition("::")[0] in files_of(fails)})
    row = to_row(candidate, fails, also, runs[0].messages, folder, tools, options.heldout_frac)
    await verified(row, take, folder, options.timeout_s)
    return row


async def _failing(candidate: Candidate, green: set[str], bench: Bench) -> list[str]:
    """The tests that fail with the bug and pass without it."""
    run = await bench.run(candidate.broken, candidate.repository.files, candidate.tests)
    if not run.outcomes:
        raise Rejected("the tests do not end")
    fails = red(run, sorted(green))
    if not fails:
        raise Rejected("no test fails")
    if any(name not in run.outcomes for name in green):
        raise Rejected("tests cannot be loaded")
    return fails


async def verified(row: Mapping[str, Any], take: Take, folder: Path, timeout_s: float) -> None:
    """Twice each, in fresh sandboxes and by the real verifier: nothing done is 0, the oracle's patch is 1.

    Raises:
      Rejected: it is not so.
    """
    task = from_task(Task(row["id"], row["prompt"], (), row["kind"], row["metadata"]), folder)
    for _ in range(2):
        idle, oracle = await check(take, task, "", timeout_s), await check(take, task, task.patch, timeout_s)
        if idle.resolved or not oracle.resolved:
            raise Rejected(f"verifier: idle {idle.why or 'resolved'}, oracle {oracle.why or 'resolved'}")
        if any(idle.outcomes.get(name) not in RED for name in row["metadata"]["coding"]["check_tests"]["fail_to_pass"]):
            raise Rejected("verifier: not all tests fail")


def passed(runs: Sequence[Run]) -> set[str]:
    """Tests that passed in every run."""
    return set.intersection(*({name for name, status in run.outcomes.items() if status == "PASSED"} for run in runs))


def red(run: Run, names: Sequence[str]) -> list[str]:
    """Those that failed."""
    return [name for name in names if run.outcomes.get(name) in RED]


def files_of(names: Sequence[str]) -> tuple[str, ...]:
    """The files that tests are in."""
    return tuple(sorted({name.partition("::")[0] for name in names}))


def to_row(
    candidate: Candidate,
    fails: Sequence[str],
    also: Sequence[str],
    messages: Mapping[str, str],
    folder: Path,
    tools: str,
    heldout_frac: float,
) -> dict[str, Any]:
    """The row; archives are written where they are missing."""
    repository = candidate.repository
    return {
        "id": candidate.id,
        "prompt": statement(candidate, fails, messages),
        "answers": [],
        "kind": f"{repository.name}/{candidate.kind}",
        "metadata": {
            "domain": "bugs",
            "split": split_of(repository.name, candidate.module, heldout_frac),
            "module": candidate.module,
            "coding": {
                "archive": repository.pack(folder),
                "tools": tools,
                "files": dict(candidate.broken),
                "patch": candidate.patch,
                "check_tests": {"fail_to_pass": list(fails), "pass_to_pass": list(also)},
            },
        },
    }


def statement(candidate: Candidate, fails: Sequence[str], messages: Mapping[str, str]) -> str:
    """What is told of the bug: the failing tests and what they say, nothing of the change."""
    repository = candidate.repository
    lines = [f"Tests of {repository.name} fail that should pass ({len(fails)} in all):", ""]
    for name in fails[:SHOWN_TESTS]:
        said = " ".join((messages.get(name, "").splitlines() or [""])[0].split())
        said = _CHANGING.sub("...", said)[:SHOWN_CHARS]
        lines.append(f"- {name}" + (f": {said}" if said and not _leaks(said, candidate.patch) else ""))
    if len(fails) > SHOWN_TESTS:
        lines.append(f"- and {len(fails) - SHOWN_TESTS} more")
    return "\n".join([*lines, "", "Find the bug in the source and repair it. Leave the tests as they are."])


def _leaks(text: str, patch: str) -> bool:
    changed = [line[1:] for line in patch.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    shown = [" ".join(line.split()) for line in changed]
    return any(len(line) >= LEAK_CHARS and line in text for line in shown)


def split_of(name: str, module: str, heldout_frac: float) -> str:
    """The split of a module of a repository, whatever the seed: no module is in both."""
    digest = hashlib.blake2b(f"{name}\0{module}".encode(), digest_size=4).digest()
    return "heldout" if int.from_bytes(digest, "big") < heldout_frac * 2**32 else "train"
