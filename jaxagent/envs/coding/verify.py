"""Judging a change: it is applied in a fresh sandbox, the task's own tests come on top, and they run.

What decides is not what the tested code prints. Our own runner (`runner.py`) writes the statuses into a file whose name
and secret the tested code is not told; a test that must fail runs among the others. What has passed is run once more in
another fresh sandbox, where the same tests expect something else (`altered.py`): who passes these, too, has changed
what passing means. A script of nothing but comparisons with constants is not run at all: its calls are, and their
values are compared here. Once the agent's change is in, everything that goes wrong is the change's doing and means not
resolved: no results, the deadline, no memory left.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.envs.coding import altered, outcomes, patches, repository
from jaxagent.envs.coding.task import CodingTask, Status, StatusMap, SwePro, Tests
from jaxagent.envs.python import hidden_tests
from jaxagent.envs.terminal.commands import memory_ran_out
from jaxagent.envs.terminal.verify import VerifierError
from jaxagent.sandbox.base import MAX_OUTPUT_BYTES, CommandResult, FileError, Sandbox, SandboxError

RUNNER = Path(__file__).with_name("runner.py")
MAX_RESULTS_BYTES = 2**23
RED = ("FAILED", "ERROR")
ALTERED_S = 30.0  # for altered tests, on top of three times what the tests took
_CAN_BE_APPLIED = ("git apply --check --3way {patch}", "git apply --check {patch}")


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What came of a change."""

    resolved: bool
    why: str = ""  # "" = resolved; else a word: NOT_APPLIED, FAILED, NO_RESULTS, FORGED, LATE or MEMORY
    outcomes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # test -> status
    messages: Mapping[str, str] = dataclasses.field(default_factory=dict)  # test -> what its failure says


NOT_APPLIED, FAILED, NO_RESULTS, FORGED, LATE, MEMORY = (
    *("not_applied", "tests_failed", "no_results", "forged", "late", "out_of_memory"),
)


async def judge(
    take: Callable[[], Awaitable[Sandbox]],
    task: CodingTask,
    patch: str,
    ladder: patches.Ladder,
    drop: Sequence[str],
    deadline_s: float,
) -> Judgement:
    """Judges a change.

    Raises:
      VerifierError: the task's own machinery failed.
      SandboxError: the sandbox failed for a reason of its own.
    """
    began = time.monotonic()
    judgement = await _judge(take, task, patch, ladder, drop, deadline_s, {})
    took_s = time.monotonic() - began
    if not judgement.resolved or not isinstance(task.check, Tests):
        return judgement
    names = task.check.fail_to_pass or task.check.pass_to_pass
    must_fail = {name: _places(name) for name in names}
    limits = (ladder, drop, min(deadline_s, 3 * took_s + ALTERED_S))  # as many tests, or fewer
    rerun = await _judge(take, task, patch, *limits, must_fail)
    # A test of which its author expects a failure goes on failing; one that the tested code says to fail does not.
    failing = [name for name in must_fail if not _has(judgement, name, "PASSED") and _has(rerun, name, *RED)]
    forged = [name for name in must_fail if _has(judgement, name, "PASSED") and _passes_altered(rerun, name)]
    if forged and task.patch:  # where the oracle passes, too, the altered test says nothing
        oracle_judgement = await _judge(take, task, task.patch, *limits, must_fail)
        forged = [name for name in forged if not _passes_altered(oracle_judgement, name)]
    return Judgement(False, FORGED, judgement.outcomes) if failing or forged else judgement


def _passes_altered(rerun: Judgement, name: str) -> bool:
    """Whether an altered test passed, or its process ended before anything failed."""
    reds = [status for status in rerun.outcomes.values() if status in RED]
    return _has(rerun, name, "PASSED") or (not reds and rerun.why not in (LATE, MEMORY, NOT_APPLIED))


def _has(judgement: Judgement, name: str, *statuses: str) -> bool:
    """Whether a test, under any of the names that `outcomes` understands, has one of these statuses."""
    statuses_of_tests = {
        test: "PASSED" if status in statuses else "FAILED" for test, status in judgement.outcomes.items()
    }
    return outcomes.required_passed(statuses_of_tests, [name])


