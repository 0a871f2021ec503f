"""Anthropic's Messages: `POST /v1/messages` and `/v1/messages/count_tokens`.

Neighbouring messages of the assistant are one, as Anthropic reads them. Each tool result of a user's message is a
message of its own, in its place. Claude Code's billing header, which differs from request to request, is dropped.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator
from typing import Any

from jaxagent.gateway.chat import Answer, Ask, BadRequest, Call, ChatMessage, Ident, Reasoning, Text
from jaxagent.gateway.forms import events, fields
from jaxagent.gateway.forms.fields import Fields
from jaxagent.gateway.forms.history import AnswerHistory, Item

THREADS = ("system", "tools")  # fields that a thread has from its first request
NO_THREAD = "thread_not_found"
BILLING = "x-anthropic-billing-header"
TEXT_PARTS = {"text": "text"}
SHOWN = "text, document, search_result, tool_reference"
DOCUMENTS = {"text": "data", "content": "content"}  # kind of a document's source -> the field that has its text
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "stop_sequence": "stop_sequence"}


# -------------------------------------------------------------------- the request


def parse(raw: bytes, history: AnswerHistory | None = None) -> Ask:
    """Reads the body of a request, or of one that only counts its tokens.

    Args:
      raw: the body.
      history: what its session answered before; None: nothing.

    Raises:
      BadRequest: a mistake of the client's, described in one line.
    """
    data = fields.parse_json(raw)
    items = _threaded(data, history or AnswerHistory()) if isinstance(data, dict) and data.get("thread") else ()
    body = Fields(data, "", ignored := {})
    system = _system(body, "system")
    messages = fields.conversation(_messages(body), "messages")
    if messages[-1].role == "assistant":
        raise BadRequest("the last message is the assistant's: this server does not continue a message", "messages")
    messages = ((ChatMessage("system", system),) if system else ()) + messages
    tool = functools.partial(fields.function_tool, schema="input_schema")
    tools = fields.offered(body, fields.take_tools(body, {"custom": tool}, "custom"))
    metadata = body.inner("metadata", {})
    user = metadata.take("user_id", str, default="")
    metadata.refuse_rest()
    common, most = fields.take_common(body), fields.take_positive(body, "max_tokens")
    common["stops"] = fields.stops(body.take("stop_sequences", list, default=[]), "stop_sequences")
    body.drop("cache_control")
    body.refuse_rest()
    common |= {"user": user, "items": items, "ignored": tuple(ignored)}
    return Ask(messages, tools, max_tokens=most, stream_usage=True, **common)


def _threaded(data: dict[str, Any], history: AnswerHistory) -> tuple[Item, ...]:
    """Puts what the server holds of a thread into a request that brings only what is new (`thread`, of a client's own
    tool loop). Returns what is held from now on: the system and the tools, and each message."""
    thread = Fields(data.pop("thread"), "thread", {})
    thread_items: tuple[Item, ...] = ({name: data[name] for name in THREADS if name in data},)
    if thread.need("type", str) == "continue":
        name = thread.need("previous_message_id", str)
        thread_items = history.items_up_to(name, "thread.previous_message_id", status=404, code=NO_THREAD)
        data |= {name: value for name, value in thread_items[0].items() if name not in data}
    new = data.get("messages")
    if isinstance(new, list):
        data["messages"] = [*thread_items[1:], *new]
        thread_items = (*thread_items, *new)
    return thread_items


def _system(message: Fields, name: str) -> str:
    """The system's text, without the billing header."""
    data = message.text_or_each(name)
    texts = []
    for text in [data] if isinstance(data, str) else [fields.part_text(block, TEXT_PARTS) for block in data]:
        if text.startswith(BILLING):
            message.ignore(f"{name}: {BILLING}")
            text = text.partition("\n")[2]
        texts += [text] if text else []
    return "\n".join(texts)


