"""The Python environment: the policy writes programs, a sandbox runs them, what they print comes back.

Task + sandboxes in -> observations and a verdict out. Two ways to judge (`env.python.judge`):

    answer  the policy states a number or an expression, compared exactly with the gold answer (rewards/maths.py)
    tests   the last program it wrote is the submission; hidden tests judge it (envs/hidden_tests.py)

Three ways to write (`env.python.format`):

              a program runs           "answer"                 "tests"     it is shown
    plain     <py>...</py>, the first  <answer>42</answer>      <done>      <out>...</out>
    fenced    ```python, the last      \\boxed{42}               <done>      in a user message
    qwen3_xml <function=python>, last  \\boxed{42}        <function=done>    in a tool message

Answering beats a program in the same turn, as finishing does in the terminal; under "tests" that program is still the
submission. A program without its end (the tokens ran out) does not count.

Each program runs in a fresh process: what is on the page is all that runs, a crash or an endless loop costs nothing but
its own turn, and nothing that an earlier program left in memory, or running, decides what a later one does. Files stay,
since all programs of an attempt share one sandbox. It is taken when the first program comes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from jaxagent.config import ConfigError, EnvConfig
from jaxagent.envs import hidden_tests, tags
from jaxagent.envs.base import Message, Observation, Step, Transcript, Verdict
from jaxagent.envs.terminal_text import clean
from jaxagent.rewards import maths, unit_tests
from jaxagent.rewards.view import View
from jaxagent.sandbox.base import Sandbox
from jaxagent.types import StopReason, Task, TokenKind

Format = Literal["plain", "fenced", "qwen3_xml"]
Judge = Literal["answer", "tests"]

SOLVED = "solved"  # the verdict's component
RUN = f"{hidden_tests.WRITE}; exec python3 -u -B {hidden_tests.MAIN}"

# A generation ends with these; in the other formats it ends where the policy ends its chat message.
STOP_STRINGS: dict[tuple[Format, Judge], tuple[str, ...]] = {
    ("plain", "answer"): ("</py>", "</answer>"),
    ("plain", "tests"): ("</py>", "<done>"),
}
PREFIXES: dict[Format, tuple[str, ...]] = {  # how each program begins
    "plain": ("<py>",),
    "fenced": ("```python\n",),
    "qwen3_xml": ("<tool_call>\n<function=python>\n<parameter=code>\n",),
}
TAGS: dict[Format, tuple[str, ...]] = {
    "plain": ("<py>", "</py>", "<out>", "</out>", "<answer>", "</answer>", "<done>"),
    "fenced": ("<think>", "</think>", "<done>"),
    "qwen3_xml": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
}
ROLES: dict[Format, str] = {"plain": "", "fenced": "user", "qwen3_xml": "tool"}  # of what the policy is shown
_HOW = {
    "fenced": "write one program in a ```python block",
    "qwen3_xml": (
        "call the function python with one program:\n<tool_call>\n<function=python>\n<parameter=code>\nprint(6 * 7)\n"
        "</parameter>\n</function>\n</tool_call>\n"
    ),
}
_END = {
    ("fenced", "answer"): "When you know the answer, write it as \\boxed{...} instead of a program.",
    ("qwen3_xml", "answer"): "When you know the answer, write it as \\boxed{...} without a call.",
    ("fenced", "tests"): (
        "The last program you write is your submission: it must define what the task asks for, and tests that you do "
        "not see will call it. When you are done, write <done>."
    ),
    ("qwen3_xml", "tests"): (
        "The last program you write is your submission: it must define what the task asks for, and tests that you do "
        "not see will call it. When you are done, call <function=done>."
    ),
}
_INVALID: dict[Format, str] = {
    "plain": "<out>no program</out>\n",
    "fenced": "There is no complete ```python block and no end in your message.",
    "qwen3_xml": "There is no complete call of the function python and no end in your message.",
}

_PROGRAM: dict[Format, tuple[re.Pattern[str], re.Pattern[str]]] = {  # what a program stands between
    "plain": tags.pair("py"),
    "fenced": (re.compile(r"```(?:python|py)[ \t]*\n"), re.compile("```")),
    "qwen3_xml": (
        re.compile(r"<tool_call>\s*<function=python>\s*<parameter=code>"),
        re.compile(r"</parameter>\s*</function>\s*</tool_call>"),
    ),
}
_DONE: dict[Format, str] = {"plain": "<done>", "fenced": "<done>", "qwen3_xml": "<function=done>"}
_ANSWER = tags.pair("answer")
# The frames of a traceback, or of a syntax error; what is left of it is the message.
_FRAMES = re.compile(r'^(?:Traceback \(most recent call last\):\n|  File ".*\n)(?:  .*\n)*', re.MULTILINE)


Take = Callable[[], Awaitable[Sandbox]]


def check(config: EnvConfig) -> None:
    """Raises ConfigError where the policy's own slow programs could look like a failure of ours."""
    python = config.python
    most_s = config.max_turns * python.run_timeout_s + python.judge_timeout_s
    if most_s >= config.episode_timeout_s:
        raise ConfigError(
            f"env.episode_timeout_s={config.episode_timeout_s:g} must be more than env.max_turns x env.python."
            f"run_timeout_s + env.python.judge_timeout_s = {most_s:g}: slow programs are the policy's own fault."
        )


