"""A whole answer of a policy, read at once: its text, its reasoning and its calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxagent.tools.base import END_THINK, THINK, ToolParser
from jaxagent.tools.calls import Call, Reasoning, Text, Tool
from jaxagent.tools.hermes import CLOSE, Hermes


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
