"""Qwen3-Coder's format: tags instead of JSON, so that code needs no escapes. Types come from the tool's JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxagent.tools.base import load_json
from jaxagent.tools.calls import Call
from jaxagent.tools.hermes import CLOSE, OPEN, Hermes

FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
# A value may hold the closing tag itself: it ends at the tag that another parameter, or nothing, follows.
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))\s*", re.DOTALL)


class Qwen3Coder(Hermes):
    """<tool_call><function=NAME><parameter=NAME>VALUE</parameter>...</function></tool_call>"""

    @classmethod
    def write(cls, text: str, calls: Sequence[Call]) -> str:
        """One block for each call, a line of its own for each tag and value."""
        blocks = []
        for call in calls:
            arguments = call.arguments if isinstance(call.arguments, Mapping) else {"arguments": call.arguments}
            values = "".join(f"<parameter={k}>\n{_written(v)}\n</parameter>\n" for k, v in arguments.items())
            blocks.append(f"{OPEN}\n<function={call.name}>\n{values}</function>\n{CLOSE}")
        return "\n".join([text, *blocks] if text else blocks)

    def _parse(self, body: str) -> Call | None:
        function = FUNCTION.fullmatch(body)
        if function is None:
            return None
        name, inner, at, arguments = function[1].strip(), function[2], 0, {}
        tool = self._tools.get(name)
        properties = tool.parameters.get("properties") if tool else None
        schemas = properties if isinstance(properties, Mapping) else {}
        while at < len(inner.rstrip()):
            found = PARAMETER.match(inner, at)
            if found is None:
                return None
            key, at = found[1].strip(), found.end()
            arguments[key] = _typed(found[2].removeprefix("\n").removesuffix("\n"), schemas.get(key))
        return Call(name, arguments)

    def _within_value(self, text: str, at: int) -> bool:
        """Whether a function was begun and not ended: the closing tag stands in a value."""
        body = text[len(OPEN) : at]
        return body.lstrip().startswith("<function=") and not body.rstrip().endswith("</function>")


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _typed(text: str, schema: Any) -> Any:
    """The value that the text stands for; the text itself where the schema does not say, or the text does not fit."""
    types = set(_types(schema))
    word = text.strip().lower()
    if "null" in types and word in ("null", "none"):
        return None
    if not types or "string" in types:
        return text
    if "boolean" in types and word in ("true", "false"):  # templates write Python's True and False
        return word == "true"
    try:
        return load_json(text.strip())
    except ValueError:
        return text


def _types(schema: Any) -> Iterator[str]:
    """The names of the JSON types that a schema allows, as far as it says."""
    if not isinstance(schema, Mapping):
        return
    names = schema.get("type", ())
    yield from [names] if isinstance(names, str) else [name for name in names if isinstance(name, str)]
    for union in ("anyOf", "oneOf"):
        for one in schema.get(union) or ():
            yield from _types(one)
