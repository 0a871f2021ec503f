"""How programs and measurements are written.

         a program                    the end    what came of it is shown
plain    <code>...</code>, the first  <done>     <out>...</out>
fenced   the last ``` block           <done>     in a user message
"""

from __future__ import annotations

import re
from typing import Literal

from jaxagent.envs import tags
from jaxagent.envs.base import Message, Observation
from jaxagent.types import TokenKind

Format = Literal["plain", "fenced"]

DONE = "<done>"
STOP_STRINGS: dict[Format, tuple[str, ...]] = {"plain": ("</code>", DONE), "fenced": ()}
TAGS: dict[Format, tuple[str, ...]] = {"plain": ("<code>", "</code>", "<out>", "</out>", DONE), "fenced": (DONE,)}
NO_PROGRAM = "There is no complete program."
MAX_CODE_CHARS = 30_000
_PAIRS: dict[Format, tuple[re.Pattern[str], re.Pattern[str]]] = {
    "plain": tags.pair("code"),
    "fenced": (re.compile(r"```[a-zA-Z]*[ \t]*\n"), re.compile("```")),
}
SYSTEM = (
    "Write a function f that gives the same results as the reference, and is faster: the whole program in one ``` "
    "block. It is checked on random inputs, its processor time is measured beside the reference's, and you are shown "
    "what came of it. Write it again, better, or <done>. It has one thread, and neither files nor processes."
)


def messages(style: Format, task: str) -> tuple[Message, ...]:
    """The prompt of a task."""
    return (*(() if style == "plain" else (Message("system", SYSTEM),)), Message("user", task))


def program(style: Format, code: str) -> str:
    """What a policy writes to have a program measured."""
    return f"<code>{code}</code>" if style == "plain" else f"```\n{code}\n```"


def measured(error: str, speedup: float) -> str:
    """What is said of a program. `error`: "" = it is correct."""
    return f"failed: {error}" if error else f"correct, {speedup:.1f} times as fast"


def observed(style: Format, text: str, warning: bool = False) -> Observation:
    """What a policy is shown. `warning`: there was no program."""
    kind = TokenKind.WARNING if warning else TokenKind.OBSERVATION
    if style == "plain":
        return Observation(((f"<out>{text}</out>\n", kind),))
    return Observation(((text, kind),), "user")


def find_program(style: Format, text: str) -> tuple[str | None, bool]:
    """(the complete program in a turn, whether the turn says outside of programs that it was the last)."""
    reply = text[: tags.MAX_CHARS].rpartition("</think>")[2]
    programs = tags.inside(*_PAIRS[style], reply)
    code = (programs[0] if style == "plain" else programs[-1]).replace("\0", "") if programs else ""
    is_done = DONE in tags.outside(*_PAIRS[style], reply)
    return (code if code.strip() and len(code) <= MAX_CODE_CHARS else None), is_done
