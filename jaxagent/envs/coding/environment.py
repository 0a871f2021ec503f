"""The coding environment: an agent changes a repository in a sandbox, tests in a fresh one judge the change.

Who plays is `env.play`: an agent program that speaks to the policy through the gateway ("agent"), or the policy itself,
which writes shell commands turn by turn ("built_in"). Tasks, sandboxes and judgement are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from jaxagent.agents import Agent, Shell
from jaxagent.config import ConfigError, SandboxConfig
from jaxagent.config.choice import Choice
from jaxagent.config.errors import Removed
from jaxagent.config.ranges import PositiveInt, Seconds
from jaxagent.envs.base import Environment, Opening, folder_of
from jaxagent.envs.coding import patches
from jaxagent.envs.coding.task import CodingTask, from_task
from jaxagent.envs.terminal import dialogue
from jaxagent.envs.terminal.commands import CommandSettings
from jaxagent.types import Task

SOLVED = "resolved"  # the verdict's component
MAX_CHANGE_BYTES = 1_000_000  # a larger change is worth 0
GUARD_S = 180.0  # on top of the tests' deadline, for taking the change and starting a sandbox (slime's)
INSTRUCTION = (
    "Read PROBLEM_STATEMENT.md in the current directory and solve the problem that it describes. Change source files "
    "only, no tests, leave PROBLEM_STATEMENT.md as it is, and do not commit. When you have finished, say in one line "
    "what you did."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coding(CommandSettings, Environment):
    """Software tasks: a repository, a problem, and tests that show whether it is solved."""

    play: Literal["agent", "built_in"] = "agent"  # an agent program through the gateway, or the policy's own commands
    init_s: Seconds = 600.0  # until the repository is there
    run_s: Seconds = 1800.0  # of the agent; then it is killed
    verify_s: Seconds = 600.0  # of the tests; a change whose tests take longer is worth 0
    verify_timeouts: bool = False  # also judge what an agent left that was killed at run_s; else it gets 0
    verify_empty: bool = True  # without a change, run the tests all the same (slime); else 0 (Polar, SWE-bench)
    ladder: patches.Ladder = "slime"  # how a change is applied; see patches.py
    drop: tuple[str, ...] = patches.STEERS  # files whose change is left out, beside the tests' own
    reward: Literal["resolved", "patch_similarity"] = "resolved"  # 1 or 0; or SWE-RL's likeness to the oracle's patch
    agent: Annotated[Agent, Choice("jaxagent.agents:AGENTS")] = dataclasses.field(default_factory=Shell)  # who plays
    instruction: str = INSTRUCTION  # read by "agent"; {statement} stands for the problem itself
    image_name: str = ""  # of tasks that name no image: "registry/name.{id}:latest", {id} with _1776_ for __
    tools: dialogue.Style = "plain"  # read by "built_in": how commands are written; see terminal/dialogue.py
    command_timeout_s: Seconds = 60.0  # read by "built_in"
    output_chars: PositiveInt = 4_000  # read by "built_in": shown of a command's output
    episode_timeout_s: Seconds = 3_600.0
    sandbox: SandboxConfig = dataclasses.field(
        default_factory=lambda: SandboxConfig(warm=4, memory_mb=1024, disk_mb=256, files=20_000, processes=128)
    )

    solves = True
    score = SOLVED
    removed: ClassVar = {"max_change_bytes": Removed(f"it is {MAX_CHANGE_BYTES:,}", MAX_CHANGE_BYTES)}

    def __post_init__(self) -> None:
        """Refuses settings under which an agent's own slowness would look like a failure of ours."""
        most_s = self.init_s + self.run_s + self.verify_s + GUARD_S
        if most_s > self.episode_timeout_s:
            raise ConfigError(
                f"env.episode_timeout_s={self.episode_timeout_s:g} must be at least env.init_s + env.run_s + "
                f"env.verify_s + {GUARD_S:g} = {most_s:g}."
            )
        try:
            _ = self.instruction.format(statement=""), self.image_name.format(id="")
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"env.instruction may name {{statement}} and env.image_name {{id}}, and no other braces ({error})."
            ) from None

    @property
    def rollout(self) -> str:  # type: ignore[override]
        """Who plays."""
        return {
            "agent": "jaxagent.gateway.harness:HarnessRollout",
            "built_in": "jaxagent.rollout.multi_turn:MultiTurn",
        }[self.play]

    @property
    def calls(self) -> str:  # type: ignore[override]
        """The counter of tool calls; an agent program's are its own affair."""
        return "commands" if self.play == "built_in" else ""

    @property
    def stop_strings(self) -> Sequence[str]:  # type: ignore[override]
        """What ends a command."""
        return super().stop_strings if self.play == "built_in" else ()

    def as_checked(self) -> Coding:
        """The same judgement, by the tests also of nothing, and without a program."""
        return dataclasses.replace(self, play="built_in", verify_empty=True)

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], Any]]:
        """Finds a back end that works, builds the tasks' own images and begins to fill the pool."""
        from jaxagent.envs.coding.attempts import AgentCodingAttempt, BuiltInAttempt  # late: with every back end
        from jaxagent.sandbox.images.many import TaskImage
        from jaxagent.sandbox.of_config import build_ahead, open_sandboxes

        folder = opening.dataset and folder_of(opening.dataset)

        def read(task: Task) -> CodingTask:
            coding_task = from_task(task, folder)
            if not coding_task.image and not coding_task.archive and not coding_task.files:
                if not self.image_name:
                    raise ConfigError(
                        f"task '{task.id}' names no image and brings no files: set env.image_name, for example "
                        "'swebench/sweb.eval.x86_64.{id}:latest'."
                    )
                name = self.image_name.format(id=task.id.replace("__", "_1776_").lower())
                coding_task = dataclasses.replace(coding_task, image=name)
            if self.reward == "patch_similarity" and not coding_task.patch:
                raise ConfigError(f"task '{task.id}' has no oracle's patch, which env.reward='patch_similarity' needs.")
            return coding_task

        def image(task: CodingTask) -> TaskImage | None:
            return TaskImage(id=task.id, name=task.image, directory=task.workdir) if task.image else None

        coding_tasks = [read(task) for task in opening.tasks]
        with open_sandboxes(opening, self.sandbox) as sandboxes:
            if self.sandbox.software and self.sandbox.software.images:
                build_ahead(opening, sandboxes, map(image, coding_tasks))
            kind = AgentCodingAttempt if self.play == "agent" else BuiltInAttempt
            yield lambda task: kind(read(task), self, lambda own: sandboxes.take(image(own)))


def statement_file(task: CodingTask) -> Path:
    """Where an agent program finds the problem."""
    return Path(task.workdir) / "PROBLEM_STATEMENT.md"
