"""Judging a task as Harbor does: of one step or several, in the agent's sandbox or in one of the verifier's own."""

from __future__ import annotations

import fnmatch
from collections.abc import Awaitable, Callable, Mapping, Sequence

from jaxagent.envs.terminal.sandbox_workspace import SandboxWorkspace
from jaxagent.envs.terminal.task import Artifact, Script, TerminalTask
from jaxagent.envs.terminal.verify import here, rewards, run_script
from jaxagent.sandbox.base import MAX_FILE_BYTES, FileError, Sandbox

MAX_ARTIFACT_BYTES = MAX_FILE_BYTES  # of all that one verifier gets

Take = Callable[[TerminalTask], Awaitable[Sandbox]]


class UnusableSandbox(RuntimeError):
    """After the agent no shell starts in its sandbox, nothing can be written, or its artifacts cannot be judged."""


async def judge(workspace: SandboxWorkspace, sandbox: Sandbox, task: TerminalTask, take: Take) -> dict[str, float]:
    """The numbers that the final test says, after the task's own commands have collected what it looks at.

    Args:
      workspace, sandbox: the agent's.
      task: one step, or a task of one.
      take: starts a sandbox with a task's image.

    Raises:
      UnusableSandbox: the agent's sandbox cannot be judged.
      VerifierError: as `verify.rewards`.
    """
    for command, timeout_s in task.collect:  # as the package has it, one that fails says so in the test at most
        await run_script(workspace, task, Script(command), timeout_s)
    if not await workspace.before_verification(task):
        raise UnusableSandbox(f"{task.id}: no shell starts, or nothing can be written, after the agent.")
    if task.verifier is None:
        return await rewards(workspace, task)
    own = await take(task.verifier)
    try:
        await _bring(sandbox, own, task, await here(workspace, task))
        return await rewards(SandboxWorkspace(own), task.verifier)
    finally:
        await own.close()


async def _bring(agents: Sandbox, verifiers: Sandbox, task: TerminalTask, directory: str) -> None:
    """Puts the agent's artifacts at the same places of the verifier's sandbox. Only regular files: no links, devices or
    modes, and no program of the agent's has a part in it. What is not there is left out.

    Raises:
      UnusableSandbox: more than MAX_ARTIFACT_BYTES, or what cannot be there.
    """
    left = MAX_ARTIFACT_BYTES
    for artifact in task.artifacts:
        source = artifact.source.rstrip("/")
        source = source if source.startswith("/") else f"{directory}/{source}"
        for path in await _files(agents, source, artifact):
            try:
                data = await agents.read(path)
            except FileError:
                continue
            left -= len(data)
            if left < 0:
                raise UnusableSandbox(f"{task.id}: its artifacts are more than {MAX_ARTIFACT_BYTES} bytes.")
            try:
                await verifiers.write(path, data)
            except FileError as error:  # the agent has made a folder of a file, or a file of a folder
                raise UnusableSandbox(f"{task.id}: an artifact has no place at its verifier: {error}") from error


async def _files(sandbox: Sandbox, source: str, artifact: Artifact) -> list[str]:
    try:
        entries = await sandbox.list(source)
    except FileError:
        return [source]  # a file, or nothing
    names = [entry.path for entry in entries if entry.kind == "file"]
    return [f"{source}/{name}" for name in names if not _excluded(name, artifact.exclude)]


def _excluded(name: str, patterns: Sequence[str]) -> bool:
    """Whether a path, or a folder above it, matches a pattern as tar's --exclude does: from any of its parts on."""
    parts = name.split("/")
    spans = ["/".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(span, pattern.strip("/")) for span in spans for pattern in patterns)


def falls_short(task: TerminalTask, numbers: Mapping[str, float]) -> bool:
    """Whether a task of several steps ends with this one, which did not reach its `min_reward`."""
    return any(numbers.get(name, float("-inf")) < least for name, least in task.min_rewards.items())


def combined(task: TerminalTask, of_steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The numbers of a whole task of those of its steps that were played, as Harbor's trials combine them.

    "mean" is each number's mean over these steps, a number that one does not say being 0; "final" is the last one's.
    """
    if task.rewards_of == "final" or not of_steps:
        return dict(of_steps[-1]) if of_steps else {}
    names = dict.fromkeys(name for numbers in of_steps for name in numbers)
    return {name: sum(numbers.get(name, 0.0) for numbers in of_steps) / len(of_steps) for name in names}
