"""OpenAI's Responses: `POST /v1/responses`, what a request asks for. It brings its history, or names what a session
answered before.

Neighbouring items of the assistant (reasoning, message, calls) are one message of it, as one answer of this server
gives them. Codex's freeform tools (type `custom`) are functions with the whole text in the argument `input`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxagent.gateway.answered import Answered, Item
from jaxagent.gateway.chat import Ask, BadRequest, Call, ChatMessage, Tool
from jaxagent.gateway.forms import checks, completions, parts
from jaxagent.gateway.forms.checks import Fields, Ignored
from jaxagent.gateway.forms.responses_answer import body as body
from jaxagent.gateway.forms.responses_answer import writer as writer

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
REASONING_PARTS = {"reasoning_text": "text", "text": "text"}
STORED = "this server stores nothing beyond a session's answers; send the whole history as 'input'"


def parse(raw: bytes, answered: Answered | None = None) -> Ask:
    """Reads the body of a request.

    Args:
      raw: the body.
      answered: what its session answered before; None: nothing.

    Raises:
      BadRequest: a mistake of the client's, described in one line.
    """
    ignored = Ignored()
    body = Fields(checks.parse_json(raw, mend=True), "", ignored)
    items = _items(body, answered or Answered())
    for name in ("conversation", "prompt"):
        body.refuse(name, STORED)
    body.refuse("background", STORED, False)
    instructions = body.take("instructions", str, default="")
    messages = ((ChatMessage("system", instructions),) if instructions else ()) + _messages(items, ignored)
    tools = _tools(body.take("tools", list, default=[]), ignored)
    if not body.take("parallel_tool_calls", bool, default=True):
        ignored.add("parallel_tool_calls")
    included = body.take("include", list, default=[])
    for name, _ in checks.items(included, "include", 64):
        if name != "message.output_text.logprobs":
            ignored.add(f"include: {name}")
    told: dict[str, Any] = checks.take_common(body) | dict(
        messages=messages,
        tools=checks.offered(body, tools),
        max_tokens=checks.take_positive(body, "max_output_tokens"),
        stops=checks.stops(body.take("stop", str, list, default=[])),
        stream_usage=True,
        logprobs="message.output_text.logprobs" in included,
        user=body.take("user", str, default=""),
        items=items if body.take("store", bool, default=True) else (),
    )
    body.done()
    return Ask(**told, ignored=ignored.names())


error = completions.error


# -------------------------------------------------------------------- items


@dataclasses.dataclass
class _Turn:
    """The assistant's items up to the next item of somebody else."""

    texts: list[str] = dataclasses.field(default_factory=list)
    reasonings: list[str] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)

    def message(self) -> ChatMessage:
        return ChatMessage("assistant", "".join(self.texts), tuple(self.calls), reasoning="".join(self.reasonings))


def _items(body: Fields, answered: Answered) -> tuple[Item, ...]:
    """The request's items, with what it refers to in its place."""
    name = body.take("previous_response_id", str)
    before = () if name is None else answered.history(name, "previous_response_id")
    data = body.need("input", str, list)
    told = [{"type": "message", "role": "user", "content": data}] if isinstance(data, str) else data
    checks.items(told, "input", checks.MAX_MESSAGES - len(before))
    for i, item in enumerate(told):
        if isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"}):
            told[i] = answered.item(str(item.get("id")), f"input[{i}]")
    return (*before, *told)


def _messages(items: Sequence[Item], ignored: Ignored) -> tuple[ChatMessage, ...]:
    found: list[ChatMessage] = []
    turn: _Turn | None = None
    names: dict[str, str] = {}  # of the tools called so far, by the call's id
    for raw, at in checks.items(items, "input", checks.MAX_MESSAGES):
        item = Fields(raw, at, ignored)
        item.drop("id", "status", "phase")
        kind = item.take("type", str, default="message")
        said = _message(item, kind, names)
        if said is None:
            turn = turn or _Turn()
            _add(turn, item, kind)
            names |= {call.id: call.name for call in turn.calls[-1:]}
        else:
            found += [turn.message(), said] if turn else [said]
            turn = None
        item.done()
    found += [turn.message()] if turn else []
    if not found:
        raise BadRequest("'input' must not be empty", "input")
    if found[-1].role == "assistant":
        ignored.add("input: the last item is the assistant's, and another message follows it")
    return tuple(found)


def _message(item: Fields, kind: str, names: dict[str, str]) -> ChatMessage | None:
    """The message of an item that is not the assistant's; None where it is."""
    if kind == "message":
        if (role := item.need("role", str)) not in ROLES:
            raise BadRequest(f"'{item.path('role')}' must be one of {', '.join(ROLES)}", item.path("role"))
        return None if role == "assistant" else ChatMessage(ROLES[role], parts.content(item, TEXT_PARTS, "\n"))
    if kind in ("function_call_output", "custom_tool_call_output"):
        call = item.need("call_id", str)
        text = parts.content(item, TEXT_PARTS, "\n", "output")
        return ChatMessage("tool", text, call_id=call, name=item.take("name", str, default="") or names.get(call, ""))
    if kind not in ("reasoning", "function_call", "custom_tool_call"):
        told = "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, reasoning"
        raise BadRequest(f"'{item.at}' is of type '{kind[:40]}'; this server reads {told}", item.at)
    return None


def _add(turn: _Turn, item: Fields, kind: str) -> None:
    """Adds an item of the assistant's. What a client cannot read of its reasoning is passed over."""
    if kind == "message":
        turn.texts.append(parts.content(item, TEXT_PARTS, ""))
    elif kind == "reasoning":
        turn.reasonings.append(parts.content(item, REASONING_PARTS, ""))
        item.drop("summary", "encrypted_content")
    elif kind == "function_call":
        arguments = checks.arguments(item.take("arguments", str, default=""))
        turn.calls.append(Call(item.need("name", str), arguments, item.need("call_id", str)))
    else:
        arguments = parts.freeform_arguments(item.take("input", str, default=""))
        turn.calls.append(Call(item.need("name", str), arguments, item.need("call_id", str)))


# -------------------------------------------------------------------- tools


def _tools(data: list, ignored: Ignored) -> tuple[Tool, ...]:
    tools = []
    for item, at in checks.items(data, "tools", checks.MAX_TOOLS):
        tool = Fields(item, at, ignored)
        kind = tool.need("type", str)
        if kind == "function":
            tools.append(parts.function_tool(tool))
        elif kind == "custom":
            tools.append(_freeform(tool))
        else:
            ignored.add(f"tools: {kind}")
    return checks.no_name_twice(tools)


def _freeform(tool: Fields) -> parts.Freeform:
    name = checks.tool_name(tool.need("name", str), tool.path("name"))
    description = tool.take("description", str, default="")
    form = Fields(tool.take("format", dict, default={}), tool.path("format"), tool.ignored)
    if definition := form.take("definition", str, default=""):
        syntax = form.take("syntax", str, default="grammar")
        description = f"{description}\n\nThe text follows this {syntax} grammar:\n{definition}".lstrip()
    form.drop("type", "syntax")
    form.done()
    tool.done()
    return parts.Freeform(name, description, parts.FREEFORM_SCHEMA)