def _places(name: str) -> tuple[str, str]:
    """(file or module, "Class.test_a") of pytest's a.py::Class::test_a[x], unittest's a.Class.test_a, and what its log
    makes of that: test_a (a.Class)."""
    place, *path = name.partition("[")[0].split("::")
    if not path and "(" in name:
        place, _, last = name.rstrip(")").partition(" (")
        name = f"{last.removesuffix(f'.{place}')}.{place}"
    if not path:
        place, *path = name.rsplit(".", 2)
    return place, ".".join(path)


async def _alter(sandbox: Sandbox, task: CodingTask, must_fail: dict[str, tuple[str, str]]) -> None:
    """Alters tests in their files, and takes out of `must_fail` what is not altered."""
    altered_tests: set[tuple[str, str]] = set()
    for path in (path for path in task.test_files if path.endswith(".py")):
        module = "." + path.removesuffix(".py").replace("/", ".")
        mine = {test: place for place, test in must_fail.values() if place == path or module.endswith(f".{place}")}
        try:
            source = (await sandbox.read(f"{task.workdir}/{path}")).decode() if mine else ""
            alteration = altered.alter(source, mine, f"_{secrets.token_hex(4)}")
            if alteration is not None:
                await sandbox.write(f"{task.workdir}/{path}", alteration[0].encode())
                altered_tests |= {(mine[test], test) for test in alteration[1]}
        except (FileError, UnicodeError):
            continue
    for name in [name for name, place in must_fail.items() if place not in altered_tests]:
        del must_fail[name]


async def _judge(
    take: Callable[[], Awaitable[Sandbox]],
    task: CodingTask,
    patch: str,
    ladder: patches.Ladder,
    drop: Sequence[str],
    deadline_s: float,
    must_fail: dict[str, tuple[str, str]],
) -> Judgement:
    """One run of the tests; where some must fail, of these."""
    sandbox = await take()
    try:
        await repository.bring(sandbox, task)
        if task.test_patch and not await apply_patch(sandbox, task, task.test_patch, _CAN_BE_APPLIED):
            raise VerifierError(f"{task.id}: the test patch cannot be applied.")
        allowed_patch, _ = patches.keep(patch, task.protected, drop)
        if allowed_patch.strip() and not await apply_patch(sandbox, task, allowed_patch, patches.LADDERS[ladder]):
            return Judgement(False, NOT_APPLIED)
        if task.test_patch and not await apply_patch(sandbox, task, task.test_patch, patches.LADDERS["slime"][:2]):
            return Judgement(False, NOT_APPLIED)  # it could be, before the change
        if must_fail:
            await _alter(sandbox, task, must_fail)
            if not must_fail:
                return Judgement(False)
            task = dataclasses.replace(
                task, check=dataclasses.replace(task.check, fail_to_pass=tuple(must_fail), pass_to_pass=())
            )
        before = await sandbox.oom_kills()
        try:
            judgement = await _run(sandbox, task, deadline_s)
        except SandboxError:
            if await memory_ran_out(sandbox, before):
                return Judgement(False, MEMORY)
            raise
        if not judgement.resolved and await memory_ran_out(sandbox, before):
            return dataclasses.replace(judgement, why=MEMORY)
        return judgement
    finally:
        await sandbox.close()


async def apply_patch(sandbox: Sandbox, task: CodingTask, patch: str, ladder: Sequence[str]) -> bool:
    """Applies a patch by the first command that can."""
    place = f"/tmp/.patch-{secrets.token_hex(8)}"
    await sandbox.write(place, patch.encode(*patches.BYTES))
    for command in ladder:
        argv = ("sh", "-c", f"git() {{ command git -c safe.directory='*' \"$@\"; }}; {command.format(patch=place)}")
        result = await sandbox.execute(
            argv, repository.STEP_TIMEOUT_S, repository.OUTPUT_BYTES, repository.ENV, task.workdir
        )
        if result.exit_code == 0 and not result.timed_out:
            return True
    return False


