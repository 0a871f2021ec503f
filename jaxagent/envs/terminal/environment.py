"""The terminal environment: the policy writes commands, a shell in a sandbox of its own runs them, a test judges.

Task (a row as `terminal_tasks.rows` reads it) + a sandbox in -> observations and a verdict out. How an attempt ends:

    it says that it is done        the test runs
    its turns are used up          the test runs; the last turn's command has run too
    its time is over               reward 0, no test (published by Endless Terminals); Harbor's tests run
    its tokens ran out             reward 0, no test (published by ECHO), or the test, by `verify_overlong`; Harbor's do
    it broke its own sandbox       reward 0: the test cannot start, nothing can be written, or the sandbox or the test
                                   was killed for having used up the sandbox's memory ("broken_places")
    sandbox, setup or test fail    an exception: the episode failed, which is no reward of 0

The test is brought in only at the end and runs in fresh processes, after the agent's have been stopped.

A task of several steps is one episode: where a step has ended by its agent's word or its time, it is judged, and what
the agent is shown next is the next step's instruction. Steps that turns or tokens did not suffice for are judged too,
after nothing was done in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxagent.config import ConfigError, SandboxConfig
from jaxagent.config.ranges import PositiveFloat, PositiveInt, Seconds, SecondsOrZero
from jaxagent.envs.base import Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.terminal import dialogue, folders, replies, rows, sandbox_workspace
from jaxagent.envs.terminal.commands import COMMAND_COUNTERS, ENTER_TIMEOUT_S, CommandAttempt, CommandSettings
from jaxagent.envs.terminal.judging import Take, UnusableSandbox, combined, falls_short, judge
from jaxagent.envs.terminal.servers import STOP, Servers, skills
from jaxagent.envs.terminal.task import TerminalTask
from jaxagent.envs.terminal.verify import REWARD_FOLDER, VerifierError, empty, prepare, solve, the_reward
from jaxagent.types import StopReason, Task, TokenKind

if TYPE_CHECKING:
    from jaxagent.sandbox.images.many import TaskImage

SOLVED = "solved"  # the verdict's component


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

    solves = True
    score = SOLVED
    calls = "commands"

    def __post_init__(self) -> None:
        """Refuses settings under which the attempt's own time could never be over."""
        if self.agent_timeout_s >= self.episode_timeout_s:
            raise ConfigError(
                f"env.agent_timeout_s={self.agent_timeout_s:g} must be less than env.episode_timeout_s="
                f"{self.episode_timeout_s:g}, which makes an episode a failure and also covers start and verification."
            )

    def rows_of(self, source: Path) -> list[dict[str, Any]] | None:
        """The rows of terminal tasks on disk, a task's folder or a folder of such; None = there are none.

        Raises:
          ConfigError: a task that is malformed, or that no test judges.
        """
        if not folders.holds_tasks(source):
            return None
        tasks = folders.read_tasks(source)
        if untested := [task.id for task in tasks if task.final_test is None]:
            raise ConfigError(f"{source}: no test judges {', '.join(untested[:3])}.")
        return [rows.folder_row(task) for task in tasks]

    def content(self, task: Task) -> str:
        """A digest of the task's folder, where it has one."""
        return rows.folder_digest(task)

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
                build_ahead(opening, sandboxes, [own_image(one) for task in terminal_tasks for one in places(task)])
            if more := beyond(self.sandbox, [one for task in terminal_tasks for one in places(task)]):
                opening.note(more)
            yield lambda task: TerminalAttempt(task, self, lambda own: sandboxes.take(own_image(own)))


def places(task: TerminalTask) -> list[TerminalTask]:
    """What has an image of its own: the task, and the verifiers that have a sandbox of their own."""
    return [task, *(part.verifier for part in task.steps or (task,) if part.verifier is not None)]


def beyond(sandbox: SandboxConfig, tasks: Sequence[TerminalTask]) -> str:
    """What to say of Harbor's tasks whose authors ask for more than a sandbox has; "" = none does."""
    parts = []
    for name, of_task in (("memory_mb", "memory_mb"), ("disk_mb", "storage_mb"), ("cpus", "cpus")):
        has, asked = getattr(sandbox, name), [getattr(t.limits, of_task) for t in tasks if of_task in t.limits.stated]
        if more := [value for value in asked if value > has]:
            parts.append(f"{len(more)} up to {max(more):g} (env.sandbox.{name}={has:g})")
    return f"tasks that may use more than a sandbox has: {', '.join(parts)}" if parts else ""


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
        user=task.user,
    )


