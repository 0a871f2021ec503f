"""How programs and measurements are written.

Two ways (`env.format`):

             a program                    the end    what came of it is shown
    plain    <code>...</code>, the first  <done>     <out>...</out>
    fenced   the last ``` block           <done>     in a user message

A task may have a head: lines that stand before what the policy writes, and that it does not write.
"""

from __future__ import annotations

import re
from typing import Literal

from jaxagent.envs import tags
from jaxagent.envs.base import Message, Observation
from jaxagent.types import TokenKind

Format = Literal["plain", "fenced"]

STOP_STRINGS: dict[Format, tuple[str, ...]] = {"plain": ("</code>", "<done>"), "fenced": ()}
TAGS: dict[Format, tuple[str, ...]] = {
    "plain": ("<code>", "</code>", "<out>", "</out>", "<done>"),
    "fenced": ("<think>", "</think>", "<done>"),
}
PREFIXES: dict[Format, tuple[str, ...]] = {"plain": ("<code>",), "fenced": ("```",)}
DONE = "<done>"
INVALID: dict[Format, str] = {"plain": "no program", "fenced": "There is no complete ``` block and no <done> in it."}
MAX_CODE_CHARS = 30_000
_PAIRS: dict[Format, tuple[re.Pattern[str], re.Pattern[str]]] = {
    "plain": tags.pair("code"),
    "fenced": (re.compile(r"```[a-zA-Z]*[ \t]*\n"), re.compile("```")),
}
SYSTEM = (
    "Write a function f that gives the same results as the reference, and is faster. Write the whole program in one "
    "``` block. It is checked on random inputs that you do not see, and its processor time is measured beside the "
    "reference's; you are shown what came of it, and may write it again, better. It has one thread, and no files or "
    "processes. When you are done, write <done>."
)


def messages(style: Format, task: str) -> tuple[Message, ...]:
    """The prompt of a task."""
    if style == "plain":
        return (Message("user", task),)
    return (Message("system", SYSTEM), Message("user", task))


def program(style: Format, code: str) -> str:
    """What a policy writes to have a program measured."""
    return f"<code>{code}</code>" if style == "plain" else f"```\n{code}\n```"


def speedup(times: float) -> str:
    """What is said of a correct program."""
    return f"correct, {times:.1f} times as fast"


def observation(style: Format, text: str) -> str:
    """What a policy is shown of a measurement."""
    return f"<out>{text}</out>\n" if style == "plain" else text


def observed(style: Format, text: str, warning: bool) -> Observation:
    """The same as it stands in an episode. `warning`: there was no program."""
    kind = TokenKind.WARNING if warning else TokenKind.OBSERVATION
    return Observation(((observation(style, text), kind),), "" if style == "plain" else "user")


def find_program(style: Format, text: str) -> str | None:
    """The complete program in a turn: the first in the plain format, which ends there, else the last."""
    programs = tags.inside(*_PAIRS[style], spoken(text))
    code = (programs[0] if style == "plain" else programs[-1]).replace("\0", "") if programs else ""
    return code if code.strip() and len(code) <= MAX_CODE_CHARS else None


def is_done(style: Format, text: str) -> bool:
    """Whether a turn says, outside of programs, that it was the last."""
    return DONE in tags.outside(*_PAIRS[style], spoken(text))


def spoken(text: str) -> str:
    """What follows the last thought, in so much of the text as is read."""
    return text[: tags.MAX_CHARS].rpartition("</think>")[2]
