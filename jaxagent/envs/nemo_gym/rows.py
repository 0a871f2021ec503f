"""NeMo-Gym's rows: {"responses_create_params": {input, tools, ...}, and whatever the resources server verifies with}.

A row is kept whole, since the server is given it whole. Of the request's parameters (OpenAI's Responses) each is used,
or is the business of who samples or keeps records, or is refused by its name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jaxagent import types
from jaxagent.config import nearest
from jaxagent.data import fields
from jaxagent.data.fields import RowError
from jaxagent.tools.calls import Call, Tool
from jaxagent.tools.hermes import Hermes

PARAMS = "responses_create_params"
ROW = "nemo_gym"  # the key of metadata that has the row
USED = ("input", "instructions", "tools", "tool_choice", "parallel_tool_calls")
# How is sampled says the run; the others are a request's bookkeeping. The server gets them with the row.
UNUSED = (
    "temperature",
    "top_p",
    "max_output_tokens",
    "reasoning",
    "model",
    "metadata",
    "user",
    "store",
    "service_tier",
)
UNUSED += ("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "stream_options")
# What changes what the policy is asked or may answer, and is not played here; `null` and these values say nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    **{name: (False,) for name in ("background", "stream")},
    **{name: ([],) for name in ("include", "context_management")},
    **{name: () for name in ("previous_response_id", "prompt", "conversation", "moderation", "max_tool_calls")},
    "text": ({}, {"format": {"type": "text"}}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
TEXTS = ("input_text", "output_text", "text")


def is_published(row: Mapping[str, Any]) -> bool:
    """Whether a row has the published layout."""
    return PARAMS in row


def to_task(row: Mapping[str, Any]) -> types.Task:
    """Converts and checks a published row. Raises RowError: naming the column."""
    messages = messages_of(row)
    tools_of(row)
    text = json.dumps(dict(row), sort_keys=True, default=str)
    name = next((str(row[key]) for key in ("id", "uuid", "task_id") if row.get(key) is not None), "")
    name = name or hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
    prompt = next((content for role, content in reversed(messages) if role == "user"), messages[-1][1])
    return types.Task(name, prompt, (), "", {ROW: dict(row)})


def tools_of(row: Mapping[str, Any]) -> tuple[list[Tool], bool]:
    """The tools that the policy may call, and whether several in one message. Raises RowError."""
    params = fields.mapping(fields.get(row, PARAMS), PARAMS)
    for key, value in params.items():
        if key in REFUSED and value is not None and value not in REFUSED[key]:
            raise RowError(f"{PARAMS}.{key}", f"{fields.show(value)} is not played here")
        if key not in (*USED, *UNUSED, *REFUSED):
            raise RowError(f"{PARAMS}.{key}", f"unknown parameter. {nearest(key, (*USED, *UNUSED, *REFUSED))}")
    choice = params.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RowError(f"{PARAMS}.tool_choice", f"{fields.show(choice)} is not played here: 'auto' and 'none' are")
    tools, forms = [], params.get("tools") or ()
    if not isinstance(forms, (list, tuple)):
        raise RowError(f"{PARAMS}.tools", f"must be a list of tools, got {fields.show(forms)}")
    for i, form in enumerate(forms):
        column = f"{PARAMS}.tools[{i}]"
        if fields.mapping(form, column).get("type") != "function":
            raise RowError(f"{column}.type", f"{fields.show(form.get('type'))} is not played here: 'function' is")
        name = fields.text(form, "name", f"{column}.")
        tools.append(
            Tool(
                name,
                str(form.get("description") or ""),
                fields.mapping(form.get("parameters") or {}, f"{column}.parameters"),
            )
        )
    return [] if choice == "none" else tools, params.get("parallel_tool_calls") is not False


def messages_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(role, text) of each message that the policy is shown first. Raises RowError: part of it is no text."""
    params = fields.mapping(fields.get(row, PARAMS), PARAMS)
    items = fields.get(params, "input", f"{PARAMS}.")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not items:
        raise RowError(f"{PARAMS}.input", f"must be a text or a list of messages, got {fields.show(items)}")
    messages = [("system", fields.text(params, "instructions", f"{PARAMS}."))] if params.get("instructions") else []
    for i, item in enumerate(items):
        messages.append(_message(fields.mapping(item, f"{PARAMS}.input[{i}]"), f"{PARAMS}.input[{i}]"))
    return messages


def _message(item: Mapping[str, Any], column: str) -> tuple[str, str]:
    kind = item.get("type") or "message"
    if kind == "function_call":
        try:
            arguments = fields.json_object(item.get("arguments") or "{}")
        except RowError as error:
            raise RowError(f"{column}.arguments", error.problem) from None
        return "assistant", Hermes.write("", [Call(fields.text(item, "name", f"{column}."), arguments)])
    if kind == "function_call_output":
        return "tool", _text(item.get("output"), f"{column}.output")
    if kind != "message":
        raise RowError(f"{column}.type", f"{fields.show(kind)} is not played here: messages and calls of functions are")
    role = fields.text(item, "role", f"{column}.")
    return "system" if role == "developer" else role, _text(item.get("content"), f"{column}.content")


def _text(content: Any, column: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(column, f"must be text, got {fields.show(content)}")
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise RowError(f"{column}[{i}]", f"{fields.show(kind)} is no text, and no policy here reads it")
    return "".join(part["text"] for part in content)