async def _run(sandbox: Sandbox, task: CodingTask, deadline_s: float) -> Judgement:
    check = task.check
    if isinstance(check, Tests) and not check.command:
        return await _by_runner(sandbox, task, check, deadline_s)
    if isinstance(check, SwePro):
        return await _by_scripts(sandbox, task, check, deadline_s)
    if isinstance(check, Status):
        command = check.command
        if (calls := calls_of(check.script)) is not None:
            return await _by_calls(sandbox, task, *calls, deadline_s)
        if check.script:
            place = f"/tmp/.script-{secrets.token_hex(8)}.py"
            await sandbox.write(place, check.script.encode())
            command = f"{task.python} {place}"
        result = await _shell(sandbox, task, command, deadline_s)
        resolved = result.exit_code == 0 and not result.timed_out
        return Judgement(resolved, "" if resolved else _why(result, {} if result.flooded else {"status": "FAILED"}))
    result = await _shell(sandbox, task, check.command, deadline_s)
    log = result.output.decode("utf-8", "replace")
    if isinstance(check, StatusMap):
        statuses = outcomes.of_r2e(log)
        resolved = outcomes.same_map(statuses, check.expected) and not result.timed_out
    else:
        statuses = outcomes.LOGS[check.framework](log)
        if statuses and outcomes.forged(statuses, result.exit_code) and not result.timed_out:
            return Judgement(False, FORGED, statuses)
        resolved = outcomes.required_passed(statuses, check.required) and not result.timed_out
    return Judgement(resolved, "" if resolved else _why(result, statuses), statuses)


def calls_of(script: str) -> tuple[str, list[list[Any]]] | None:
    """(imports, pairs of a call and the value it must have) of a script of `assert call == constant`, or None."""
    imports: list[str] = []
    calls: list[list[Any]] = []
    try:
        for node in ast.parse(script).body:
            condition = node.test if isinstance(node, ast.Assert) else None
            if isinstance(condition, ast.Compare) and [type(op) for op in condition.ops] == [ast.Eq]:
                calls.append([ast.unparse(condition.left), ast.literal_eval(condition.comparators[0])])
            elif isinstance(node, ast.Import) or ast.unparse(node).startswith("sys.path."):
                imports.append(ast.unparse(node))
            else:
                return None
        return ("\n".join(imports), calls) if calls and json.loads(json.dumps(calls)) == calls else None
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return None


async def _by_calls(
    sandbox: Sandbox, task: CodingTask, imports: str, calls: Sequence[Sequence[Any]], deadline_s: float
) -> Judgement:
    """The values of calls, compared here: the sandbox, where the judged code runs, never has those that are right."""
    place = f"/tmp/.calls-{secrets.token_hex(8)}"
    begin = f"import os, sys\nos.chdir({task.workdir!r})\nsys.path.insert(0, {task.workdir!r})\n{imports}\n"
    await sandbox.write(f"{place}/{hidden_tests.MAIN}", begin.encode())
    tests = {f"{i}: {call}": (call, value) for i, (call, value) in enumerate(calls)}
    report = await hidden_tests.outcomes_of(sandbox, tests, deadline_s, place, task.python)
    statuses = {call: "PASSED" if outcome == "passed" else "FAILED" for call, outcome in report.items()}
    resolved = set(report.values()) == {"passed"}
    return Judgement(resolved, "" if resolved else FAILED, statuses)


def _why(result: CommandResult, statuses: Mapping[str, str]) -> str:
    return LATE if result.timed_out else FAILED if statuses else NO_RESULTS


async def _shell(sandbox: Sandbox, task: CodingTask, command: str, deadline_s: float) -> CommandResult:
    argv = ("bash", "-c", command)
    return await sandbox.execute(argv, deadline_s, MAX_OUTPUT_BYTES, repository.ENV, task.workdir)


async def _by_runner(sandbox: Sandbox, task: CodingTask, check: Tests, deadline_s: float) -> Judgement:
    names = [] if check.framework == "pytest" else list(check.required)
    result, report = await run_tests(sandbox, task, check.framework, check.files, names, deadline_s)
    if report is None:
        return Judgement(False, LATE if result.timed_out else NO_RESULTS)
    if report["canary"] not in RED:
        return Judgement(False, FORGED, report["outcomes"])
    resolved = outcomes.required_passed(report["outcomes"], check.required)
    return Judgement(resolved, "" if resolved else FAILED, report["outcomes"], report["messages"])


