"""`ToolParser`: what all families share. It reads text in any pieces and says the same, however the text was cut.

An answer is [reasoning] then text and calls in any order. Text is passed on as soon as it cannot be the beginning of
a tag; a call is passed on whole. Blanks beside a call or beside the reasoning belong to the format and are left out.
What looks like a call and cannot be read comes back as text, letter by letter, so that the program can show it and
the policy can mend it; it is counted in `malformed`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.tools.calls import Call, Delta, Reasoning, Text, Tool

THINK, END_THINK = "<think>", "</think>"


class ToolParser:
    """Reads one answer of the policy. This class knows reasoning only; the families know calls too.

    Args:
      tools: what the program offered; without any, nothing is read as a call.
      reasoning: "<think>" at the beginning of the answer opens its reasoning.
      in_thought: the prompt already ends with "<think>": the answer begins within its reasoning.

    Attributes:
      malformed: what looked like a call and could not be read, so far.
    """

    SEPARATORS = ""  # what, blanks apart, may stand between two calls

    def __init__(self, tools: Sequence[Tool] = (), reasoning: bool = False, in_thought: bool = False) -> None:
        self.malformed = 0
        self._tools = {tool.name: tool for tool in tools}
        self._buffer = ""  # what nothing has been said about yet
        self._state = "think" if in_thought else "start" if reasoning else "text"
        self._fresh = True  # nothing but blanks since the answer, or what comes after a block, began
        self._after_block = False  # `_fresh`, and the block is reasoning or a call: blanks are left out
        self._lead = ""  # blanks before the call that is being read
        self._out: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        """More of the answer, without the token that ends it -> what is certain by now."""
        self._buffer += text
        return self._run(False)

    def end(self) -> list[Delta]:
        """The answer is over -> the rest of it."""
        return self._run(True)

    @classmethod
    def write(cls, text: str, calls: Sequence[Call]) -> str:
        """A text and calls as a policy of this family would write them; `feed` reads them back."""
        raise NotImplementedError("A plain answer has no calls.")

    def _begin(self, text: str, fresh: bool) -> tuple[int, bool]:
        """(where a call begins, True), or (how much of the text cannot be part of a call, False)."""
        return len(text), False

    def _read(self, text: str, final: bool) -> tuple[Call | None, int]:
        """Reads the call that the text begins with.

        Returns:
          (the call, its length), (None, the length of what is malformed), or (None, 0): more text may tell.
          When `final`, no more text comes, and the length must not be 0.
        """
        raise NotImplementedError

    def _run(self, final: bool) -> list[Delta]:
        self._out = []
        steps = {"start": self._start, "think": self._think, "text": self._text, "call": self._call}
        while steps[self._state](final):
            pass
        return self._out

    def _start(self, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer, self._state = text[len(THINK) :], "think"
        elif THINK.startswith(text) and not final:
            return False
        else:
            self._state = "text"
        return True

    def _think(self, final: bool) -> bool:
        if self._fresh:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(END_THINK)
        if at >= 0:
            self._say(Reasoning(self._buffer[:at].rstrip()))
            self._buffer, self._state = self._buffer[at + len(END_THINK) :], "text"
            self._fresh = self._after_block = True
            return True
        safe = self._buffer if final else self._buffer[: len(self._buffer) - overlap(self._buffer, END_THINK)]
        self._say(Reasoning(safe.rstrip()))
        self._buffer = "" if final else self._buffer[len(safe.rstrip()) :]
        return False

    def _text(self, final: bool) -> bool:
        if self._after_block:
            self._buffer = self._buffer.lstrip()
        safe, begins = self._begin(self._buffer, self._fresh) if self._tools else (len(self._buffer), False)
        visible_text = self._buffer if final and not begins else self._buffer[:safe].rstrip()
        if self._after_block and not visible_text.strip(self.SEPARATORS + " \t\r\n"):
            visible_text = ""
        self._say(Text(visible_text))
        if begins:
            self._lead, self._buffer, self._state = self._buffer[len(visible_text) : safe], self._buffer[safe:], "call"
        else:
            self._buffer = self._buffer[len(visible_text) :]
        return begins

    def _call(self, final: bool) -> bool:
        call, length = self._read(self._buffer, final)
        if call is None and not length:
            return False
        if call is not None:
            self._out.append(call)
            self._fresh = self._after_block = True
        else:
            self.malformed += 1
            self._say(Text(self._lead + self._buffer[:length]))
        self._buffer, self._state = self._buffer[length:], "text"
        return True

    def _say(self, delta: Text | Reasoning) -> None:
        if not delta.text:
            return
        self._fresh = self._after_block = False
        last = self._out[-1] if self._out else None
        if isinstance(last, Text | Reasoning) and type(last) is type(delta):
            self._out[-1] = type(delta)(last.text + delta.text)
        else:
            self._out.append(delta)


def overlap(text: str, tag: str) -> int:
    """How many letters at the end of the text may be the beginning of the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def load_json(text: str) -> Any:
    """A JSON value. Line breaks within a string are taken; what no client could be sent is not.

    Raises:
      ValueError: no JSON, a number that JSON does not have, half of a surrogate pair, or nested too deep.
    """
    try:
        value, end = json.JSONDecoder(strict=False, parse_constant=_no_number).raw_decode(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # 1e999 is read as infinity
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if text[end:].strip():
        raise ValueError("more than one value")
    return value


class Quotes:
    """Reads JSON letter by letter and knows whether it is inside a string."""

    def __init__(self) -> None:
        self.inside = self._escaped = False

    def take(self, letter: str) -> None:
        """The next letter."""
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = self.inside
        elif letter == '"':
            self.inside = not self.inside


def call_of(value: Any) -> Call | None:
    """The call in {"name": ..., "arguments" or "parameters": {...}}: models and their data mix the two up.

    An object with nothing but a name is a call without arguments. One whose arguments have yet another name is none.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = next((value[name] for name in ("arguments", "parameters") if name in value), None)
    if arguments is None and value.keys() <= {"name", "type", "id"}:
        arguments = {}
    return Call(value["name"], arguments) if isinstance(arguments, Mapping) else None


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
