"""Starting a task in a workspace, where commands run, and judging what an agent left there.

Verification runs in a fresh process that the agent never touched, after everything left at the tests' paths has been
removed. When the verifier does not say a reward, that is a `VerifierError`, which an environment must let through
(StopReason.ENV_ERROR): it is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxagent.envs.terminal.task import Healthcheck, Script, TerminalTask
from jaxagent.sandbox.base import CommandResult

if TYPE_CHECKING:
    from jaxagent.envs.terminal.sandbox_workspace import SandboxWorkspace

REWARD_TXT, REWARD_JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
REWARD, REWARD_FOLDER = "reward", "/logs/verifier"
MAX_TXT_BYTES, MAX_JSON_BYTES = 4096, 65536
_SETUP_TIMEOUT_S = 60.0
_SHOWN = 400  # characters of output in an error
_SUMMARY = re.compile(r"^=+ *short test summary info *=+$", re.MULTILINE)
_OUTCOME = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


class VerifierError(RuntimeError):
    """The task's own machinery failed, or gave no reward. Says nothing about the agent."""


async def prepare(workspace: SandboxWorkspace, task: TerminalTask) -> None:
    """Brings the initial state about: setup, healthchecks and, where the task has one, its initial test.

    Raises:
      VerifierError: one of them failed.
    """
    for part, script in (("setup", task.setup), ("initial test", task.initial_test)):
        if script is not None:
            timeout_s = task.limits.verifier_timeout_s if script is task.initial_test else task.limits.build_timeout_s
            result = await run_script(workspace, task, script, timeout_s)
            if result.timed_out or result.exit_code != 0:
                raise VerifierError(f"{task.id}: the {part} {_how(result)}")
        for healthcheck in task.healthchecks if part == "setup" else ():
            await _wait_for_health(workspace, task, healthcheck)
    if task.looks_at_processes:
        await workspace.remember_processes()


async def _wait_for_health(workspace: SandboxWorkspace, task: TerminalTask, check: Healthcheck) -> None:
    """Tries a healthcheck as Harbor does: failures in the start period do not count, then `retries` in a row end it."""
    start_ends, failures = time.monotonic() + check.start_period_s, 0
    while True:
        starting = time.monotonic() < start_ends
        result = await run_script(workspace, task, Script(check.command), check.timeout_s)
        if result.exit_code == 0 and not result.timed_out:
            return
        failures += not starting
        if failures >= max(1, check.retries):
            raise VerifierError(f"{task.id}: the healthcheck failed {failures} times; the last {_how(result)}")
        await asyncio.sleep(check.start_interval_s if starting else check.interval_s)


async def solve(workspace: SandboxWorkspace, task: TerminalTask) -> CommandResult:
    """Runs the oracle. Raises VerifierError: the task has none, or it ran past the agent's time. A status other than 0
    is the final test's business: some published solutions end with one."""
    if task.oracle is None:
        raise VerifierError(f"{task.id} has no oracle solution.")
    result = await run_script(workspace, task, task.oracle, task.limits.agent_timeout_s, task.oracle_env)
    if result.timed_out:
        raise VerifierError(f"{task.id}: the oracle {_how(result)}")
    return result


async def verify(workspace: SandboxWorkspace, task: TerminalTask) -> float:
    """Runs the final test and returns the reward it says. Raises VerifierError: as `rewards`, or it said no reward of
    the task's range."""
    return the_reward(task, await rewards(workspace, task))


async def rewards(workspace: SandboxWorkspace, task: TerminalTask) -> dict[str, float]:
    """Runs the final test and returns the numbers it says by name; {"reward": ...} where it says but one.

    Raises:
      VerifierError: the test is missing, timed out, or said no number.
    """
    if task.final_test is None:
        raise VerifierError(f"{task.id} has no final test.")
    if task.reward_from == "reward_file":  # whatever the agent wrote there is no reward
        await empty(workspace, task, REWARD_FOLDER)
    result = await run_script(workspace, task, task.final_test, task.limits.verifier_timeout_s, task.verifier_env)
    if result.timed_out:
        raise VerifierError(f"{task.id}: the final test {_how(result)}")
    try:
        if task.reward_from == "exit_status":
            return {REWARD: reward_of_status(result.exit_code)}
        if task.reward_from == "pytest_summary":
            return {REWARD: reward_of_summary(result.exit_code, result.output.decode("utf-8", "replace"))}
        await workspace.stop_processes()  # a program of the agent's that the test started may wait for the reward
        txt = await _read(workspace, REWARD_TXT, MAX_TXT_BYTES)
        numbers = rewards_of_files(txt, await _read(workspace, REWARD_JSON, MAX_JSON_BYTES))
        if REWARD in numbers or len(numbers) == 1:
            in_range(task.reward_range, scalar(numbers))
        return numbers
    except ValueError as error:
        raise VerifierError(f"{task.id}: {error} The test {_how(result)}") from None


def the_reward(task: TerminalTask, numbers: Mapping[str, float]) -> float:
    """The one that is trained of a task's numbers. Raises VerifierError: there are several and none is "reward"."""
    try:
        return scalar(numbers)
    except ValueError as error:
        raise VerifierError(f"{task.id}: {error}") from None


async def empty(workspace: SandboxWorkspace, task: TerminalTask, folder: str) -> None:
    """Makes a folder of the verifier's anew, whatever became of it. Raises VerifierError."""
    result = await workspace.run(f"{removal(folder)} && mkdir -p {folder}", timeout_s=_SETUP_TIMEOUT_S)
    if result.timed_out or result.exit_code != 0:
        raise VerifierError(f"{task.id}: cannot empty {folder}: it {_how(result)}")