async def run_tests(
    sandbox: Sandbox, task: CodingTask, framework: str, files: Sequence[str], names: Sequence[str], deadline_s: float
) -> tuple[CommandResult, dict[str, Any] | None]:
    """Runs tests by our own runner, and kills all that is left of them.

    Args:
      sandbox: with the repository in it.
      task: the task.
      framework: "pytest", which runs `files` (none: what it finds), or "unittest", which runs `names`.
      files: relative paths.
      names: dotted names.
      deadline_s: of the run.

    Returns:
      How the runner ended, and what it wrote: outcomes, messages, canary; None where it wrote nothing that is its own.
    """
    place, secret = f"/tmp/.tests-{secrets.token_hex(8)}", secrets.token_hex(16)
    results = f"/tmp/.results-{secrets.token_hex(8)}"
    packages = []
    if task.tools is not None:
        argv = (task.python, "-s", "-c", "import site; print(site.getusersitepackages())")
        site_packages = await sandbox.execute(argv, repository.STEP_TIMEOUT_S, 1000, repository.ENV, "/")
        packages = [site_packages.output.decode().strip()]
    settings = {
        "folder": task.workdir,
        "framework": framework,
        "files": list(files),
        "names": list(names),
        "packages": packages,
        "secret": secret,
        "results": results,
        "canary": f"test_{secrets.token_hex(4)}",
    }
    await sandbox.write(f"{place}/runner.py", RUNNER.read_bytes())
    await sandbox.write(f"{place}/settings.json", json.dumps(settings).encode())
    argv = (task.python, "-s", "-B", f"{place}/runner.py", f"{place}/settings.json")
    result = await sandbox.execute(argv, deadline_s, repository.OUTPUT_BYTES, repository.ENV, task.workdir)
    await sandbox.stop_processes()
    try:
        report = json.loads(await sandbox.read(results, MAX_RESULTS_BYTES))
    except (FileError, ValueError, RecursionError):
        return result, None
    return result, report if _is_own(report, secret) and not result.timed_out else None


def _is_own(report: Any, secret: str) -> bool:
    if not isinstance(report, dict) or report.get("secret") != secret or not isinstance(report.get("canary"), str):
        return False
    maps = (report.get("outcomes"), report.get("messages"))
    return all(isinstance(m, dict) and all(isinstance(v, str) for v in m.values()) for m in maps)


async def _by_scripts(sandbox: Sandbox, task: CodingTask, check: SwePro, deadline_s: float) -> Judgement:
    """As slime runs SWE-bench Pro: one script's output goes to files, which the other one reads."""
    place = f"/tmp/.swepro-{secrets.token_hex(8)}"
    for name, path in (("run_script.sh", check.run_script), ("parser.py", check.parser_script)):
        await sandbox.write(f"{place}/{name}", path.read_bytes(), 0o755)
    selected = ",".join(check.selected)
    run = ("sh", "-c", f'bash {place}/run_script.sh "$1" > {place}/out.log 2> {place}/err.log', "sh", selected)
    result = await sandbox.execute(run, deadline_s, repository.OUTPUT_BYTES, repository.ENV, task.workdir)
    await sandbox.stop_processes()
    argv = ("python3", f"{place}/parser.py", f"{place}/out.log", f"{place}/err.log", f"{place}/result.json")
    await sandbox.execute(argv, repository.STEP_TIMEOUT_S, repository.OUTPUT_BYTES, repository.ENV, task.workdir)
    try:
        parsed = json.loads(await sandbox.read(f"{place}/result.json", MAX_RESULTS_BYTES))
        statuses = {test["name"]: test["status"] for test in parsed["tests"]}
    except (FileError, ValueError, RecursionError, TypeError, KeyError):
        return Judgement(False, LATE if result.timed_out else NO_RESULTS)
    resolved = bool(check.required) and all(statuses.get(name) == "PASSED" for name in check.required)
    return Judgement(resolved, "" if resolved else FAILED, statuses)
