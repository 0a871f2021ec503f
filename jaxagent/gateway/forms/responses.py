"""OpenAI's Responses: `POST /v1/responses`. A request brings its history, or names what a session answered before.

Neighbouring items of the assistant (reasoning, message, calls) are one message of it, as one answer of this server
gives them. Codex's freeform tools (type `custom`) are functions with the whole text in the argument `input`.

Clients read the events strictly: each item is added, filled and done, and every event has the next sequence number.
The request is not repeated in the answer (`tools` is empty, `instructions` null).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxagent.gateway.chat import Answer, Ask, BadRequest, Call, ChatMessage, Ident, Text, Tool
from jaxagent.gateway.forms import completions, events, fields
from jaxagent.gateway.forms.fields import Fields
from jaxagent.gateway.forms.history import AnswerHistory, Item

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
REASONING_PARTS = {"reasoning_text": "text", "text": "text"}
STORED = "this server stores nothing beyond a session's answers; send the whole history as 'input'"
LOGPROBS = "message.output_text.logprobs"  # in `include`
ERROR_CODES = {429: "rate_limit_exceeded"}  # the codes that OpenAI's clients know
FREEFORM_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


# -------------------------------------------------------------------- the request


def parse(raw: bytes, history: AnswerHistory | None = None) -> Ask:
    """Reads the body of a request.

    Args:
      raw: the body.
      history: what its session answered before; None: nothing.

    Raises:
      BadRequest: a mistake of the client's, described in one line.
    """
    body = Fields(fields.parse_json(raw), "", ignored := {})
    items = _items(body, history or AnswerHistory())
    for name in ("conversation", "prompt"):
        body.refuse(name, STORED)
    body.refuse("background", STORED, False)
    instructions = body.take("instructions", str, default="")
    messages = fields.conversation(map(_message, body.each(items, "input")), "input")
    if messages[-1].role == "assistant":
        body.ignore("input: the last item is the assistant's, and another message follows it")
    messages = ((ChatMessage("system", instructions),) if instructions else ()) + messages
    tools = fields.take_tools(body, {"function": fields.function_tool, "custom": _freeform})
    if not body.take("parallel_tool_calls", bool, default=True):
        body.ignore("parallel_tool_calls")
    included = body.take("include", list, default=[])
    for name, _ in fields.items(included, "include", 64):
        if name != LOGPROBS:
            body.ignore(f"include: {name}")
    common, offered = fields.take_common(body), fields.offered(body, tools)
    common |= dict(
        max_tokens=fields.take_positive(body, "max_output_tokens"),
        stops=fields.stops(body.take("stop", str, list, default=[])),
        logprobs=LOGPROBS in included,
        user=body.take("user", str, default=""),
        items=items if body.take("store", bool, default=True) else (),
    )
    body.refuse_rest()
    return Ask(messages, offered, stream_usage=True, ignored=tuple(ignored), **common)


error = completions.error


def _items(body: Fields, history: AnswerHistory) -> tuple[Item, ...]:
    """The request's items, with what it refers to in its place."""
    name = body.take("previous_response_id", str)
    before = () if name is None else history.items_up_to(name, "previous_response_id")
    data = body.need("input", str, list)
    items = [{"type": "message", "role": "user", "content": data}] if isinstance(data, str) else data
    fields.items(items, "input", fields.MAX_MESSAGES - len(before))
    for i, item in enumerate(items):
        if isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"}):
            items[i] = history.item(str(item.get("id")), f"input[{i}]")
    return (*before, *items)