def _messages(body: Fields) -> Iterator[ChatMessage]:
    for message in body.each(body.need("messages", list), "messages"):
        role = message.need("role", str)
        if role == "assistant":
            yield _assistant(message)
        elif role == "user":
            yield from _user(message)
        elif role in ("system", "developer"):
            if text := _system(message, "content"):
                yield ChatMessage("system", text)
        else:
            raise BadRequest(f"'{message.path('role')}' must be one of user, assistant, system", message.path("role"))
        message.drop("cache_control")


def _user(message: Fields) -> list[ChatMessage]:
    """A user's message: texts and tool results in their order; neighbouring texts are one."""
    data = message.text_or_each("content")
    if isinstance(data, str):
        return [ChatMessage("user", data)]
    messages: list[ChatMessage] = []
    texts: list[str] = []
    for block in data:
        if (kind := block.need("type", str)) != "tool_result":
            texts.append(_block_text(block, kind, f"{SHOWN} and tool_result"))
            continue
        if texts:
            messages.append(ChatMessage("user", "\n".join(texts)))
            texts = []
        call = block.need("tool_use_id", str)
        messages.append(ChatMessage("tool", _texts(block, "content"), call_id=call))
        if block.take("is_error", bool, default=False):
            block.ignore("tool_result: is_error")
        block.drop("cache_control")
    return [*messages, ChatMessage("user", "\n".join(texts))] if texts or not messages else messages


def _texts(block: Fields, name: str) -> str:
    """The text of a field that is a text, or blocks of what can be shown as text."""
    data = block.text_or_each(name)
    if isinstance(data, str):
        return data
    return "\n".join(_block_text(inner, inner.take("type", str, default="text"), SHOWN) for inner in data)


def _block_text(block: Fields, kind: str, readable: str) -> str:
    """The text of a block that shows the policy something. Raises BadRequest where that is no text, such as a PDF."""
    if kind == "tool_reference":
        lines = [block.need("tool_name", str)]
    elif kind == "search_result":
        lines = [block.take("title", str, default=""), block.take("source", str, default=""), _texts(block, "content")]
    elif kind == "document":
        source = block.inner("source")
        if (of := source.need("type", str)) not in DOCUMENTS:
            why = f"'{source.at}' is of type '{of[:40]}'; this server reads documents of {' and '.join(DOCUMENTS)}"
            raise BadRequest(why, source.at)
        lines = [block.take(name, str, default="") for name in ("title", "context")]
        lines.append(_texts(source, DOCUMENTS[of]))
        source.drop("media_type")
        source.refuse_rest()
    else:
        return fields.part_text(block, TEXT_PARTS, kind, readable)
    block.drop("cache_control", "citations")
    return "\n".join(filter(None, lines))


def _assistant(message: Fields) -> ChatMessage:
    data = message.text_or_each("content")
    if isinstance(data, str):
        return ChatMessage("assistant", data)
    texts, reasonings, calls = [], [], []
    for block in data:
        kind = block.need("type", str)
        if kind == "tool_use":
            calls.append(Call(block.need("name", str), block.take("input", dict, default={}), block.need("id", str)))
            block.drop("cache_control", "caller")
        elif kind == "thinking":
            reasonings.append(block.take("thinking", str, default=""))
            block.drop("signature", "cache_control")
        elif kind == "redacted_thinking":
            block.ignore_all("redacted_thinking")
        else:
            texts.append(fields.part_text(block, TEXT_PARTS, kind, "text, tool_use and thinking"))
    return ChatMessage("assistant", "".join(texts), tuple(calls), reasoning="".join(reasonings))


# -------------------------------------------------------------------- the answer


def body(ask: Ask, answer: Answer, *, ident: Ident) -> dict[str, Any]:
    """The whole answer."""
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text.strip():
        content.append({"type": "text", "text": answer.text})
    content += [_call(call, i, ident) | {"input": _input(call)} for i, call in enumerate(answer.calls)]
    usage = _usage(len(answer.prompt_ids), answer.cached_tokens, len(answer.tokens))
    return _message(ident, content, usage) | _end(answer) | events.token_ids(ask, answer)


