"""Rows of ToolRL's data (rlla_4k) -> tasks: one turn of a dialogue with tools (https://arxiv.org/abs/2504.13958).

  data_source "rlla", prompt [{system}, {user}], reward_model {ground_truth: text}, extra_info {split, index}

The system message lists the tools, the user message begins with `HISTORY`, and the ground truth is an answer as the
policy should write it. A task's prompt is both messages; `messages` takes them apart again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxagent import types
from jaxagent.data import fields
from jaxagent.data.fields import RowError

SOURCE = "rlla"
COLUMNS = fields.VERL_COLUMNS
HISTORY = "**Dialogue Records History**\n"  # how each user message begins
_BETWEEN = "\n\n"
_TRUTH = "reward_model.ground_truth"


def is_published(row: Mapping[str, Any]) -> bool:
    """Whether a row is one of ToolRL's."""
    return row.get("data_source") == SOURCE and "reward_model" in row


def to_task(row: Mapping[str, Any]) -> types.Task:
    """Converts and checks one row. Raises RowError: a column is missing or of the wrong form, or the ground truth's
    calls cannot be read."""
    extra = fields.mapping(fields.get(row, "extra_info"), "extra_info")
    for column in ("split", "index"):
        if extra.get(column) is None:
            raise RowError(f"extra_info.{column}", "missing; the task's id is made of it")
    model = fields.mapping(fields.get(row, "reward_model"), "reward_model")
    truth = fields.text(model, "ground_truth", "reward_model.")
    truth_calls(truth)
    return types.Task(
        id=f"{SOURCE}/{extra['split']}/{extra['index']}",
        prompt=prompt(*_contents(fields.get(row, "prompt"))),
        answers=(truth,),
        kind=kind(truth),
    )


def prompt(system: str, user: str) -> str:
    """A task's prompt of its two messages."""
    return f"{system}{_BETWEEN}{user}"


def messages(text: str) -> tuple[tuple[str, str], ...]:
    """(role, content) of the messages of a prompt. A text without `HISTORY` is one user message."""
    system, between, user = text.partition(_BETWEEN + HISTORY)
    return (("system", system), ("user", HISTORY + user)) if between else (("user", text),)


def kind(truth: str) -> str:
    """What a ground truth has: "calls", "response" or "calls+response"; "thought" where it has neither."""
    parts = [name for tag, name in (("<tool_call>", "calls"), ("<response>", "response")) if tag in truth]
    return "+".join(parts) or "thought"


def parse_calls(text: str) -> list[Any]:
    """The JSON values, one per line, of the first <tool_call>. Nothing is promised about their form.

    Raises:
      ValueError: a tag is missing or a line is not JSON.
      RecursionError: a line nests too deeply.
    """
    if "<tool_call>" not in text or "</tool_call>" not in text:
        raise ValueError("no tool call")
    block = text.split("<tool_call>")[1].split("</tool_call>")[0]
    return [json.loads(line) for line in block.strip().split("\n")]


def truth_calls(truth: str) -> list[dict[str, Any]]:
    """The calls of a ground truth; none where it has no <tool_call>. Raises RowError: a line of it is no JSON object
    with a name and parameters."""
    if "<tool_call>" not in truth:
        return []
    if "</tool_call>" not in truth.split("<tool_call>")[1]:
        raise RowError(_TRUTH, "the first <tool_call> has no end before the next one")
    try:
        calls = parse_calls(truth)
    except (ValueError, RecursionError) as error:
        raise RowError(_TRUTH, f"a line of <tool_call> is not JSON: {error}") from None
    for number, call in enumerate(calls, 1):
        form = isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("parameters"), dict)
        if not form:
            raise RowError(
                _TRUTH, f"line {number} of <tool_call> must have a name and parameters, got {fields.show(call)}"
            )
    return calls


def _contents(value: Any) -> tuple[str, str]:
    """The contents of a system message and a user message that follows."""
    user, before = fields.conversation(value)
    earlier = before.get(fields.MESSAGES, [])
    if [message["role"] for message in earlier] != ["system"]:
        raise RowError("prompt", f"must be a system and a user message, got {fields.show(value)}")
    system = earlier[0]["content"]
    if not user.startswith(HISTORY):
        raise RowError("prompt[1].content", f"must begin with {HISTORY!r}, got {fields.show(user)}")
    if _BETWEEN + HISTORY in system:
        raise RowError("prompt[0].content", f"must not hold {HISTORY!r}, which begins the user message")
    return system, user