def _message(item: Fields) -> ChatMessage:
    """The message of an item, or its part of one of the assistant's."""
    item.drop("id", "status", "phase")
    if (kind := item.take("type", str, default="message")) == "message":
        if (role := item.need("role", str)) not in ROLES:
            raise BadRequest(f"'{item.path('role')}' must be one of {', '.join(ROLES)}", item.path("role"))
        return ChatMessage(ROLES[role], fields.content(item, TEXT_PARTS, "" if role == "assistant" else "\n"))
    if kind in ("function_call_output", "custom_tool_call_output"):
        call = item.need("call_id", str)
        text = fields.content(item, TEXT_PARTS, "\n", "output")
        return ChatMessage("tool", text, call_id=call, name=item.take("name", str, default=""))
    if kind == "reasoning":  # what a client cannot read of it is passed over
        item.drop("summary", "encrypted_content")
        return ChatMessage("assistant", "", reasoning=fields.content(item, REASONING_PARTS, ""))
    if kind == "function_call":
        arguments = fields.arguments(item.take("arguments", str, default=""))
    elif kind == "custom_tool_call":
        arguments = freeform_arguments(item.take("input", str, default=""))
    else:
        readable = "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, reasoning"
        raise BadRequest(f"'{item.at}' is of type '{kind[:40]}'; this server reads {readable}", item.at)
    return ChatMessage("assistant", "", (Call(item.need("name", str), arguments, item.need("call_id", str)),))


# -------------------------------------------------------------------- freeform tools


def _freeform(tool: Fields) -> Tool:
    """A tool whose calls are a text. The policy sees a function with the text as its argument `input`."""
    name, description = fields.tool_name(tool), tool.take("description", str, default="")
    form = tool.inner("format", {})
    if definition := form.take("definition", str, default=""):
        syntax = form.take("syntax", str, default="grammar")
        description = f"{description}\n\nThe text follows this {syntax} grammar:\n{definition}".lstrip()
    form.drop("type", "syntax")
    form.refuse_rest()
    return Tool(name, description, FREEFORM_SCHEMA)


def freeform_text(call: Call) -> str:
    """The text of a call of a freeform tool; other arguments than a plain text are given as JSON.

    `freeform_arguments` makes the same arguments of it, so that a history comes back as it was sampled.
    """
    if isinstance(call.arguments, str):
        return call.arguments
    text = call.arguments.get("input")
    if isinstance(text, str) and len(call.arguments) == 1 and fields.json_object(text) is None:
        return text
    return events.json_text(call.arguments)