class TerminalAttempt(CommandAttempt):
    """One attempt at one task."""

    def __init__(self, task: Task, config: Terminal, take: Take):
        super().__init__(config)
        self._task = _with_limits(rows.from_task(task), config)
        self._of_steps: list[dict[str, float]] = []  # what the tests of the steps so far have said
        self._over = False  # no step is left to judge
        self._take = take
        self._workspace: sandbox_workspace.SandboxWorkspace | None = None
        self._servers: Servers | None = None
        self.counters: dict[str, float] = dict.fromkeys((*COMMAND_COUNTERS, "unverified", "broken_places"), 0.0)
        if self._task.servers:
            self.stop_strings = (*self.stop_strings, *([STOP] if self.stop_strings else []))
            self.counters |= {"calls": 0.0, "failed_calls": 0.0}

    @property
    def _steps(self) -> Sequence[TerminalTask]:
        return self._task.steps or (self._task,)

    async def start(self) -> Sequence[Message]:
        """Brings the initial state about; the attempt's time begins when that is done."""
        self._sandbox = await self._take(self._task)
        self._workspace = sandbox_workspace.SandboxWorkspace(self._sandbox)
        await prepare(self._workspace, self._task)
        if self._task.setup is None:  # else one has run; an image without a shell would look like the agent's work
            result = await self._workspace.run(":", timeout_s=ENTER_TIMEOUT_S, cwd="/")
            if result.exit_code != 0 or result.timed_out:
                raise VerifierError(f"{self._task.id}: no shell starts in its image: {result.output.strip()[:200]!r}")
        if self._task.steps:
            await prepare(self._workspace, self._steps[0])
        if wanted := {step.same_user for step in self._steps} - {""}:
            await self._check_user(wanted)
        self._oom_kills = await self._sandbox.oom_kills()
        return self._config.messages(await self._enter(self._steps[0]))

    async def _enter(self, step: TerminalTask) -> str:
        """The agent's shell goes where it starts, and its servers start; gives what the agent is told. Its time begins.

        Raises:
          VerifierError: one of them does not start.
        """
        assert self._sandbox is not None
        enter = [f"cd -- {shlex.quote(step.workdir)}"] if step.workdir else []
        enter += [f"export {name}={shlex.quote(value)}" for name, value in step.env.items()]
        if enter:
            result = await self._sandbox.run(" && ".join(enter), ENTER_TIMEOUT_S, 1000)
            if result.exit_code != 0:
                raise VerifierError(f"{step.id}: the shell cannot start in {step.workdir!r}")
        parts = [step.instruction]
        if step.servers:
            self._servers = Servers(step, self._sandbox)
            await self._servers.open()
            parts.append(self._servers.prompt)
        if step.skills_dir:
            parts.append(await skills(self._sandbox, step.skills_dir))
        self._ends_at = time.monotonic() + step.limits.agent_timeout_s
        return "\n\n".join(filter(None, parts))

    async def _check_user(self, wanted: set[str]) -> None:
        """Raises VerifierError where the verifier is to run as another user than the sandbox's one."""
        assert self._workspace is not None
        for user in map(shlex.quote, wanted):
            command = f'[ "$(id -u -- {user} || echo {user})" = "$(id -u)" ]'
            if (await self._workspace.run(command, timeout_s=ENTER_TIMEOUT_S)).exit_code != 0:
                raise VerifierError(
                    f"{self._task.id}: key 'verifier.user' is {user}, and a sandbox has one user for all its programs: "
                    "say the same as agent.user, or verifier.environment_mode = 'separate'."
                )

    async def step(self, action: str) -> Step:
        """Makes a call of a server's tool, runs a command, or ends a step, after which the next one begins."""
        step = await self._call(action) or await super().step(action)
        if step.stop_reason not in (StopReason.ANSWER, StopReason.TIME_LIMIT) or self._turns_left <= 0:
            return step
        if len(self._of_steps) + 1 >= len(self._steps):
            return step
        try:
            text = await self._judge_step()
        except RuntimeError as failure:
            if not await self._is_broken(self._oom_kills, failure):
                raise
            self._sandbox_lost = True
            text = None
        if text is None:
            return step
        role = dialogue.ROLES[self._config.tools] and "user"
        return Step(Observation(((text + ("\n" if not role else ""), TokenKind.OBSERVATION),), role))

    async def _call(self, action: str) -> Step | None:
        """What a call of a server's tool gives; None where the turn has none, or comes too late."""
        left_s = self._ends_at - time.monotonic()
        if self._servers is None or left_s <= 0 or replies.parse(self._config.tools, action).done:
            return None
        if (answer := await self._servers.answer(action, left_s)) is None:
            return None
        self._turns_left -= 1
        text, counter = answer
        self.counters[counter] += 1
        if self._turns_left <= 0:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        role = dialogue.ROLES[self._config.tools]
        return Step(Observation(((text[: self._config.output_chars] + "\n", TokenKind.OBSERVATION),), role))

    async def _judge_step(self) -> str | None:
        """Judges the step that is played and begins the next one: gives its instruction; None = there is none.

        A later step whose setup fails counts as one in which nothing was reached: the agent may have seen to that.
        """
        assert self._workspace is not None and self._sandbox is not None
        step = self._steps[len(self._of_steps)]
        if self._servers is not None:
            await self._servers.close()
        numbers = await judge(self._workspace, self._sandbox, step, self._take)
        self._of_steps.append(numbers)
        self._over = len(self._of_steps) == len(self._steps) or falls_short(step, numbers)
        if self._over:
            return None
        step = self._steps[len(self._of_steps)]
        for folder in ("/tests", REWARD_FOLDER):  # nothing of the test is there for the agent
            await empty(self._workspace, step, folder)
        try:
            await prepare(self._workspace, step)
            return await self._enter(step)
        except VerifierError:
            self._of_steps.append({})
            self._over = True
            return None

    async def solve(self) -> bool:
        """Runs the task's own solution, in place of an agent; False = it has none."""
        if self._workspace is None or self._task.oracle is None:
            return False
        while True:
            await solve(self._workspace, self._steps[len(self._of_steps)])
            if len(self._of_steps) + 1 >= len(self._steps) or await self._judge_step() is None:
                return True

    async def verify(self, transcript: Transcript) -> Verdict:
        """Judges the final state, or gives 0 to an attempt that was too long; see the module."""
        overlong = transcript.ended == StopReason.TOKEN_LIMIT and not self._config.verify_overlong
        if (overlong or transcript.ended == StopReason.TIME_LIMIT) and not self._task.judged_when_cut:
            self.counters["unverified"] += 1
            return Verdict(0.0, {SOLVED: 0.0})
        if self._sandbox_lost:
            return self._broken()
        oom_kills = await self._sandbox.oom_kills()
        try:
            while not self._over:
                await self._judge_step()
        except RuntimeError as failure:  # of the verifier or the sandbox
            if not await self._is_broken(oom_kills, failure):
                raise failure
            return self._broken()
        numbers = combined(self._task, self._of_steps)
        reward = the_reward(self._task, numbers) if numbers else 0.0
        return Verdict(reward, {SOLVED: float(reward >= self._config.solved_reward)})

    async def close(self) -> None:
        """Ends the servers' sessions and the sandbox."""
        if self._servers is not None:
            await self._servers.close()
        await super().close()

    async def _is_broken(self, oom_kills: int | None, failure: Exception) -> bool:
        """Whether a test that failed did so by the agent's doing: memory ran out meanwhile, or even a shell has no room
        left, or the sandbox is gone and the agent had used up its memory."""
        if isinstance(failure, UnusableSandbox) or await self._memory_ran_out(oom_kills):
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
    if task.steps:
        task = dataclasses.replace(task, steps=[_with_limits(step, config) for step in task.steps])
    limits = dataclasses.replace(
        task.limits,
        agent_timeout_s=config.agent_timeout_s or task.limits.agent_timeout_s,
        verifier_timeout_s=config.verifier_timeout_s or task.limits.verifier_timeout_s,
    )
    return dataclasses.replace(task, limits=limits, initial_test=task.initial_test if config.initial_test else None)