def messages(style: Format, judge: Judge, instruction: str, system: str = "") -> tuple[Message, ...]:
    """The prompt of a task. The plain format has no system prompt: its policy learns the protocol from examples.

    Args:
      style, judge: of the environment.
      instruction: the task.
      system: the system message; "" = the format's own.
    """
    if style == "plain":
        return (*((Message("system", system),) if system else ()), Message("user", f"{instruction}\n"))
    system = system or (
        f"Solve the task with the help of Python. To run Python, {_HOW[style]}. You are shown what it prints, so print "
        f"what you want to know. Every program runs on its own: nothing is kept in memory. {_END[style, judge]}"
    )
    return (Message("system", system), Message("user", instruction))


def program(style: Format, code: str) -> str:
    """What a policy writes to run a program."""
    if style == "plain":
        return f"<py>{code}</py>"
    after = "```" if style == "fenced" else "</parameter>\n</function>\n</tool_call>"
    return f"{PREFIXES[style][0]}{code}\n{after}"


def end(style: Format, answer: str | None) -> str:
    """What a policy writes at the end: its answer, or, with None, that it has finished."""
    if answer is not None:
        return f"<answer>{answer}</answer>" if style == "plain" else f"The answer is \\boxed{{{answer}}}."
    return "<tool_call>\n<function=done>\n</function>\n</tool_call>" if style == "qwen3_xml" else "<done>"


def observation(style: Format, output: str) -> str:
    """What a policy is shown of a program's output."""
    return f"<out>{output}</out>\n" if style == "plain" else f"Output:\n{output}"


def observed(style: Format, code: str | None, text: str) -> Observation:
    """A text that the policy is shown after a turn with the program `code`, or with none."""
    return Observation(((text, TokenKind.WARNING if code is None else TokenKind.OBSERVATION),), ROLES[style])


def find_program(style: Format, text: str) -> str | None:
    """The complete program in a turn: the first in the plain format, which ends there, else the last."""
    found = tags.inside(*_PROGRAM[style], _spoken(text))
    code = (found[0] if style == "plain" else found[-1]).strip("\n").replace("\0", "") if found else ""
    return code if code.strip() and len(code) <= hidden_tests.MAX_FILE_CHARS else None


def find_answer(style: Format, text: str) -> str | None:
    """The final answer in a turn, outside of programs and thoughts."""
    text = tags.outside(*_PROGRAM[style], _spoken(text))
    if style != "plain":
        return maths.last_boxed(text)
    found = tags.inside(*_ANSWER, text)
    return found[0].strip() if found else None


def message_only(output: str) -> str:
    """An output in which every traceback is only its message: "KeyError: 1"."""
    return _FRAMES.sub("", output)


