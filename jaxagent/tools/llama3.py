"""Llama 3's format: a call is an answer that begins with {"name", "parameters"}; ";" separates several."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxagent.tools.base import Quotes, ToolParser, call_of, load_json, overlap
from jaxagent.tools.calls import Call, Tool

TAG = "<|python_tag|>"


class Llama3(ToolParser):
    """{"name": ..., "parameters": {...}}, at the beginning of the answer or behind <|python_tag|>."""

    SEPARATORS = ";"

    def __init__(self, tools: Sequence[Tool] = (), reasoning: bool = False, in_thought: bool = False) -> None:
        super().__init__(tools, reasoning, in_thought)
        self._next_object()

    def _next_object(self) -> None:
        self._judged = self._first = self._depth = 0  # letters that were read; where the object begins; open brackets
        self._quotes = Quotes()

    @classmethod
    def write(cls, text: str, calls: Sequence[Call]) -> str:
        """The objects, separated by "; "; behind a text, the tag tells that they are calls."""
        objects = [{"name": call.name, "parameters": call.arguments} for call in calls]
        return (text and text + TAG) + "; ".join(json.dumps(one, ensure_ascii=False) for one in objects)

    def _begin(self, text: str, fresh: bool) -> tuple[int, bool]:
        stripped = text.lstrip("; \t\r\n" if self._after_block else None)
        if fresh and stripped.startswith("{"):
            return len(text) - len(stripped), True
        if fresh and not stripped:
            return 0, False
        at = text.find(TAG)
        return (at, True) if at >= 0 else (len(text) - overlap(text, TAG), False)

    def _read(self, text: str, final: bool) -> tuple[Call | None, int]:
        """Each letter is read once, however often more text comes: an object without end must not stop others."""
        start = self._judged or (len(TAG) if text.startswith(TAG) else 0)
        for at in range(start, len(text)):
            letter = text[at]
            if not self._depth and letter.isspace():
                continue
            if not self._depth and letter != "{":
                self._next_object()
                return None, len(TAG)
            if not self._depth:
                self._first = at
            self._quotes.take(letter)
            if not self._quotes.inside:
                self._depth += (letter in "{[") - (letter in "}]")
            if not self._depth:
                return self._call_ending_at(text, at + 1)
        self._judged = len(text)
        if final:
            self._next_object()
        return None, len(text) if final else 0

    def _call_ending_at(self, text: str, end: int) -> tuple[Call | None, int]:
        """The call of the object that ends there."""
        body = text[self._first : end]
        self._next_object()
        try:
            return call_of(load_json(body)), end
        except ValueError:
            return None, end
