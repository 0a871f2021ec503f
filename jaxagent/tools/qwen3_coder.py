"""Qwen3-Coder's format: tags instead of JSON, so that code needs no escapes. Types come from the tool's JSON schema."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.tools.base import load_json
from jaxagent.tools.calls import Call
from jaxagent.tools.hermes import CLOSE, OPEN, Hermes

FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
# A value may hold the closing tag itself: it ends at the tag that another parameter, or nothing, follows.
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))\s*", re.DOTALL)

NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
TYPES = frozenset(NAMES.values())
ANY = "any"  # beside all types: the schema names none
MAX_DEPTH = 32  # of schemas within schemas


class Qwen3Coder(Hermes):
    """<tool_call><function=NAME><parameter=NAME>VALUE</parameter>...</function></tool_call>"""

    @classmethod
    def write(cls, text: str, calls: Sequence[Call]) -> str:
        """One block for each call, a line of its own for each tag and value."""
        blocks = []
        for call in calls:
            arguments = call.arguments if isinstance(call.arguments, Mapping) else {"arguments": call.arguments}
            values = "".join(f"<parameter={k}>\n{_value_text(v)}\n</parameter>\n" for k, v in arguments.items())
            blocks.append(f"{OPEN}\n<function={call.name}>\n{values}</function>\n{CLOSE}")
        return "\n".join([text, *blocks] if text else blocks)

    def _parse(self, body: str) -> Call | None:
        function = FUNCTION.fullmatch(body)
        if function is None:
            return None
        name, inner, at, arguments = function[1].strip(), function[2], 0, {}
        tool = self._tools.get(name)
        root = tool.parameters if tool else {}
        outer = _referred(root["$ref"], root) if "$ref" in root else root
        schemas = outer["properties"] if isinstance(outer.get("properties"), Mapping) else {}
        while at < len(inner.rstrip()):
            match = PARAMETER.match(inner, at)
            if match is None:
                return None
            key, at = match[1].strip(), match.end()
            arguments[key] = _typed(
                match[2].removeprefix("\n").removesuffix("\n"),
                schemas.get(key, outer.get("additionalProperties")),
                root,
            )
        return Call(name, arguments)

    def _within_value(self, text: str, at: int) -> bool:
        """Whether a function was begun and not ended: the closing tag stands in a value."""
        body = text[len(OPEN) : at]
        return body.lstrip().startswith("<function=") and not body.rstrip().endswith("</function>")


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that the text stands for; the text itself where the schema does not know it, or does not allow it.

    Where a text and something else are allowed, what is written as the something else is it.
    """
    types, listed = _allowed(schema, root, {})
    word = text.strip()
    for value in listed:
        if {text, word} & {_value_text(value), str(value)}:
            return value
    if ANY in types or not types:  # what nobody describes stays a text
        return text
    if "null" in types and word.lower() in ("null", "none"):
        return None
    if "boolean" in types and word.lower() in ("true", "false"):  # templates write Python's True and False
        return word.lower() == "true"
    try:
        value = load_json(word)
    except ValueError:
        return text
    return value if "string" not in types or NAMES[type(value)] in types - {"string"} else text


def _allowed(schema: Any, root: Mapping[str, Any], memo: dict[int, set[str]], depth: int = 0) -> tuple[set[str], list]:
    """(the JSON types, the listed values) that a schema allows. An integer counts as a number, and the other way.

    Each schema is read once, however often others refer to it: `memo` has the types of each by its identity. What is no
    schema says nothing.
    """
    if not isinstance(schema, Mapping) or not schema or depth > MAX_DEPTH:
        return {*TYPES, ANY}, []
    if id(schema) in memo:
        return memo[id(schema)], []
    memo[id(schema)] = set()  # within itself it allows nothing more
    allowed, listed = {*TYPES, ANY}, [*_list(schema, "enum"), *([schema["const"]] if "const" in schema else ())]
    names = {name for name in [schema.get("type"), *_list(schema, "type")] if isinstance(name, str)}
    if names:
        allowed = names | ({"integer", "number"} if names & {"integer", "number"} else set())
    if listed:
        allowed &= {NAMES[type(value)] for value in listed}
    every = [*_list(schema, "allOf"), *([_referred(schema["$ref"], root)] if "$ref" in schema else ())]
    for parts in (*([part] for part in every), _list(schema, "anyOf"), _list(schema, "oneOf")):
        if parts:
            choices = [_allowed(part, root, memo, depth + 1) for part in parts]
            allowed &= set().union(*(types for types, _ in choices))
            listed += [value for _, values in choices for value in values]
    memo[id(schema)] = allowed = allowed | {"null"} if schema.get("nullable") is True else allowed
    return allowed, listed


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _referred(pointer: Any, root: Mapping[str, Any]) -> Any:
    """What a JSON pointer within the schema points to; {}, which allows everything, where it points nowhere."""
    place: Any = root
    for step in urllib.parse.unquote(str(pointer)).removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping) and step in place:
            place = place[step]
        else:
            return {}
    return place if str(pointer).startswith("#") and isinstance(place, Mapping) else {}
