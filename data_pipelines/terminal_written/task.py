"""One task: four requests to the writing model, a folder in the Endless Terminals layout, and its checks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from jaxagent.data_pipelines.sandbox_workspaces import ImageWorkspaces
from jaxagent.data_pipelines.terminal_written import prompts
from jaxagent.envs.terminal import folders
from jaxagent.envs.terminal.task import TerminalTask
from jaxagent.envs.terminal.verify import VerifierError, prepare, verify
from jaxagent.rewards.chat_client import CallError, ChatClient
from jaxagent.sandbox.base import SandboxError

TASK_TEMPERATURE, TEST_TEMPERATURE = 1.0, 0.6  # published
BUILD_TIMEOUT_S = 180.0  # published
# Where a task can be lost, in order. "model": no usable completion; "solve": the solver failed in every attempt.
MODEL = "model"  # the stage of an idea of which the endpoint answered nothing: that says nothing of the idea
STAGES = (MODEL, "task", "initial test", "final test", "definition", "image", "idle agent", "solve")


class Rejected(Exception):
    """A task that is not kept. `stage` is one of STAGES; the message says why, in one line."""

    def __init__(self, stage: str, why: str):
        super().__init__(" ".join(why.split())[:500])
        self.stage = stage


@dataclasses.dataclass(frozen=True)
class Files:
    """What the model wrote."""

    description: str
    truth: str
    initial_test: str
    final_test: str
    definition: str

    def name(self, index: int) -> str:
        """Of the folder, as published: task_000012_0a1b2c3d."""
        digest = hashlib.sha256(json.dumps(dataclasses.astuple(self)).encode()).hexdigest()
        return f"task_{index:06d}_{digest[:8]}"

    def write(self, folder: Path) -> None:
        """Writes the folder, which must not exist."""
        folder.mkdir()
        about = {"description": self.description, "truth": self.truth, "name": folder.name}
        (folder / "task.json").write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n", "utf-8")
        (folder / "test_initial_state.py").write_text(self.initial_test, "utf-8")
        (folder / "test_final_state.py").write_text(self.final_test, "utf-8")
        (folder / "container.def").write_text(self.definition, "utf-8")


async def written(chat: ChatClient, seed: int, index: int, base: str, max_tokens: int) -> Files:
    """Asks for the parts of task `index`, one after the other. A reply that cannot be used is not asked for again.

    Raises:
      Rejected: at the stage that failed.
    """

    async def ask(request: str, temperature: float) -> str:
        try:
            return await chat.complete(
                [{"role": "user", "content": request}],
                temperature=temperature,
                max_tokens=max_tokens,
                seed=_seed(seed, index),
            )
        except CallError as error:
            raise Rejected(MODEL, str(error)) from error

    stage = "task"
    try:
        task, truth = prompts.read_task(await ask(prompts.ask_task(prompts.draw(seed, index)), TASK_TEMPERATURE))
        stage = "initial test"
        initial = prompts.read_test(await ask(prompts.ask_initial_test(task, truth), TEST_TEMPERATURE))
        stage = "final test"
        final = prompts.read_test(await ask(prompts.ask_final_test(task, truth, initial), TEST_TEMPERATURE))
        stage = "definition"
        request = prompts.ask_definition(task, truth, initial, base)
        definition = prompts.read_definition(await ask(request, TEST_TEMPERATURE), base)
    except prompts.ReplyError as error:
        raise Rejected(stage, str(error)) from error
    return Files(task, truth, initial, final, definition)


async def checked(folder: Path, workspaces: ImageWorkspaces) -> TerminalTask:
    """Builds the image, runs the initial test in it, and makes sure that an agent that does nothing fails.

    Raises:
      Rejected: one of them says no.
    """
    task = folders.read_task(folder)
    task = dataclasses.replace(task, limits=dataclasses.replace(task.limits, build_timeout_s=BUILD_TIMEOUT_S))
    stage = "image"
    try:
        workspace = await workspaces.open(task)
        try:
            stage = "initial test"
            await prepare(workspace, task)
            stage = "final test"
            if not await workspace.before_verification(task):
                raise VerifierError(f"{task.id}: no shell starts, or nothing can be written, after the solution.")
            reward = await verify(workspace, task)
        finally:
            await workspace.close()
    except (VerifierError, SandboxError) as error:
        raise Rejected(stage, str(error)) from error
    if reward != 0:
        raise Rejected("idle agent", f"the final test gives {reward:g} to an agent that does nothing")
    return task


def _seed(seed: int, index: int) -> int:
    """Of sampling: its own for every task, where the server heeds it."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4]) >> 1
