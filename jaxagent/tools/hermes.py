"""Hermes's format, also of Qwen2.5 and Qwen3: one JSON object between <tool_call> and </tool_call> for each call."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxagent.tools.base import ToolParser, call_of, load_json, overlap
from jaxagent.tools.calls import Call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

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
        """A closing tag inside a value of the call does not close it."""
        first, at = 0, text.find(CLOSE)
        while at >= 0:
            end = at + len(CLOSE)
            first = first or end
            body = text[len(OPEN) : at]
            call = self._parse(body)
            if call is not None or not self._within_value(body):
                return call, end
            at = text.find(CLOSE, end)
        return None, (first or len(text)) if final else 0

    def _parse(self, body: str) -> Call | None:
        try:
            return call_of(load_json(body.strip()), "arguments")
        except ValueError:
            return None

    def _within_value(self, body: str) -> bool:
        """Whether the body ends inside a JSON string."""
        inside = escaped = False
        for letter in body:
            if escaped:
                escaped = False
            elif letter == "\\":
                escaped = inside
            elif letter == '"':
                inside = not inside
        return inside