def count(tokens: int) -> dict[str, Any]:
    """The answer to a request that counts its tokens."""
    return {"input_tokens": tokens}


def model(name: str, created: int) -> dict[str, Any]:
    """A model as Anthropic's clients read it. created: seconds since the epoch."""
    time = datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": time, "lifecycle": "active"}


def models(name: str, created: int) -> dict[str, Any]:
    """The list of the server's only model."""
    return {"data": [model(name, created)], "has_more": False, "first_id": name, "last_id": name}


def error(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    """An error as Anthropic's clients read it; its kinds have no place for a parameter or a code."""
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": code}} if code == NO_THREAD else {}  # with which its client begins anew
    return {"type": "error", "error": {"type": kind, "message": message} | details}


class _MessageEvents(events.BlockWriter):
    """Anthropic's events, of which every block has a number."""

    _index = 0  # of the open block or the next one

    def begin(self, prompt_tokens: int, cached_tokens: int | None) -> bytes:
        message = _message(self._ident, [], _usage(prompt_tokens, cached_tokens, 0))
        return _event("message_start", message=message | {"stop_reason": None, "stop_sequence": None})

    def end(self, *answers: Answer) -> bytes:
        (answer,) = answers
        rest = self._rest(answer) + self._close()
        usage = _usage(len(answer.prompt_ids), answer.cached_tokens, len(answer.tokens))
        rest += _event("message_delta", delta=_end(answer), usage=usage, **events.token_ids(self._ask, answer))
        return rest + _event("message_stop")

    def ping(self) -> bytes:
        return _event("ping")

    def failed(self, message: str, status: int, code: str | None) -> bytes:
        return events.event(error(message, status, None, code), "error")

    def _call(self, call: Call, number: int) -> bytes:
        block = _call(call, number, self._ident) | {"input": {}}
        new_events = self._close() + _event("content_block_start", index=self._index, content_block=block)
        return new_events + self._delta("input_json_delta", partial_json=events.json_text(_input(call))) + self._stop()

    def _begin_block(self, kind: type) -> bytes:
        self._open = kind
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        block = {"type": "text", "text": ""} if kind is Text else empty
        return _event("content_block_start", index=self._index, content_block=block)

    def _more(self, text: str) -> bytes:
        return (
            self._delta("text_delta", text=text) if self._open is Text else self._delta("thinking_delta", thinking=text)
        )

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        return (self._delta("signature_delta", signature="") if self._open is Reasoning else b"") + self._stop()

    def _stop(self) -> bytes:
        self._open, self._index = None, self._index + 1
        return _event("content_block_stop", index=self._index - 1)

    def _delta(self, kind: str, **more: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind} | more)


writer = _MessageEvents


def _event(kind: str, **more: Any) -> bytes:
    return events.event({"type": kind} | more, kind)


def _message(ident: Ident, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    head = {"id": f"msg_{ident.id}", "type": "message", "role": "assistant", "model": ident.model}
    return head | {"content": content, "usage": usage}


def _call(call: Call, number: int, ident: Ident) -> dict[str, Any]:
    return {"type": "tool_use", "id": events.call_id(call, "toolu_", ident, number), "name": call.name}


def _input(call: Call) -> dict[str, Any]:
    """Arguments as an object, which Anthropic's have to be."""
    return {"input": call.arguments} if isinstance(call.arguments, str) else dict(call.arguments)


def _end(answer: Answer) -> dict[str, Any]:
    return {"stop_reason": FINISH[answer.finish], "stop_sequence": answer.stop_string}


def _usage(prompt_tokens: int, cached_tokens: int | None, output_tokens: int) -> dict[str, Any]:
    """Tokens as Anthropic counts them: those read from the cache are not among the input's."""
    cached = cached_tokens or 0
    read = {"input_tokens": prompt_tokens - cached, "cache_creation_input_tokens": 0}
    return read | {"cache_read_input_tokens": cached, "output_tokens": output_tokens}
