"""Starting a task in a workspace, where commands run, and judging what an agent left there.

Verification runs in a fresh process that the agent never touched, after everything left at the tests' paths has been
removed. When the verifier does not say a reward, that is a `VerifierError`, which an environment must let through
(StopReason.ENV_ERROR): it is never a reward of 0.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxagent.envs.terminal.task import Script, TerminalTask
from jaxagent.sandbox.base import CommandResult

if TYPE_CHECKING:
    from jaxagent.envs.terminal.sandbox_workspace import SandboxWorkspace

REWARD_TXT, REWARD_JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
_REWARD_FOLDER = "/logs/verifier"
MAX_TXT_BYTES, MAX_JSON_BYTES = 4096, 65536
_SETUP_TIMEOUT_S = 60.0
_SHOWN = 400  # characters of output in an error
_SUMMARY = re.compile(r"^=+ *short test summary info *=+$", re.MULTILINE)
_OUTCOME = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


class VerifierError(RuntimeError):
    """The task's own machinery failed, or gave no reward. Says nothing about the agent."""


async def prepare(workspace: SandboxWorkspace, task: TerminalTask) -> None:
    """Brings the initial state about and, where the task has one, runs its initial test. Raises VerifierError: either
    failed."""
    for part, script in (("setup", task.setup), ("initial test", task.initial_test)):
        if script is not None:
            timeout_s = task.limits.verifier_timeout_s if script is task.initial_test else _SETUP_TIMEOUT_S
            result = await run_script(workspace, task, script, timeout_s)
            if result.timed_out or result.exit_code != 0:
                raise VerifierError(f"{task.id}: the {part} {_how(result)}")
    if task.looks_at_processes:
        await workspace.remember_processes()


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
    """Runs the final test and returns the reward it says. Raises VerifierError: the test is missing, timed out, or said
    no reward of the task's range."""
    if task.final_test is None:
        raise VerifierError(f"{task.id} has no final test.")
    if task.reward_from == "reward_file":  # whatever the agent wrote there is no reward
        command = f"{removal(_REWARD_FOLDER)} && mkdir -p {_REWARD_FOLDER}"
        result = await workspace.run(command, timeout_s=_SETUP_TIMEOUT_S)
        if result.timed_out or result.exit_code != 0:
            raise VerifierError(f"cannot make an empty {_REWARD_FOLDER}: it {_how(result)}")
    result = await run_script(workspace, task, task.final_test, task.limits.verifier_timeout_s, task.verifier_env)
    if result.timed_out:
        raise VerifierError(f"{task.id}: the final test {_how(result)}")
    try:
        if task.reward_from == "exit_status":
            return reward_of_status(result.exit_code)
        if task.reward_from == "pytest_summary":
            return reward_of_summary(result.exit_code, result.output.decode("utf-8", "replace"))
        await workspace.stop_processes()  # a program of the agent's that the test started may wait for the reward
        txt = await _read(workspace, REWARD_TXT, MAX_TXT_BYTES)
        return reward_of_files(txt, await _read(workspace, REWARD_JSON, MAX_JSON_BYTES), task.reward_range)
    except ValueError as error:
        raise VerifierError(f"{task.id}: {error} The test {_how(result)}") from None


async def run_script(
    workspace: SandboxWorkspace,
    task: TerminalTask,
    script: Script,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> CommandResult:
    """Puts a script's files in place and runs it in the task's working directory."""
    for path, source in script.files.items():
        await workspace.copy_in(source, path)
    return await workspace.run(script.command, timeout_s=timeout_s, cwd=task.workdir, env={**task.env, **(env or {})})


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


def reward_of_files(txt: bytes | None, json_: bytes | None, within: tuple[float, float] = (0.0, 1.0)) -> float:
    """The number in reward.txt, or "reward" (else the only number) in reward.json.

    Harbor's readers have preferred the one and the other file; so two files that disagree are an error here. So is a
    number that the task's author does not promise: one of 1e300 would make the whole batch's advantages useless.

    Args:
      txt: content of reward.txt, None = it is not there.
      json_: content of reward.json, likewise.
      within: the lowest and the highest reward.

    Raises:
      ValueError: no file, no finite number in it, several numbers without one called "reward", two rewards, or one
        outside of the range.
    """
    rewards = {}
    if txt is not None:
        rewards["reward.txt"] = _number(txt.decode("utf-8", "replace").strip(), "reward.txt")
    if json_ is not None:
        rewards["reward.json"] = _reward_of_json(json_.decode("utf-8", "replace"))
    if not rewards:
        raise ValueError(f"neither {REWARD_TXT} nor {REWARD_JSON} was written.")
    if len(set(rewards.values())) > 1:
        raise ValueError(f"reward.txt says {rewards['reward.txt']} and reward.json {rewards['reward.json']}.")
    name, reward = next(iter(rewards.items()))
    if not within[0] <= reward <= within[1]:
        raise ValueError(
            f"{name} says {reward:g}, which is not in [{within[0]:g}, {within[1]:g}]. (A task whose rewards are others "
            "says so: [metadata] reward_range = [lowest, highest].)"
        )
    return reward


def _reward_of_json(text: str) -> float:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"reward.json is not JSON: {text[:80]!r}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"reward.json must be an object, got {text[:80]!r}.")
    if "reward" not in values and len(values) != 1:
        raise ValueError(f"reward.json has no 'reward'; it has {', '.join(values) or 'nothing'}.")
    return _number(values["reward"] if "reward" in values else next(iter(values.values())), "reward.json")


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
