"""OpenEnv's actions and observations as text: what the policy writes -> an action by its JSON schema, and the way back.

An action with one field of a plain type is that field's text ("UP", 3, a whole message); every other one is a JSON
object. Fields that can have one value only are filled in. The server has the last word on what is an action.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.envs import tags

OPENING, CLOSING = tags.pair("action")
BASE = "metadata"  # the field that every action and observation has
PLAIN = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
WORDS = {"string": "text", "integer": "a whole number", "number": "a number", "boolean": "true or false"}
WORDS |= {"array": "a list", "object": "an object", "null": "null"}
PICTURES = ("contentEncoding", "contentMediaType")  # keywords of text that is no text
DEPTH = 4  # of a schema that is looked at: one may lie within itself
CALL = ("tool_name", "arguments")  # the fields of an action that calls a tool


@dataclasses.dataclass(frozen=True)
class ActionForm:
    """The fields of an action."""

    schemas: Mapping[str, Mapping[str, Any]]  # field -> its schema, that can be written
    required: tuple[str, ...]
    fixed: Mapping[str, Any]  # field -> its only value
    definitions: Mapping[str, Any]
    open: bool  # whether it may have more fields

    @property
    def plain(self) -> str:
        """The one field whose text is the action; "" = actions are objects."""
        (name,) = self.schemas if len(self.schemas) == 1 else ("",)
        if not name or self.open:
            return ""
        schema = self.resolved(self.schemas[name])
        values = schema.get("enum", ())
        return name if schema.get("type") in PLAIN and all(isinstance(one, (str, int)) for one in values) else ""

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """A schema behind its references."""
        return resolved(schema, self.definitions)

    def words(self) -> str:
        """What an action is, in words."""
        if self.plain:
            schema = self.schemas[self.plain]
            return f"{self._kind(schema)}{_description(schema)}"
        lines = [
            f"{json.dumps(name)}: {self._kind(schema)}{'' if name in self.required else ', optional'}"
            f"{_description(schema)}"
            for name, schema in self.schemas.items()
        ]
        return "a JSON object with\n" + "\n".join(lines)

    def read(self, text: str) -> tuple[dict[str, Any] | None, str]:
        """(the action that a text is, ""), or (None, what is wrong)."""
        if self.plain:
            schema = self.resolved(self.schemas[self.plain])
            try:
                value = text if schema["type"] == "string" else _json(text)
            except (ValueError, RecursionError):
                value = text
            return self._checked({self.plain: value})
        try:
            action = _json(text)
        except (ValueError, RecursionError):
            return None, "no JSON"
        if not isinstance(action, dict):
            return None, "no object"
        return self._checked(action)

    def _checked(self, action: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        for name in self.required:
            if name not in action:
                return None, f"'{name}' is missing"
        for name, value in action.items():
            if name not in self.schemas and not self.open:
                return None, f"'{name}' is no field of an action"
            if not self._fits(self.schemas.get(name, {}), value):
                return None, f"{name} must be {self._kind(self.schemas[name])}"
        return {**self.fixed, **action}, ""

    def _fits(self, schema: Mapping[str, Any], value: Any, depth: int = DEPTH) -> bool:
        """Whether a value has the type that a schema wants, and is one of its values; deep inside, the server knows."""
        schema = self.resolved(schema)
        if not depth:
            return True
        if several := schema.get("anyOf") or schema.get("oneOf"):
            return any(self._fits(one, value, depth - 1) for one in several)
        if "enum" in schema and not any(one == value and type(one) is type(value) for one in schema["enum"]):
            return False
        kind = schema.get("type")
        if kind in PLAIN:
            return isinstance(value, PLAIN[kind]) and (kind == "boolean" or not isinstance(value, bool))
        if kind == "array":
            return isinstance(value, list) and all(self._fits(schema.get("items", {}), one, depth - 1) for one in value)
        return kind not in ("object", "null") or (isinstance(value, dict) if kind == "object" else value is None)

    def _kind(self, schema: Mapping[str, Any], depth: int = DEPTH) -> str:
        schema = self.resolved(schema)
        if not depth:
            return "JSON"
        if several := schema.get("anyOf") or schema.get("oneOf"):
            return " or ".join(self._kind(one, depth - 1) for one in several)
        if "enum" in schema:
            return "one of " + ", ".join(map(str, schema["enum"]))
        word = WORDS.get(schema.get("type", ""), "JSON")
        bounds = [f"{name} {schema[key]}" for key, name in BOUNDS.items() if key in schema]
        if schema.get("type") == "array" and schema.get("items"):
            word += f" of: {self._kind(schema['items'], depth - 1)}"
        return " ".join([word, *([f"({', '.join(bounds)})"] if bounds else [])])


BOUNDS = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "more than", "exclusiveMaximum": "less than"}
BOUNDS |= {"maxLength": "characters at most:"}


def form_of(schema: Mapping[str, Any], where: str) -> ActionForm:
    """The form that an action's schema says. Raises ConfigError: an action cannot be written, naming the field."""
    definitions = schema.get("$defs", {})
    schema = resolved(schema, definitions)
    properties = schema.get("properties")
    if schema.get("type") != "object" or not isinstance(properties, dict):
        raise ConfigError(f"{where}: the actions of its /schema are no objects with fields, but {schema!r:.100}.")
    required = tuple(schema.get("required", ()))
    fields = {name: one for name, one in properties.items() if name != BASE or name in required}
    fixed = {
        name: only for name, one in fields.items() if (only := _only_value(resolved(one, definitions))) is not None
    }
    schemas = {}
    for name, one in fields.items():
        behind = resolved(one, definitions)
        if any(key in behind for key in PICTURES) or behind.get("format") in ("binary", "byte"):
            if name in required:
                raise ConfigError(f"{where}: the action's field '{name}' is a file or a picture: no text can be it.")
        elif name not in fixed:
            schemas[name] = one
    written = tuple(name for name in required if name not in fixed)
    return ActionForm(schemas, written, fixed, definitions, bool(schema.get("additionalProperties", True)))


