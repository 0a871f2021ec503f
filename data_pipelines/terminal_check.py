"""Checks tasks by running them: the initial test must pass, the oracle must score 1 and an idle agent 0.

Used by `python -m data_pipelines.terminal check` and `python -m data_pipelines.harbor check`. Each attempt has a
workspace of its own. What fails is a named finding; nothing is dropped in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from jaxagent.data_pipelines.home_workspace import HomeWorkspace
from jaxagent.envs.terminal.sandbox_workspace import SandboxWorkspace
from jaxagent.envs.terminal.task import TerminalTask
from jaxagent.envs.terminal.verify import VerifierError, prepare, solve, verify

PROGRESS_TASKS = 100  # between two lines that say how far the check is
Open = Callable[[TerminalTask], Awaitable[SandboxWorkspace | HomeWorkspace]]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came of one task."""

    id: str
    oracle: float | None  # None: `error` says why there is none
    idle: float | None
    error: str = ""
    oracle_said: str = ""  # output of the oracle when it did not score 1

    @property
    def good(self) -> bool:
        """The oracle scores 1 and the idle agent 0."""
        return self.oracle == 1.0 and self.idle == 0.0

    def __str__(self) -> str:
        if self.error:
            return f"{self.id}: {self.error}"
        said = f" The oracle printed: {self.oracle_said[-300:]}" if self.oracle_said else ""
        return f"{self.id}: the oracle scored {self.oracle:g} and an idle agent {self.idle:g}.{said}"


async def check(task: TerminalTask, open_workspace: Open) -> Finding:
    """Runs oracle and idle agent on one task."""
    oracle = idle = None
    try:
        oracle, said = await _attempt(task, open_workspace, works=True)
        idle, _ = await _attempt(task, open_workspace, works=False)
    except RuntimeError as error:  # of the verifier or of the sandbox: one task's, never the end of the check
        return Finding(task.id, oracle, idle, " ".join(str(error).split()))
    return Finding(task.id, oracle, idle, oracle_said="" if oracle == 1.0 else said)


async def check_all(
    tasks: Sequence[TerminalTask], open_workspace: Open, jobs: int, progress: Callable[[Finding], None] = lambda _: None
) -> list[Finding]:
    """`check` on every task, `jobs` at once; findings in the order of the tasks."""
    gate = asyncio.Semaphore(jobs)

    async def one(task: TerminalTask) -> Finding:
        async with gate:
            finding = await check(task, open_workspace)
            progress(finding)
            return finding

    return list(await asyncio.gather(*map(one, tasks)))


def report(
    tasks: Sequence[TerminalTask],
    open_workspace: Open,
    jobs: int,
    opened: contextlib.AbstractAsyncContextManager[object] | None = None,
) -> int:
    """Checks, prints what is wrong and a summary, and returns the exit status: 0 when every task is good.

    Args:
      tasks: what to check.
      open_workspace: gives a workspace that nobody used.
      jobs: tasks at once.
      opened: what the workspaces need for as long as tasks are checked.

    Raises:
      ConfigError: `opened` cannot be opened here.
    """
    started = time.monotonic()
    done = 0

    def progress(finding: Finding) -> None:
        nonlocal done
        done += 1
        if not finding.good:
            print(finding, flush=True)
        if done % PROGRESS_TASKS == 0:
            print(f"{done} of {len(tasks)} tasks, {time.monotonic() - started:.0f} s", flush=True)

    async def everything() -> list[Finding]:
        async with opened or contextlib.nullcontext():
            return await check_all(tasks, open_workspace, jobs, progress)

    findings = asyncio.run(everything())
    oracle = sum(finding.oracle == 1.0 for finding in findings)
    idle = sum(finding.idle == 0.0 for finding in findings)
    errors = sum(bool(finding.error) for finding in findings)
    levels = ", ".join(f"{n} of level {level}" for level, n in sorted(Counter(task.level for task in tasks).items()))
    print(
        f"{len(findings)} tasks ({levels}): oracle scores 1 on {oracle}, an idle agent 0 on {idle}, {errors} errors; "
        f"{time.monotonic() - started:.1f} s"
    )
    return 0 if findings and all(finding.good for finding in findings) else 1


async def _attempt(task: TerminalTask, open_workspace: Open, works: bool) -> tuple[float, str]:
    workspace = await open_workspace(task)
    try:
        await prepare(workspace, task)
        said = (await solve(workspace, task)).output.decode("utf-8", "replace") if works else ""
        if not await workspace.before_verification(task):
            raise VerifierError(f"{task.id}: no shell starts, or nothing can be written, after the solution.")
        return await verify(workspace, task), said
    finally:
        await workspace.close()


if __name__ == "__main__":
    sys.exit("error: Say python -m data_pipelines.terminal check, or python -m data_pipelines.harbor check.")
