"""Hidden tests of a submitted program: what it returns is compared here, with values that never enter a sandbox.

A test is a call and the value it must have, both in the task's metadata:

    {"hidden_tests": {"t0": {"call": "f(3)", "value": 14}}, "fail_to_pass": ["t0"], "files": {"lib.py": "..."}}

The program and the calls go into a fresh process of a fresh sandbox; values come out as JSON. So a program may print,
patch, forge or end the process as it likes: it passes a test only with the right value, which it has nowhere to read.
A program that fails, hangs or ends early fails its tests (the policy's own doing); a sandbox that fails raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.fields import RowError
from jaxagent.envs.forms import EACH, shaped
from jaxagent.rewards.unit_tests import required_tests
from jaxagent.sandbox.base import Sandbox
from jaxagent.types import Task

MAX_FILE_CHARS = 30_000  # of one of a task's files: the kernel takes 128 KiB in one argument, a character has up to 4
OUTPUT_BYTES = 1_000_000  # of all values together
WRITE_TIMEOUT_S = 60.0
# Writes files given as name, text, name, text, ... into the working directory.
WRITE = 'while [ "$#" -gt 0 ]; do printf %s "$2" > "$1" || exit 1; shift 2; done'
MAIN = "main.py"  # the submission
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of a file: no path, no option
# The submission's own output goes nowhere, so that values arrive alone.
CALL = """
import json, os, sys
sys.path.insert(0, os.getcwd())
out, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
os.dup2(null, 1), os.dup2(null, 2)
space, outcomes = {"__name__": "submission"}, []
try:
    with open("main.py") as file:
        exec(compile(file.read(), "main.py", "exec"), space)
    for call in json.loads(sys.argv[1]):
        try:
            outcomes.append({"value": json.loads(json.dumps(eval(call, space)))})
        except BaseException:
            outcomes.append({})
except BaseException:
    pass
data = json.dumps(outcomes).encode()
while data:
    data = data[os.write(out, data):]
os._exit(0)
"""


# Name -> (a Python expression, evaluated when the submission has been executed; what it must give, as JSON).
HiddenTests = Mapping[str, tuple[str, Any]]


def of_task(task: Task) -> HiddenTests:
    """The hidden tests of a task. Raises ConfigError: they are missing or malformed, or `fail_to_pass` names one that
    is not there; one line."""
    form = {EACH: {"call": str, "value": object}}
    try:
        stored = shaped(task.metadata.get("hidden_tests"), form, "metadata.hidden_tests", strict=False)
    except RowError as error:
        raise ConfigError(f"task '{task.id}': {error}.") from None
    if not stored:
        raise ConfigError(f"task '{task.id}': metadata.hidden_tests is empty: it is no such task.")
    if unknown := [name for name in required_tests(task) if name not in stored]:
        raise ConfigError(f"task '{task.id}': metadata.hidden_tests has no '{unknown[0]}', which is required.")
    return {name: (test["call"], test["value"]) for name, test in stored.items()}


def files_of(task: Task) -> Mapping[str, str]:
    """Files that stand beside every program of the task, name -> text. Raises ConfigError: a name with a path, the
    program's own name, or a text that is too long."""
    files = task.metadata.get("files", {})
    if not isinstance(files, Mapping):
        raise ConfigError(f"task '{task.id}': metadata.files must be an object of texts.")
    for name, text in files.items():
        if not NAME.fullmatch(name) or name == MAIN:
            raise ConfigError(f"task '{task.id}': metadata.files: {name!r} must be a plain name other than {MAIN}.")
        if not isinstance(text, str) or len(text) > MAX_FILE_CHARS or "\0" in text:
            raise ConfigError(f"task '{task.id}': metadata.files.{name} must be text of at most {MAX_FILE_CHARS:,}.")
    return files


def arguments(files: Mapping[str, str]) -> list[str]:
    """What `WRITE` takes."""
    return [part for name, text in files.items() for part in (name, text)]


async def run(sandbox: Sandbox, tests: HiddenTests, files: Mapping[str, str], deadline_s: float) -> dict[str, str]:
    """Runs every test; name -> "passed", "failed" (another value) or "error" (none). Raises RuntimeError: the files
    cannot be written, before anything of the policy's has run."""
    result = await sandbox.execute(("sh", "-c", WRITE, "sh", *arguments(files)), WRITE_TIMEOUT_S, 1000)
    if result.timed_out or result.exit_code != 0:
        raise RuntimeError(f"the submission cannot be written: {result.output[:200]!r}")
    return await outcomes_of(sandbox, tests, deadline_s)


async def outcomes_of(
    sandbox: Sandbox, tests: HiddenTests, deadline_s: float, directory: str = "", python: str = "python3"
) -> dict[str, str]:
    """The same of a submission that is there, as `MAIN` in a directory ("" = the sandbox's own)."""
    calls = json.dumps([call for call, _ in tests.values()])
    try:
        argv = (python, "-I", "-B", "-c", CALL, calls)
        result = await sandbox.execute(argv, deadline_s, OUTPUT_BYTES, None, directory)
    except RuntimeError:
        if not await sandbox.oom_kills():
            raise
        result = None  # the submission used up the memory, and the sandbox died of it
    outcomes = [] if result is None or result.timed_out or result.truncated else read(result.output)
    outcomes += [{}] * (len(tests) - len(outcomes))
    report = {}
    for (name, (_, value)), outcome in zip(tests.items(), outcomes, strict=False):
        if "value" not in outcome:
            report[name] = "error"
        else:
            report[name] = "passed" if same(outcome["value"], value) else "failed"
    return report


def read(output: bytes) -> list[dict[str, Any]]:
    """The outcomes a process printed; [] for anything else, such as what a submission made of the process."""
    try:
        outcomes = json.loads(output)
    except (ValueError, RecursionError):
        return []
    return outcomes if isinstance(outcomes, list) and all(isinstance(o, dict) for o in outcomes) else []


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 and 1.0 are equal, True and 1 are not, NaN equals nothing."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return (numbers or type(a) is type(b)) and a == b
