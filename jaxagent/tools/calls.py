"""Tools and what an answer says of them, as dataclasses, whatever way a model or an API writes them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the program offers to the policy."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments


@dataclasses.dataclass(frozen=True)
class Call:
    """The policy's call of a tool."""

    name: str
    arguments: Mapping[str, Any] | str  # a text only where it is no JSON object
    id: str = ""  # the dialect's; does not count when messages are compared


@dataclasses.dataclass(frozen=True)
class Text:
    """Part of the answer's text, as it is sampled."""

    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Part of the answer's reasoning, as it is sampled."""

    text: str


Delta = Text | Reasoning | Call  # a call comes whole


def tools_text(tools: Sequence[Tool], several: bool = True) -> str:
    """Tools, and how they are called in Hermes's format. `several`: whether one answer may hold several calls."""
    return (
        "You can call these functions; between <tools> and </tools>, each line describes one of them as JSON:\n"
        "<tools>\n" + "\n".join(json.dumps(tool_form(tool), ensure_ascii=False) for tool in tools) + "\n</tools>\n"
        "To call a function, write its name and its arguments as one JSON object between tags:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>\n' + _MANNERS[several]
    )


def with_tools(messages: Sequence[tuple[str, str]], tools: Sequence[Tool], several: bool) -> list[tuple[str, str]]:
    """Messages, (role, text), of which the system message at their beginning describes the tools, if there are any."""
    if not tools:
        return list(messages)
    described = tools_text(tools, several)
    if messages and messages[0][0] == "system":
        return [("system", f"{messages[0][1]}\n\n{described}"), *messages[1:]]
    return [("system", described), *messages]


_MANNERS = {
    True: "Several calls are written one after the other. The results are given to you in the next messages.",
    False: "Write one call at a time. Its result is given to you in the next message.",
}


def tool_form(tool: Tool) -> dict[str, Any]:
    """The tool in Hugging Face's (and OpenAI's) form."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