async def run_script(
    workspace: SandboxWorkspace,
    task: TerminalTask,
    script: Script,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> CommandResult:
    """Puts a script's files in place and runs it in the task's working directory."""
    for path, source in script.files.items():
        await workspace.copy_in(source, path if path.startswith("/") else f"{await here(workspace, task)}/{path}")
    return await workspace.run(script.command, timeout_s=timeout_s, cwd=task.workdir, env={**task.env, **(env or {})})


async def here(workspace: SandboxWorkspace, task: TerminalTask) -> str:
    """The task's working directory, without a / at its end."""
    if task.workdir:
        return task.workdir.rstrip("/")
    result = await workspace.run("pwd", timeout_s=_SETUP_TIMEOUT_S)
    return result.output.decode("utf-8", "replace").strip().rstrip("/")


def reward_of_status(status: int) -> float:
    """Status 0 is 1.0 and status 1 is 0.0, which is what pytest and our own tests say.

    Raises:
      ValueError: any other status: pytest's 2 to 5 (interrupted, internal error, usage, nothing collected), a
        missing interpreter (126, 127), a signal (128 and more).
    """
    if status not in (0, 1):
        raise ValueError(f"a final test must exit with 0 or 1, not {status}.")
    return 1.0 - status


def reward_of_summary(status: int, output: str) -> float:
    """1.0 when pytest's short summary (-rA) lists at least one test and none that failed. Skips and expected failures
    pass, unexpected passes fail, as in terminal-bench. All that follows the first summary counts, so a forged one that
    an agent's program prints earlier or later can only add failures.

    A summary without failures is not believed beside a status other than 0, which terminal-bench does not look at: the
    tested program can have printed it and ended pytest. A run-tests.sh that ends so although all is well shows when
    its oracle is checked.

    Raises:
      ValueError: no summary, or no test in it.
    """
    summary = _SUMMARY.search(output)
    if summary is None:
        raise ValueError("pytest's short test summary is missing (run-tests.sh must pass -rA).")
    lines = output[summary.end() :].splitlines()
    outcomes = [match[1] for line in lines if (match := _OUTCOME.match(line))]
    if not outcomes:
        raise ValueError("pytest's short test summary lists no test.")
    passed = all(outcome in ("PASSED", "SKIPPED", "XFAIL") for outcome in outcomes)
    return float(passed and status == 0)


def rewards_of_files(txt: bytes | None, json_: bytes | None) -> dict[str, float]:
    """The numbers of reward.json, or the one of reward.txt as {"reward": ...}.

    Harbor's readers have preferred the one and the other file; so two files that disagree are an error here.

    Raises:
      ValueError: no file, something else than finite numbers in it, or two rewards.
    """
    of_text = None if txt is None else _number(txt.decode("utf-8", "replace").strip(), "reward.txt")
    if json_ is None:
        if of_text is None:
            raise ValueError(f"neither {REWARD_TXT} nor {REWARD_JSON} was written.")
        return {REWARD: of_text}
    numbers = _rewards_of_json(json_.decode("utf-8", "replace"))
    if of_text is not None and scalar(numbers) != of_text:
        raise ValueError(f"reward.txt says {of_text} and reward.json {scalar(numbers)}.")
    return numbers


def scalar(numbers: Mapping[str, float]) -> float:
    """ "reward", else the only number. Raises ValueError: there are several without it, or none."""
    if REWARD not in numbers and len(numbers) != 1:
        raise ValueError(f"reward.json has no 'reward'; it has {', '.join(numbers) or 'nothing'}.")
    return numbers[REWARD] if REWARD in numbers else next(iter(numbers.values()))


def in_range(within: tuple[float, float], reward: float) -> None:
    """Raises ValueError for a number that the task's author does not promise: one of 1e300 would make the whole batch's
    advantages useless."""
    if not within[0] <= reward <= within[1]:
        raise ValueError(
            f"The test says {reward:g}, which is not in [{within[0]:g}, {within[1]:g}]. (A task whose rewards are "
            "others says so: [metadata] reward_range = [lowest, highest].)"
        )


def _rewards_of_json(text: str) -> dict[str, float]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"reward.json is not JSON: {text[:80]!r}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"reward.json must be an object, got {text[:80]!r}.")
    if not values:
        raise ValueError("reward.json has no 'reward'; it has nothing.")
    return {name: _number(value, "reward.json") for name, value in values.items()}


def _number(value: object, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, (str, int, float)) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must hold a finite number, got {str(value)[:80]!r}.")
    return number


def removal(path: str) -> str:
    """The shell command that removes what is at an absolute path, whatever an agent made of it or of the folders above:
    folders without permissions are opened, files in the place of folders go. Links are removed, not followed."""
    quoted = shlex.quote(path)
    above = (
        f'd={quoted}; while d=${{d%/*}}; [ "$d" ]; do '
        'if [ -d "$d" ]; then chmod u+rwx "$d"; else rm -f "$d"; fi; done; chmod u+rwx /'
    )
    return f"{{ {above}; rm -rf {quoted} || chmod -R u+rwx {quoted}; }} >/dev/null 2>&1; rm -rf {quoted}"


async def _read(workspace: SandboxWorkspace, path: str, max_bytes: int) -> bytes | None:
    try:
        return await workspace.read(path, max_bytes)
    except FileNotFoundError:
        return None


def _how(result: CommandResult) -> str:
    how = "ran past its deadline" if result.timed_out else f"ended with status {result.exit_code}"
    output = result.output.decode("utf-8", "replace").strip()
    return f"{how}. Output: {output[-_SHOWN:]}" if output else f"{how}, without output."