def resolved(schema: Any, definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema behind its references, and behind an `allOf` of one; `true`, which is any value, as {}."""
    for _ in range(10):
        if not isinstance(schema, Mapping):
            return {}
        if "$ref" in schema:
            schema = definitions.get(str(schema["$ref"]).rpartition("/")[2], {})
        elif len(schema.get("allOf") or ()) == 1:
            schema = schema["allOf"][0]
    if isinstance(kinds := schema.get("type"), list):
        return {"anyOf": [{**schema, "type": kind} for kind in kinds]}
    return schema


def is_tool_call(schema: Mapping[str, Any]) -> bool:
    """Whether the actions of a schema are calls of tools, which the environment lists."""
    schema = resolved(schema, schema.get("$defs", {}))
    properties = schema.get("properties") or {}
    return all(name in properties for name in CALL) or (schema.get("type") == "object" and set(properties) <= {BASE})


def observation_text(observation: Mapping[str, Any], show: Sequence[str] = ()) -> str:
    """An observation as text: the one text that it has, or a line for each field; `show`: these fields only."""
    fields = {name: value for name, value in observation.items() if value is not None and name != BASE}
    if show:
        fields = {name: observation[name] for name in show if observation.get(name) is not None}
    elif not fields:
        metadata = observation.get(BASE)
        fields = metadata if isinstance(metadata, dict) else {}
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return "\n".join(f"{name}: {_shown(value)}" for name, value in fields.items())


def result_text(observation: Mapping[str, Any]) -> tuple[str, bool]:
    """What a call of a tool came to, and whether it failed."""
    if error := observation.get("error"):
        return f"error: {error.get('message', error) if isinstance(error, dict) else error}", True
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):  # as MCP has it
        parts = [part if isinstance(part, dict) else {"text": str(part)} for part in result["content"]]
        texts = [str(part["text"]) if part.get("text") else f"[{part.get('type')}]" for part in parts]
        return "\n".join(texts), bool(result.get("is_error") or result.get("isError"))
    if "result" not in observation:
        return observation_text(observation), False
    return _shown(result), False


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _description(schema: Any) -> str:
    text = schema.get("description") if isinstance(schema, Mapping) else None
    return f" ({text.strip()})" if isinstance(text, str) else ""


def _only_value(schema: Mapping[str, Any]) -> Any:
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    return values[0] if len(values) == 1 else None


def _json(text: str) -> Any:
    def no_number(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    return json.loads(text, parse_constant=no_number)
