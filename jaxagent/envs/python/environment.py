"""The Python environment: the policy writes programs, a sandbox runs them, what they print comes back.

Task + sandboxes in -> observations and a verdict out. Two ways to judge (`env.judge`):

    answer  the policy states a number or an expression, compared exactly with the gold answer (rewards/maths.py)
    tests   the last program it wrote is the submission; hidden tests judge it (envs/python/hidden_tests.py)

Each program runs in a fresh process: what is on the page is all that runs, a crash or an endless loop costs nothing but
its own turn, and nothing that an earlier program left in memory, or running, decides what a later one does. Files stay,
since all programs of an attempt share one sandbox. It is taken when the first program comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from jaxagent.config import ConfigError, SandboxConfig
from jaxagent.config.ranges import PositiveInt, Seconds
from jaxagent.envs import tags
from jaxagent.envs.base import Attempt, Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.python import formats, hidden_tests
from jaxagent.envs.python.programs import Programs, Take
from jaxagent.rewards import maths, unit_tests
from jaxagent.rewards.view import View
from jaxagent.sandbox.base import SandboxError
from jaxagent.types import StopReason, Task

SOLVED = "solved"  # the verdict's component
TRY_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Python(Environment):
    """Tasks for which the policy writes programs: each runs in a fresh process of the attempt's sandbox."""

    format: formats.Format = "fenced"  # how programs and answers are written; see formats.py
    judge: formats.Judge = "answer"  # a stated answer against the gold one, or hidden tests of the last program
    system: str = ""  # the system message; "" = the format's own (none for "plain")
    run_timeout_s: Seconds = 15.0  # of one program; past it the policy sees what was printed until then
    output_chars: PositiveInt = 1_000  # shown of a program's output, at most: its beginning and its end
    traceback: Literal["whole", "message"] = "whole"  # message: without the frames
    judge_timeout_s: Seconds = 15.0  # of all hidden tests of a submission
    sandbox: SandboxConfig = dataclasses.field(default_factory=SandboxConfig)

    score = SOLVED
    takes_messages = True
    calls = "programs"

    def __post_init__(self) -> None:
        """Refuses settings under which the policy's own slow programs could look like a failure of ours."""
        most_s = self.max_turns * self.run_timeout_s + self.judge_timeout_s
        if most_s >= self.episode_timeout_s:
            raise ConfigError(
                f"env.episode_timeout_s={self.episode_timeout_s:g} must be more than env.max_turns x env.run_timeout_s "
                f"+ env.judge_timeout_s = {most_s:g}: slow programs are the policy's own fault."
            )

    @property
    def needs_answers(self) -> bool:  # type: ignore[override]
        """Whether a task without gold answers is a mistake."""
        return self.judge == "answer"

    @property
    def stop_strings(self) -> Sequence[str]:  # type: ignore[override]
        """What ends a program or an answer."""
        return formats.STOP_STRINGS.get((self.format, self.judge), ())

    @property
    def tokens(self) -> Sequence[str]:  # type: ignore[override]
        """The tags of the format."""
        return formats.TAGS[self.format]

    def oracle(self, task: Task) -> Sequence[str] | None:
        """The gold answer; or the program in the row's `metadata["solution"]`."""
        if self.judge == "answer":
            return (formats.end(self.format, task.answers[0]),)
        program = task.metadata.get("solution")
        return (formats.program(self.format, program), formats.end(self.format, None)) if program else None

    def messages(self, text: str) -> tuple[Message, ...]:
        """The prompt of a task."""
        return formats.messages(self.format, self.judge, text, self.system)

    def observation(self, action: str, text: str) -> Observation:
        """What a program printed, or that there is none."""
        return formats.observed(self.format, formats.find_program(self.format, action), text)

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], PythonAttempt]]:
        """Looks at the tasks, finds a back end that works, begins to fill the pool and runs one program."""
        for task in opening.tasks:
            hidden_tests.files_of(task)
            if self.judge == "tests":
                hidden_tests.of_task(task)
        with open_pythons(opening, self.sandbox) as take:
            yield lambda task: PythonAttempt(task, self, take)


