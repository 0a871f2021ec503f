"""Llama 3's format: a call is an answer that begins with {"name", "parameters"}; ";" separates several."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxagent.tools.base import ToolParser, call_of, load_json, overlap
from jaxagent.tools.calls import Call

TAG = "<|python_tag|>"


class Llama3(ToolParser):
    """{"name": ..., "parameters": {...}}, at the beginning of the answer or behind <|python_tag|>."""

    SEPARATORS = ";"

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
        body = text.removeprefix(TAG).lstrip()
        if body and not body.startswith("{"):
            return None, len(TAG)
        try:  # only a whole object is JSON, whatever follows it
            _, end = json.JSONDecoder(strict=False).raw_decode(body)
        except (ValueError, RecursionError):
            return None, len(text) if final else 0
        length = len(text) - len(body) + end
        try:
            return call_of(load_json(body[:end]), "parameters", "arguments"), length
        except ValueError:
            return None, length
