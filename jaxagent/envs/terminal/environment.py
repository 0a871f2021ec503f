"""The terminal environment: the policy writes commands, a shell in a sandbox of its own runs them, a test judges.

Task (a row as `terminal_tasks.rows` reads it) + a sandbox in -> observations and a verdict out. How an attempt ends:

    it says that it is done        the test runs
    its turns are used up          the test runs; the last turn's command has run too
    its time is over               reward 0, no test (published by Endless Terminals)
    its tokens ran out             reward 0, no test (published by ECHO), or the test, by `verify_overlong`
    it broke its own sandbox       reward 0: the test cannot start, nothing can be written, or the sandbox or the test
                                   was killed for having used up the sandbox's memory ("broken_places")
    sandbox, setup or test fail    an exception: the episode failed, which is no reward of 0

The test is brought in only at the end and runs in fresh processes, after the agent's have been stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxagent.config import ConfigError, SandboxConfig
from jaxagent.config.ranges import PositiveFloat, PositiveInt, Seconds, SecondsOrZero
from jaxagent.envs.base import Environment, Message, Opening, Transcript, Verdict
from jaxagent.envs.terminal import rows, sandbox_workspace
from jaxagent.envs.terminal.commands import COMMAND_COUNTERS, ENTER_TIMEOUT_S, CommandAttempt, CommandSettings
from jaxagent.envs.terminal.task import TerminalTask
from jaxagent.envs.terminal.verify import VerifierError, prepare, solve, verify
from jaxagent.sandbox.base import Sandbox
from jaxagent.types import StopReason, Task

if TYPE_CHECKING:
    from jaxagent.sandbox.images.many import TaskImage

SOLVED = "solved"  # the verdict's component

Take = Callable[[TerminalTask], Awaitable[Sandbox]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terminal(CommandSettings, Environment):
    """Terminal tasks: every attempt has a shell in a sandbox of its own."""

    tools: Literal["plain", "endless", "qwen3_xml"] = "endless"  # how commands are written; see dialogue.py
    command_timeout_s: Seconds = 10.0
    output_chars: PositiveInt = 1_000  # of a command's output, at most
    agent_timeout_s: SecondsOrZero = 60.0  # the attempt's own, then reward 0, not verified; 0 = what the task says
    verifier_timeout_s: SecondsOrZero = 0.0  # 0 = what the task says
    verify_overlong: bool = False  # also judge an attempt whose tokens ran out; else it gets 0 without verification
    initial_test: bool = False  # run the test of the initial state, if there is one, at the start of every attempt
    solved_reward: PositiveFloat = 1.0  # from which an attempt counts as solved, in reports
    sandbox: SandboxConfig = dataclasses.field(default_factory=SandboxConfig)

    score = SOLVED
    calls = "commands"

    def __post_init__(self) -> None:
        """Refuses settings under which the attempt's own time could never be over."""
        if self.agent_timeout_s >= self.episode_timeout_s:
            raise ConfigError(
                f"env.agent_timeout_s={self.agent_timeout_s:g} must be less than env.episode_timeout_s="
                f"{self.episode_timeout_s:g}, which makes an episode a failure and also covers start and verification."
            )

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], TerminalAttempt]]:
        """Finds a back end that works, builds the tasks' own images and begins to fill the pool."""
        terminal_tasks = [rows.from_task(task) for task in opening.tasks]
        from jaxagent.data import files, sources
        from jaxagent.sandbox.of_config import build_ahead, open_sandboxes  # late: loads every back end

        with open_sandboxes(opening, self.sandbox) as sandboxes:
            if self.sandbox.software and self.sandbox.software.images:
                if opening.dataset is not None and sources.TRAIN in files.splits(opening.dataset):
                    train = sources.load_tasks(opening.dataset, sources.TRAIN, need_answers=False)
                    terminal_tasks += map(rows.from_task, train)  # before their attempts count
                build_ahead(opening, sandboxes, map(own_image, terminal_tasks))
            yield lambda task: TerminalAttempt(task, self, lambda own: sandboxes.take(own_image(own)))


