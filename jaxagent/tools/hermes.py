"""Hermes's format, also of Qwen2.5 and Qwen3: one JSON object between <tool_call> and </tool_call> for each call."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from jaxagent.tools.base import END_THINK, THINK, Quotes, ToolParser, call_of, load_json, overlap
from jaxagent.tools.calls import Call, Reasoning, Text, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

    def __init__(self, tools: Sequence[Tool] = (), reasoning: bool = False, in_thought: bool = False) -> None:
        super().__init__(tools, reasoning, in_thought)
        self._judged = len(OPEN)  # of the call that is being read: no closing tag in front of it ends the call
        self._first_end = 0  # where its first closing tag ends; 0: there was none
        self._quotes = Quotes()  # at `_judged`

    @classmethod
    def write(cls, text: str, calls: Sequence[Call]) -> str:
        """One block for each call."""
        objects = [{"name": call.name, "arguments": call.arguments} for call in calls]
        blocks = [f"{OPEN}\n{json.dumps(one, ensure_ascii=False)}\n{CLOSE}" for one in objects]
        return "\n".join([text, *blocks] if text else blocks)

    def _begin(self, text: str, fresh: bool) -> tuple[int, bool]:
        at = text.find(OPEN)
        return (at, True) if at >= 0 else (len(text) - overlap(text, OPEN), False)

    def _read(self, text: str, final: bool) -> tuple[Call | None, int]:
        """A closing tag inside a value of the call does not close it. Each tag is judged once, however often more text
        comes: a policy that repeats the tag within a value without end must not stop everybody else."""
        while (at := text.find(CLOSE, self._judged)) >= 0:
            inside = self._within_value(text, at)
            self._judged = at + len(CLOSE)
            self._first_end = self._first_end or self._judged
            if not inside:
                return self._end_of_call(self._parse(text[len(OPEN) : at]), self._judged)
        return self._end_of_call(None, self._first_end or len(text)) if final else (None, 0)

    def _end_of_call(self, call: Call | None, length: int) -> tuple[Call | None, int]:
        """The result; what comes next is another call."""
        self._judged, self._first_end, self._quotes = len(OPEN), 0, Quotes()
        return call, length

    def _parse(self, body: str) -> Call | None:
        try:
            return call_of(load_json(body.strip()))
        except ValueError:
            return None

    def _within_value(self, text: str, at: int) -> bool:
        """Whether the call's text in front of the closing tag at `at` ends inside a JSON string."""
        for letter in text[self._judged : at]:
            self._quotes.take(letter)
        inside = self._quotes.inside
        for letter in CLOSE:
            self._quotes.take(letter)
        return inside


@dataclasses.dataclass(frozen=True)
class ParsedAnswer:
    """What an answer says.

    Attributes:
      malformed: something in it looks like a call and is none that can be made.
    """

    text: str
    reasoning: str
    calls: tuple[Call, ...]
    malformed: bool


def read_answer(answer: str, tools: Sequence[Tool], family: type[ToolParser] = Hermes) -> ParsedAnswer:
    """Reads an answer that is complete, or ends with "</tool_call>".

    Reasoning may begin in the prompt: an answer with a "</think>" and no "<think>" before it begins within it.
    """
    before, end, _ = answer.partition(END_THINK)
    parser = family(tools, reasoning=True, in_thought=bool(end) and THINK not in before)
    deltas = [*parser.feed(answer), *parser.end()]
    calls = tuple(delta for delta in deltas if isinstance(delta, Call))
    return ParsedAnswer(
        text="".join(delta.text for delta in deltas if isinstance(delta, Text)),
        reasoning="".join(delta.text for delta in deltas if isinstance(delta, Reasoning)),
        calls=calls,
        malformed=parser.malformed > 0 or (CLOSE in answer and not calls),
    )