def freeform_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call of a freeform tool with this text."""
    return {"input": text} if (data := fields.json_object(text)) is None else data


# -------------------------------------------------------------------- the answer


def body(ask: Ask, answer: Answer, *, ident: Ident) -> dict[str, Any]:
    """The whole answer: its items are those that a stream would have, all at once."""
    stream = _ResponseEvents(ask, ident)
    stream.logprobs = _log_probs(ask, answer)
    stream.end(answer)
    return _finished(ask, answer, ident, stream.output)


class _ResponseEvents(events.BlockWriter):
    def __init__(self, ask: Ask, ident: Ident) -> None:
        super().__init__(ask, ident)
        self._number = 0  # of the next event
        self.output: list[dict[str, Any]] = []  # items that are done
        self._written = ""  # of the open item
        self.logprobs: list[dict[str, Any]] = []  # of the message that is closed next

    def begin(self, prompt_tokens: int, cached_tokens: int | None) -> bytes:
        response = _response(self._ident, "in_progress", [])
        return b"".join(self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress"))

    def end(self, *answers: Answer) -> bytes:
        (answer,) = answers
        rest, self.logprobs = self._rest(answer), _log_probs(self._ask, answer)
        rest += self._close()
        response = _finished(self._ask, answer, self._ident, self.output)
        return rest + self._event(f"response.{response['status']}", response=response)

    def ping(self) -> bytes:
        """OpenAI's event that work goes on, which says nothing new; its clients refuse types that they do not know."""
        return self._event("response.in_progress", response=_response(self._ident, "in_progress", []))

    def failed(self, message: str, status: int, code: str | None) -> bytes:
        response = _response(self._ident, "failed", self.output)
        error_code = "server_error" if status >= 500 else "invalid_prompt"
        response["error"] = {"code": code or ERROR_CODES.get(status, error_code), "message": message}
        return self._event("response.failed", response=response)

    # ---------------------------------------------------------------- items

    def _begin_block(self, kind: type) -> bytes:
        self._open, self._written = kind, ""
        item = self._item("in_progress") | {"content": []}
        new_events = self._event("response.output_item.added", output_index=len(self.output), item=item)
        return new_events + self._inner("content_part.added", part=self._item("")["content"][0])

    def _more(self, text: str) -> bytes:
        self._written += text
        if self._open is Text:
            return self._inner("output_text.delta", delta=text, logprobs=[])
        return self._inner("reasoning_text.delta", delta=text)

    def _close(self) -> bytes:
        """Log-probs are of the whole answer and come with the last message; the event of its text has no bytes."""
        if self._open is None:
            return b""
        item = self._item("completed", self.logprobs)
        name, more = "reasoning_text", {}
        if self._open is Text:
            brief = [{name: one[name] for name in ("token", "logprob", "top_logprobs")} for one in self.logprobs]
            name, more = "output_text", {"logprobs": brief}
        new_events = self._inner(f"{name}.done", text=self._written, **more)
        new_events += self._inner("content_part.done", part=item["content"][0])
        self._open = None
        return new_events + self._item_done(item)

    def _call(self, call: Call, number: int) -> bytes:
        closing_events, item = self._close(), _call(self._ask, call, number, self._ident)
        at = {"output_index": len(self.output), "item_id": item["id"]}
        custom = item["type"] == "custom_tool_call"
        field = "input" if custom else "arguments"
        name = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        added = item | {field: ""} | ({} if custom else {"status": "in_progress"})
        new_events = closing_events + self._event(
            "response.output_item.added", output_index=at["output_index"], item=added
        )
        new_events += self._event(f"{name}.delta", **at, delta=item[field])
        new_events += self._event(
            f"{name}.done", **at, **({} if custom else {"name": item["name"]}), **{field: item[field]}
        )
        return new_events + self._item_done(item)

    def _item_done(self, item: dict[str, Any]) -> bytes:
        self.output.append(item)
        return self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _item(self, status: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The open item."""
        if self._open is Text:
            part = {"type": "output_text", "text": self._written, "annotations": [], "logprobs": list(logprobs)}
            return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}
        content = [{"type": "reasoning_text", "text": self._written}]
        return {"id": self._item_id, "type": "reasoning", "summary": [], "status": status, "content": content}

    @property
    def _item_id(self) -> str:
        return f"{'msg' if self._open is Text else 'rs'}_{self._ident.id}{len(self.output)}"

    def _inner(self, kind: str, **more: Any) -> bytes:
        """An event of the open item's only part."""
        at = {"output_index": len(self.output), "content_index": 0}
        return self._event(f"response.{kind}", item_id=self._item_id, **at, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return events.event({"type": kind, "sequence_number": number} | more, kind)


writer = _ResponseEvents


# -------------------------------------------------------------------- objects


def _log_probs(ask: Ask, answer: Answer) -> list[dict[str, Any]]:
    return events.log_probs(answer, always_bytes=True) if ask.logprobs else []


def _call(ask: Ask, call: Call, number: int, ident: Ident) -> dict[str, Any]:
    call_id = events.call_id(call, "call_", ident, number)
    if any(tool.name == call.name and tool.parameters is FREEFORM_SCHEMA for tool in ask.tools):
        item = {"id": f"ctc_{ident.id}{number}", "type": "custom_tool_call", "status": "completed"}
        return item | {"call_id": call_id, "name": call.name, "input": freeform_text(call)}
    item = {"id": f"fc_{ident.id}{number}", "type": "function_call", "status": "completed"}
    return item | {"call_id": call_id, "name": call.name, "arguments": events.arguments_text(call)}


def _response(ident: Ident, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"resp_{ident.id}",
        "object": "response",
        "created_at": ident.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": ident.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


def _finished(ask: Ask, answer: Answer, ident: Ident, output: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer. How many tokens were reasoning is not counted apart: 0."""
    response = _response(ident, "incomplete" if answer.finish == "length" else "completed", output)
    if answer.finish == "length":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    prompt_tokens, reply_tokens = len(answer.prompt_ids), len(answer.tokens)
    response["usage"] = {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": reply_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + reply_tokens,
    }
    return response | events.token_ids(ask, answer)