def own_image(task: TerminalTask) -> TaskImage | None:
    """The image that the task's folder describes, if it does."""
    from jaxagent.sandbox.images.many import TaskImage

    image = task.image
    if not (image.name or image.dockerfile or image.definition):
        return None
    return TaskImage(
        id=task.id,
        dockerfile=image.dockerfile,
        definition=image.definition,
        name=image.name,
        context=image.context or Path(),
        timeout_s=task.limits.build_timeout_s,
        directory=task.workdir or "/",
    )


class TerminalAttempt(CommandAttempt):
    """One attempt at one task."""

    def __init__(self, task: Task, config: Terminal, take: Take):
        super().__init__(config)
        self._task = _with_limits(rows.from_task(task), config)
        self._take = take
        self._workspace: sandbox_workspace.SandboxWorkspace | None = None
        self.counters: dict[str, float] = dict.fromkeys((*COMMAND_COUNTERS, "unverified", "broken_places"), 0.0)

    async def start(self) -> Sequence[Message]:
        """Brings the initial state about; the attempt's time begins when that is done."""
        self._sandbox = await self._take(self._task)
        self._workspace = sandbox_workspace.SandboxWorkspace(self._sandbox)
        await prepare(self._workspace, self._task)
        if self._task.setup is None:  # else one has run; an image without a shell would look like the agent's work
            result = await self._workspace.run(":", timeout_s=ENTER_TIMEOUT_S, cwd="/")
            if result.exit_code != 0 or result.timed_out:
                raise VerifierError(f"{self._task.id}: no shell starts in its image: {result.output.strip()[:200]!r}")
        if enter := _enter(self._task.workdir, self._task.env):
            result = await self._sandbox.run(enter, ENTER_TIMEOUT_S, 1000)
            if result.exit_code != 0:
                raise VerifierError(f"{self._task.id}: the shell cannot start in {self._task.workdir!r}")
        self._oom_kills = await self._sandbox.oom_kills()
        self._ends_at = time.monotonic() + self._task.limits.agent_timeout_s
        return self._config.messages(self._task.instruction)

    async def solve(self) -> bool:
        """Runs the task's own solution, in place of an agent; False = it has none."""
        if self._workspace is None or self._task.oracle is None:
            return False
        await solve(self._workspace, self._task)
        return True

    async def verify(self, transcript: Transcript) -> Verdict:
        """Judges the final state, or gives 0 to an attempt that was too long; see the module."""
        overlong = transcript.ended == StopReason.TOKEN_LIMIT and not self._config.verify_overlong
        if overlong or transcript.ended == StopReason.TIME_LIMIT:
            self.counters["unverified"] += 1
            return Verdict(0.0, {SOLVED: 0.0})
        if self._sandbox_lost:
            return self._broken()
        oom_kills = await self._sandbox.oom_kills()
        try:
            if not await self._workspace.before_verification(self._task):
                return self._broken()
            reward = await verify(self._workspace, self._task)
        except RuntimeError as failure:  # of the verifier or the sandbox
            if not await self._is_broken(oom_kills):
                raise failure
            return self._broken()
        return Verdict(reward, {SOLVED: float(reward >= self._config.solved_reward)})

    async def _is_broken(self, oom_kills: int | None) -> bool:
        """Whether a test that failed did so by the agent's doing: memory ran out meanwhile, or even a shell has no room
        left, or the sandbox is gone and the agent had used up its memory."""
        if await self._memory_ran_out(oom_kills):
            return True
        try:
            return not await self._workspace.is_usable(self._task, sandbox_workspace.ROOM_BYTES)
        except RuntimeError:
            return await self._memory_ran_out(self._oom_kills)

    def _broken(self) -> Verdict:
        self.counters["broken_places"] += 1
        return Verdict(0.0, {SOLVED: 0.0})


def _with_limits(task: TerminalTask, config: Terminal) -> TerminalTask:
    """The task with the config's time limits, and without its initial test where that is not wanted."""
    limits = dataclasses.replace(
        task.limits,
        agent_timeout_s=config.agent_timeout_s or task.limits.agent_timeout_s,
        verifier_timeout_s=config.verifier_timeout_s or task.limits.verifier_timeout_s,
    )
    return dataclasses.replace(task, limits=limits, initial_test=task.initial_test if config.initial_test else None)


def _enter(workdir: str, env: Mapping[str, str]) -> str:
    """The shell command that goes where the task's agent starts; "" = it is there already."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    return " && ".join([*([f"cd -- {shlex.quote(workdir)}"] if workdir else []), *exports])
