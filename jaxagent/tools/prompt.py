"""What a system message says about tools, for templates and environments that have no words of their own for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxagent.tools.calls import Tool


def tools_text(tools: Sequence[Tool], several: bool = True) -> str:
    """Tools, and how they are called in Hermes's format. `several`: whether one answer may hold several calls."""
    return (
        "You can call these functions; between <tools> and </tools>, each line describes one of them as JSON:\n"
        "<tools>\n" + "\n".join(json.dumps(tool_form(tool), ensure_ascii=False) for tool in tools) + "\n</tools>\n"
        "To call a function, write its name and its arguments as one JSON object between tags:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>\n' + _MANNERS[several]
    )


_MANNERS = {
    True: "Several calls are written one after the other. The results are given to you in the next messages.",
    False: "Write one call at a time. Its result is given to you in the next message.",
}


def tool_form(tool: Tool) -> dict[str, Any]:
    """The tool in Hugging Face's (and OpenAI's) form."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
