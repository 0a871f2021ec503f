"""Parts of requests that the dialects of conversations share: texts made of parts, and tools."""

from __future__ import annotations

import json
from typing import Any

from jaxagent.gateway.chat import BadRequest, Call, Tool
from jaxagent.gateway.forms import checks
from jaxagent.gateway.forms.checks import Fields

FREEFORM_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def content(message: Fields, parts: dict[str, str], joint: str, name: str = "content") -> str:
    """A message's text: a text itself, or the texts of its parts with the joint between them.

    Args:
      message: its field `name` is taken.
      parts: type of a part -> the field that has its text.
      joint: what stands between two parts.
      name: the field.

    Raises:
      BadRequest: a part is no text, such as an image.
    """
    data = message.take(name, str, list, default="")
    if isinstance(data, str):
        return data
    found = checks.items(data, message.path(name), checks.MAX_MESSAGES)
    return joint.join(part_text(Fields(part, at, message.ignored), parts) for part, at in found)


def part_text(part: Fields, parts: dict[str, str], kind: str | None = None, readable: str | None = None) -> str:
    """The text of one part, whose type may have been taken already. Raises BadRequest where the part is no text."""
    if kind is None:
        kind = str(part.take("type", str, default="text"))
    if kind not in parts:
        readable = readable or ", ".join(parts)
        raise BadRequest(f"'{part.at}' is of type '{kind[:40]}'; this server reads text only ({readable})", part.at)
    text = part.need(parts[kind], str)
    part.drop("cache_control", "annotations", "logprobs", "citations", "prompt_cache_breakpoint")
    part.done()
    return text


def function_tool(function: Fields, schema: str = "parameters") -> Tool:
    """A tool of its name, description and the JSON schema in the field `schema`."""
    name = checks.tool_name(function.need("name", str), function.path("name"))
    parameters = function.take(schema, dict, default={"type": "object", "properties": {}})
    tool = Tool(name, function.take("description", str, default=""), parameters)
    function.drop("cache_control")
    function.done()
    return tool


class Freeform(Tool):
    """A tool whose calls are a text. The policy sees a function with the text as its argument `input`."""


def freeform_text(call: Call) -> str:
    """The text of a call of a freeform tool; other arguments than a plain text are given as JSON.

    `freeform_arguments` makes the same arguments of it, so that a history comes back as it was sampled.
    """
    if isinstance(call.arguments, str):
        return call.arguments
    text = call.arguments.get("input")
    if isinstance(text, str) and len(call.arguments) == 1 and checks.json_object(text) is None:
        return text
    return json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)


def freeform_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call of a freeform tool with this text."""
    return {"input": text} if (data := checks.json_object(text)) is None else data
