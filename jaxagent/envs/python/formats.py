"""How programs, answers and outputs are written.

Three ways (`env.format`):

              a program runs           "answer"                 "tests"     it is shown
    plain     <py>...</py>, the first  <answer>42</answer>      <done>      <out>...</out>
    fenced    ```python, the last      \\boxed{42}               <done>      in a user message
    qwen3_xml <function=python>, last  \\boxed{42}        <function=done>    in a tool message

Answering beats a program in the same turn, as finishing does in the terminal; under "tests" that program is still the
submission. A program without its end (the tokens ran out) does not count.
"""

from __future__ import annotations

import re
from typing import Literal

from jaxagent.envs import tags
from jaxagent.envs.base import Message, Observation
from jaxagent.envs.python.hidden_tests import MAX_FILE_CHARS
from jaxagent.envs.terminal_text import clean
from jaxagent.rewards import maths
from jaxagent.types import TokenKind

Format = Literal["plain", "fenced", "qwen3_xml"]
Judge = Literal["answer", "tests"]

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
INVALID: dict[Format, str] = {
    "plain": "<out>no program</out>\n",
    "fenced": "There is no complete ```python block and no end in your message.",
    "qwen3_xml": "There is no complete call of the function python and no end in your message.",
}

PROGRAM: dict[Format, tuple[re.Pattern[str], re.Pattern[str]]] = {  # what a program stands between
    "plain": tags.pair("py"),
    "fenced": (re.compile(r"```(?:python|py)[ \t]*\n"), re.compile("```")),
    "qwen3_xml": (
        re.compile(r"<tool_call>\s*<function=python>\s*<parameter=code>"),
        re.compile(r"</parameter>\s*</function>\s*</tool_call>"),
    ),
}
DONE: dict[Format, str] = {"plain": "<done>", "fenced": "<done>", "qwen3_xml": "<function=done>"}
_ANSWER = tags.pair("answer")
# The frames of a traceback, or of a syntax error; what is left of it is the message.
_FRAMES = re.compile(r'^(?:Traceback \(most recent call last\):\n|  File ".*\n)(?:  .*\n)*', re.MULTILINE)


def messages(style: Format, judge: Judge, instruction: str, system: str = "") -> tuple[Message, ...]:
    """The prompt of a task, with the format's own system message where `system` is "". The plain format has none: its
    policy learns the protocol from examples."""
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
    programs = tags.inside(*PROGRAM[style], spoken(text))
    code = (programs[0] if style == "plain" else programs[-1]).strip("\n").replace("\0", "") if programs else ""
    return code if code.strip() and len(code) <= MAX_FILE_CHARS else None


def find_answer(style: Format, text: str) -> str | None:
    """The final answer in a turn, outside of programs and thoughts."""
    text = tags.outside(*PROGRAM[style], spoken(text))
    if style != "plain":
        return maths.last_boxed(text)
    answers = tags.inside(*_ANSWER, text)
    return answers[0].strip() if answers else None


def shortened_output(output: bytes, truncated: bool, chars: int, traceback: Literal["whole", "message"]) -> str:
    """An output as text of at most `chars` characters and a mark: its beginning and, where errors stand, its end."""
    half = len(output) // 2
    parts = [clean(part) for part in ((output[:half], output[half:]) if truncated else (output,))]
    if traceback == "message":
        parts = [_FRAMES.sub("", part) for part in parts]
    if len(parts) == 1 and len(parts[0]) <= chars:
        return parts[0]
    head, tail = chars // 2, (chars + 1) // 2
    return f"{parts[0][:head]}\n...\n{parts[-1][-tail:]}"


def spoken(text: str) -> str:
    """What follows the last thought, in so much of the text as is read."""
    return text[: tags.MAX_CHARS].rpartition("</think>")[2]