@contextlib.contextmanager
def open_pythons(opening: Opening, config: SandboxConfig) -> Iterator[Take]:
    """Finds a back end that works, begins to fill the pool, runs one program, and yields what gives a sandbox."""
    from jaxagent.sandbox.of_config import open_sandboxes  # late: loads every back end

    with open_sandboxes(opening, config) as sandboxes:
        opening.run(_check_python(sandboxes.take), 2 * TRY_TIMEOUT_S)
        yield sandboxes.take


async def _check_python(take: Take) -> None:
    """Runs one program. Raises ConfigError where no sandbox starts, or where it has no Python."""
    try:
        async with await take() as sandbox:
            result = await sandbox.execute(("python3", "-c", "print(6 * 7)"), TRY_TIMEOUT_S, 1000)
    except SandboxError as failure:
        raise ConfigError(f"env.sandbox: {failure}") from failure
    if result.output.strip() != b"42":
        raise ConfigError(f"env.sandbox: python3 does not run there: {result.output[-200:].decode()!r}.")


class PythonAttempt(Attempt):
    """One attempt at one task."""

    def __init__(self, task: Task, config: Python, take: Take):
        self._task = task
        self._config = config
        self._tests = hidden_tests.of_task(task) if self._config.judge == "tests" else None
        self._files: Mapping[str, str] = hidden_tests.files_of(task)
        self._take = take
        self._programs = Programs(take, config.run_timeout_s, config.output_chars, config.traceback)
        self._turns_left = config.max_turns
        self._program: str | None = None  # the last that was written
        self._answer: str | None = None
        self.stop_strings: Sequence[str] = config.stop_strings
        self.tool_prefixes: Sequence[str] = formats.PREFIXES[config.format]
        names = ("programs", "failed_programs", "timed_out_programs", "invalid_actions")
        self.counters: dict[str, float] = dict.fromkeys(names, 0.0)

    async def start(self) -> Sequence[Message]:
        """The task as one user message, after what the format needs to say."""
        return self._config.prompt_messages(self._task)

    async def step(self, action: str) -> Step:
        """Runs a program, ends, or says that there is neither. In the last turn nobody would see an output."""
        self._turns_left -= 1
        style = self._config.format
        code = formats.find_program(style, action)
        self._program = self._program if code is None else code
        if self._config.judge == "answer":
            self._answer = formats.find_answer(style, action)
            is_over = self._answer is not None
        else:
            is_over = formats.DONE[style] in tags.outside(*formats.PROGRAM[style], formats.spoken(action))
        if is_over:
            return Step(stop_reason=StopReason.ANSWER)
        self.counters["invalid_actions"] += code is None
        if self._turns_left <= 0:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        if code is None:
            return Step(formats.observed(style, code, formats.INVALID[style]))
        self.counters["programs"] += 1
        result = await self._programs.run(code, self._files)
        self.counters["failed_programs"] += result.exit_code != 0
        if result.out_of_memory:
            return Step(stop_reason=StopReason.TURN_LIMIT)  # the sandbox is gone, with the files of earlier programs
        self.counters["timed_out_programs"] += result.timed_out
        output = f"{result.output}\n(timed out)".lstrip("\n") if result.timed_out else result.output
        return Step(formats.observed(style, code, formats.observation(style, output)))

    async def verify(self, transcript: Transcript) -> Verdict:
        """Compares the answer, or runs the hidden tests on the submission in a sandbox that the policy never used.

        However the attempt ended; without an answer or a program the reward is 0.
        """
        if self._tests is None:
            view = View(self._task, transcript.turns, answer=self._answer)
            solved = maths.boxed(view) if self._answer is not None else 0.0
            return Verdict(solved, {SOLVED: solved})
        report: dict[str, str] = {}
        if self._program is not None:
            sandbox = await self._take()
            try:
                report = await hidden_tests.run(
                    sandbox,
                    self._tests,
                    {**self._files, hidden_tests.MAIN: self._program},
                    self._config.judge_timeout_s,
                )
            finally:
                await sandbox.close()
        view = View(self._task, transcript.turns, tests=report)
        solved = unit_tests.all_passed(view)
        return Verdict(solved, {SOLVED: solved, "passed_frac": unit_tests.passed_frac(view)})

    async def close(self) -> None:
        """Ends the sandbox, if one was needed."""
        await self._programs.close()