def shown(output: bytes, truncated: bool, chars: int, traceback: Literal["whole", "message"]) -> str:
    """An output as text of at most `chars` characters and a mark: its beginning and, where errors stand, its end.

    Args:
      output: as the sandbox kept it: of a truncated one the first and the last half of what it was asked for.
      truncated: whether there was more.
      chars: how much is shown, at most.
      traceback: "message" leaves the frames of tracebacks out.
    """
    half = len(output) // 2
    parts = [clean(part) for part in ((output[:half], output[half:]) if truncated else (output,))]
    if traceback == "message":
        parts = [message_only(part) for part in parts]
    if len(parts) == 1 and len(parts[0]) <= chars:
        return parts[0]
    head, tail = chars // 2, (chars + 1) // 2
    return f"{parts[0][:head]}\n...\n{parts[-1][-tail:]}"


def _spoken(text: str) -> str:
    """What follows the last thought, in so much of the text as is read."""
    return text[: tags.MAX_CHARS].rpartition("</think>")[2]


class PythonEnvironment:
    """One attempt at one task. See `envs.base.Environment`.

    Args:
      task: with gold answers, or with hidden tests in its metadata.
      config: of the environment.
      take: gives a sandbox that nobody used; it is closed here.
    """

    def __init__(self, task: Task, config: EnvConfig, take: Take):
        self._task = task
        self._config = config.python
        self._tests = hidden_tests.of_task(task) if self._config.judge == "tests" else None
        self._files: Mapping[str, str] = hidden_tests.files_of(task)
        self._take = take
        self._sandbox: Sandbox | None = None
        self._turns_left = config.max_turns
        self._program: str | None = None  # the last that was written
        self._answer: str | None = None
        self.stop_strings: Sequence[str] = STOP_STRINGS.get((self._config.format, self._config.judge), ())
        self.tool_prefixes: Sequence[str] = PREFIXES[self._config.format]
        names = ("programs", "failed_programs", "timed_out_programs", "invalid_actions")
        self.counters: dict[str, float] = dict.fromkeys(names, 0.0)

    async def start(self) -> Sequence[Message]:
        """The task as one user message, after what the format needs to say."""
        return messages(self._config.format, self._config.judge, self._task.prompt, self._config.system)

    async def step(self, action: str) -> Step:
        """Runs a program, ends, or says that there is neither. In the last turn nobody would see an output."""
        self._turns_left -= 1
        style = self._config.format
        code = find_program(style, action)
        self._program = self._program if code is None else code
        if self._config.judge == "answer":
            self._answer = find_answer(style, action)
            ended = self._answer is not None
        else:
            ended = _DONE[style] in tags.outside(*_PROGRAM[style], _spoken(action))
        if ended:
            return Step(stop_reason=StopReason.ANSWER)
        self.counters["invalid_actions"] += code is None
        if self._turns_left <= 0:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        try:
            text = _INVALID[style] if code is None else observation(style, await self._run(code))
        except RuntimeError:
            if self._sandbox is None or not await self._sandbox.oom_kills():
                raise
            self.counters["failed_programs"] += 1
            return Step(stop_reason=StopReason.TURN_LIMIT)  # its programs used up the memory, and the sandbox is gone
        return Step(observed(style, code, text))

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
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _run(self, code: str) -> str:
        config = self._config
        if self._sandbox is None:
            self._sandbox = await self._take()
        else:
            await self._sandbox.stop_processes()  # what an earlier program left running
        self.counters["programs"] += 1
        argv = ("sh", "-c", RUN, "sh", *hidden_tests.arguments({**self._files, hidden_tests.MAIN: code}))
        # A character has up to four bytes, and frames that are not shown come on top.
        result = await self._sandbox.execute(argv, config.run_timeout_s, 8 * config.output_chars + 4000)
        output = shown(result.output, result.truncated, config.output_chars, config.traceback)
        self.counters["failed_programs"] += result.exit_code != 0
        self.counters["timed_out_programs"] += result.timed_out
        return f"{output}\n(timed out)".lstrip("\n") if result.timed_out else output
