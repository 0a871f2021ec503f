"""Where candidates are tried: sandboxes with a repository, in which files are exchanged between runs of its tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType

from jaxagent.envs.coding import patches, repository, verify
from jaxagent.envs.coding.task import CodingTask
from jaxagent.sandbox.base import Sandbox, SandboxError

RUNS_PER_SANDBOX = 25  # what tests leave in /tmp adds up

Take = Callable[[], Awaitable[Sandbox]]


@dataclasses.dataclass(frozen=True)
class Run:
    """What the tests said; empty where they did not end, or said nothing."""

    outcomes: Mapping[str, str]
    messages: Mapping[str, str]


class Bench:
    """Runs the tests of one repository, again and again.

    Args:
      take: gives a sandbox.
      task: the repository in its good state, with its tools.
      timeout_s: of one run.
    """

    def __init__(self, take: Take, task: CodingTask, timeout_s: float):
        self._take, self._task, self._timeout_s = take, task, timeout_s
        self._sandbox: Sandbox | None = None
        self._left = 0

    async def run(self, broken: Mapping[str, str], good: Mapping[str, bytes], tests: Sequence[str]) -> Run:
        """The tests of these files, with some files in a broken form, which is undone afterwards."""
        if self._left == 0 or self._sandbox is None:
            await self.close()
            self._sandbox, self._left = await self._take(), RUNS_PER_SANDBOX
            await repository.bring(self._sandbox, self._task)
        self._left -= 1
        sandbox = self._sandbox
        try:
            for path, text in broken.items():
                await sandbox.write(f"{self._task.workdir}/{path}", text.encode())
            done, found = await verify.run_tests(sandbox, self._task, "pytest", tests, (), self._timeout_s)
            for path in broken:
                await sandbox.write(f"{self._task.workdir}/{path}", good[path])
        except SandboxError:  # a bug can also fill the disk, or take all memory
            self._left = 0
            return Run({}, {})
        if found is None or found["canary"] not in ("FAILED", "ERROR"):
            self._left = 0  # a run that did not end has left who knows what
            return Run({}, {})
        del done
        return Run(found["outcomes"], found["messages"])

    async def close(self) -> None:
        """Ends the sandbox."""
        if self._sandbox is not None:
            await self._sandbox.close()
        self._sandbox = None

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def check(take: Take, task: CodingTask, patch: str, timeout_s: float) -> verify.Judgement:
    """A change's judgement in fresh sandboxes, by the verifier that a run uses."""
    return await verify.judge(take, task, patch, "slime", patches.STEERS, timeout_s)
