"""Anthropic's Messages: `POST /v1/messages` and `/v1/messages/count_tokens`.

Neighbouring messages of the assistant are one, as Anthropic reads them. Each tool result of a user's message is a
message of its own, in its place. Claude Code's billing header, which differs from request to request, is dropped.
"""

from __future__ import annotations

from typing import Any

from jaxagent.gateway.answered import Answered, Item
from jaxagent.gateway.chat import Answer, Ask, BadRequest, Call, ChatMessage, Delta, Ident, Reasoning, Text, Tool
from jaxagent.gateway.forms import checks, events, parts
from jaxagent.gateway.forms.checks import Fields, Ignored

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


def parse(raw: bytes, answered: Answered | None = None) -> Ask:
    """Reads the body of a request, or of one that only counts its tokens.

    Args:
      raw: the body.
      answered: what its session answered before; None: nothing.

    Raises:
      BadRequest: a mistake of the client's, described in one line.
    """
    ignored = Ignored()
    data = checks.parse_json(raw, mend=True)
    items = _threaded(data, answered or Answered()) if isinstance(data, dict) and data.get("thread") else ()
    body = Fields(data, "", ignored)
    system = _system(body, "system")
    messages = ((ChatMessage("system", system),) if system else ()) + _messages(body, ignored)
    tools = _tools(body.take("tools", list, default=[]), ignored)
    tools = checks.offered(body, tools)
    metadata = Fields(body.take("metadata", dict, default={}), "metadata", ignored)
    user = metadata.take("user_id", str, default="")
    metadata.done()
    told: dict[str, Any] = checks.take_common(body) | dict(
        messages=messages,
        tools=tools,
        max_tokens=checks.take_positive(body, "max_tokens"),
        stops=checks.stops(body.take("stop_sequences", list, default=[]), "stop_sequences"),
        stream_usage=True,
        user=user,
        items=items,
    )
    body.drop("cache_control")
    body.done()
    return Ask(**told, ignored=ignored.names())


def _threaded(data: dict[str, Any], answered: Answered) -> tuple[Item, ...]:
    """Puts what the server holds of a thread into a request that brings only what is new (`thread`, of a client's own
    tool loop). Returns what is held from now on: the system and the tools, and each message."""
    thread = Fields(data.pop("thread"), "thread", Ignored())
    held: tuple[Item, ...] = ({name: data[name] for name in THREADS if name in data},)
    if thread.need("type", str) == "continue":
        name = thread.need("previous_message_id", str)
        held = answered.history(name, "thread.previous_message_id", status=404, code=NO_THREAD)
        data |= {name: value for name, value in held[0].items() if name not in data}
    new = data.get("messages")
    if isinstance(new, list):
        data["messages"] = [*held[1:], *new]
        held = (*held, *new)
    return held


def _system(message: Fields, name: str) -> str:
    """The system's text, without the billing header."""
    data = message.take(name, str, list, default="")
    blocks = [data] if isinstance(data, str) else [_text(b, at, message) for b, at in _items(data, message.path(name))]
    kept = []
    for text in blocks:
        if text.startswith(BILLING):
            message.ignored.add(f"{name}: {BILLING}")
            text = text.partition("\n")[2]
        kept += [text] if text else []
    return "\n".join(kept)


def _items(data: list, at: str) -> list[tuple[Any, str]]:
    return checks.items(data, at, checks.MAX_MESSAGES)


def _text(data: Any, at: str, message: Fields) -> str:
    return parts.part_text(Fields(data, at, message.ignored), TEXT_PARTS)


def _messages(body: Fields, ignored: Ignored) -> tuple[ChatMessage, ...]:
    found: list[ChatMessage] = []
    names: dict[str, str] = {}  # of the tools called so far, by the call's id
    for item, at in _items(body.need("messages", list), "messages"):
        message = Fields(item, at, ignored)
        role = message.need("role", str)
        if role == "assistant":
            said = _assistant(message)
            names |= {call.id: call.name for call in said.calls}
            if found and found[-1].role == "assistant":
                last = found.pop()
                reasoning = last.reasoning + said.reasoning
                said = ChatMessage("assistant", last.text + said.text, last.calls + said.calls, reasoning=reasoning)
            found.append(said)
        elif role == "user":
            found += _user(message, names)
        elif role in ("system", "developer"):
            found += [ChatMessage("system", text)] if (text := _system(message, "content")) else []
        else:
            raise BadRequest(f"'{at}.role' must be one of user, assistant, system", f"{at}.role")
        message.drop("cache_control")
        message.done()
    if not found:
        raise BadRequest("'messages' must not be empty", "messages")
    if found[-1].role == "assistant":
        raise BadRequest("the last message is the assistant's: this server does not continue a message", "messages")
    return tuple(found)


def _user(message: Fields, names: dict[str, str]) -> list[ChatMessage]:
    """A user's message: texts and tool results in their order; neighbouring texts are one."""
    data = message.take("content", str, list, default="")
    if isinstance(data, str):
        return [ChatMessage("user", data)]
    found: list[ChatMessage] = []
    texts: list[str] = []
    for item, at in _items(data, message.path("content")):
        block = Fields(item, at, message.ignored)
        if (kind := block.need("type", str)) != "tool_result":
            texts.append(_shown(block, kind, f"{SHOWN} and tool_result"))
            continue
        if texts:
            found.append(ChatMessage("user", "\n".join(texts)))
            texts = []
        call = block.need("tool_use_id", str)
        found.append(ChatMessage("tool", _texts(block, "content"), call_id=call, name=names.get(call, "")))
        if block.take("is_error", bool, default=False):
            block.ignored.add("tool_result: is_error")
        block.drop("cache_control")
        block.done()
    return [*found, ChatMessage("user", "\n".join(texts))] if texts or not found else found


def _texts(block: Fields, name: str) -> str:
    """The text of a field that is a text, or blocks of what can be shown as text."""
    data = block.take(name, str, list, default="")
    if isinstance(data, str):
        return data
    inner = [Fields(one, at, block.ignored) for one, at in _items(data, block.path(name))]
    return "\n".join(_shown(one, one.take("type", str, default="text"), SHOWN) for one in inner)


def _shown(block: Fields, kind: str, readable: str) -> str:
    """The text of a block that shows the policy something. Raises BadRequest where that is no text, such as a PDF."""
    if kind == "tool_reference":
        lines = [block.need("tool_name", str)]
    elif kind == "search_result":
        lines = [block.take("title", str, default=""), block.take("source", str, default=""), _texts(block, "content")]
    elif kind == "document":
        source = Fields(block.need("source", dict), block.path("source"), block.ignored)
        if (of := source.need("type", str)) not in DOCUMENTS:
            told = f"'{source.at}' is of type '{of[:40]}'; this server reads documents of {' and '.join(DOCUMENTS)}"
            raise BadRequest(told, source.at)
        lines = [block.take(name, str, default="") for name in ("title", "context")]
        lines.append(_texts(source, DOCUMENTS[of]))
        source.drop("media_type")
        source.done()
    else:
        return parts.part_text(block, TEXT_PARTS, kind, readable)
    block.drop("cache_control", "citations")
    block.done()
    return "\n".join(filter(None, lines))


def _assistant(message: Fields) -> ChatMessage:
    data = message.take("content", str, list, default="")
    if isinstance(data, str):
        return ChatMessage("assistant", data)
    texts, reasonings, calls = [], [], []
    for item, at in _items(data, message.path("content")):
        block = Fields(item, at, message.ignored)
        kind = block.need("type", str)
        if kind == "tool_use":
            calls.append(Call(block.need("name", str), block.take("input", dict, default={}), block.need("id", str)))
            block.drop("cache_control", "caller")
            block.done()
        elif kind == "thinking":
            reasonings.append(block.take("thinking", str, default=""))
            block.drop("signature", "cache_control")
            block.done()
        elif kind == "redacted_thinking":
            message.ignored.add("redacted_thinking")
        else:
            texts.append(parts.part_text(block, TEXT_PARTS, kind, "text, tool_use and thinking"))
    return ChatMessage("assistant", "".join(texts), tuple(calls), reasoning="".join(reasonings))


def _tools(data: list, ignored: Ignored) -> tuple[Tool, ...]:
    tools = []
    for item, at in checks.items(data, "tools", checks.MAX_TOOLS):
        tool = Fields(item, at, ignored)
        if (kind := tool.take("type", str, default="custom")) == "custom":
            tools.append(parts.function_tool(tool, "input_schema"))
        else:
            ignored.add(f"tools: {kind}")
    return checks.no_name_twice(tools)


# -------------------------------------------------------------------- the answer


def body(ask: Ask, answer: Answer, *, ident: Ident) -> dict[str, Any]:
    """The whole answer."""
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text.strip():
        content.append({"type": "text", "text": answer.text})
    content += [_call(call, i, ident) | {"input": _input(call)} for i, call in enumerate(answer.calls)]
    used = _usage(len(answer.prompt_ids), answer.cached_tokens, len(answer.tokens))
    return _message(ident, content, used) | _end(answer) | _ids(ask, answer)


def count(tokens: int) -> dict[str, Any]:
    """The answer to a request that counts its tokens."""
    return {"input_tokens": tokens}


def error(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    """An error as Anthropic's clients read it; its kinds have no place for a parameter or a code."""
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": code}} if code == NO_THREAD else {}  # with which its client begins anew
    return {"type": "error", "error": {"type": kind, "message": message} | details}


class Writer:
    """The answer as events. Blanks between blocks wait for the text that follows them, so that no block is blank."""

    def __init__(self, ask: Ask, ident: Ident) -> None:
        self._ask, self._ident, self._sent = ask, ident, events.Sent()
        self._index = 0  # of the open block or the next one
        self._open: type | None = None  # what the open block is: Text or Reasoning
        self._blank = ""  # waits for the next text

    def begin(self, prompt_tokens: int, cached_tokens: int | None) -> bytes:
        """The event before the first block."""
        message = _message(self._ident, [], _usage(prompt_tokens, cached_tokens, 0))
        return _event("message_start", message=message | {"stop_reason": None, "stop_sequence": None})

    def delta(self, delta: Delta) -> bytes:
        """Events with the delta; a call comes whole."""
        number = self._sent.calls
        self._sent.add(delta)
        if isinstance(delta, Call):
            start = _call(delta, number, self._ident) | {"input": {}}
            told = {"type": "input_json_delta", "partial_json": events.json_text(_input(delta))}
            sent = self._close() + _event("content_block_start", index=self._index, content_block=start)
            sent += _event("content_block_delta", index=self._index, delta=told)
            return sent + self._stop()
        text = delta.text
        if isinstance(delta, Text):
            self._blank, text = "", self._blank + text
            if self._open is not Text and not text.strip():
                self._blank = text
                return b""
        if not text:
            return b""
        opened = b"" if self._open is type(delta) else self._close() + self._start(type(delta))
        if isinstance(delta, Text):
            told = {"type": "text_delta", "text": text}
        else:
            told = {"type": "thinking_delta", "thinking": text}
        return opened + _event("content_block_delta", index=self._index, delta=told)

    def end(self, answer: Answer) -> bytes:
        """What has not been sent, the stop reason and the usage."""
        rest = b"".join(map(self.delta, self._sent.rest(answer))) + self._close()
        used = _usage(len(answer.prompt_ids), answer.cached_tokens, len(answer.tokens))
        rest += _event("message_delta", delta=_end(answer), usage=used, **_ids(self._ask, answer))
        return rest + _event("message_stop")

    def ping(self) -> bytes:
        """Anthropic's own event for this."""
        return _event("ping")

    def failed(self, message: str, status: int, code: str | None) -> bytes:
        """The error as an event."""
        return events.event(error(message, status, None, code), "error")

    def _start(self, kind: type) -> bytes:
        self._open = kind
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        block = {"type": "text", "text": ""} if kind is Text else empty
        return _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        return b"" if self._open is None else self._stop()

    def _stop(self) -> bytes:
        """Ends the block."""
        signed = {"type": "signature_delta", "signature": ""}
        sent = b""
        if self._open is Reasoning:
            sent = _event("content_block_delta", index=self._index, delta=signed)
        sent += _event("content_block_stop", index=self._index)
        self._open, self._index = None, self._index + 1
        return sent


writer = Writer


def _event(kind: str, **more: Any) -> bytes:
    return events.event({"type": kind} | more, kind)


def _message(ident: Ident, content: list[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
    head = {"id": f"msg_{ident.id}", "type": "message", "role": "assistant", "model": ident.model}
    return head | {"content": content, "usage": used}


def _call(call: Call, number: int, ident: Ident) -> dict[str, Any]:
    return {"type": "tool_use", "id": events.call_id(call, "toolu_", ident.id, number), "name": call.name}


def _input(call: Call) -> dict[str, Any]:
    """Arguments as an object, which Anthropic's have to be."""
    return {"input": call.arguments} if isinstance(call.arguments, str) else dict(call.arguments)


def _end(answer: Answer) -> dict[str, Any]:
    return {"stop_reason": FINISH[answer.finish], "stop_sequence": answer.stop_string}


def _usage(prompt_tokens: int, cached_tokens: int | None, said: int) -> dict[str, Any]:
    """Tokens as Anthropic counts them: those read from the cache are not among the input's."""
    cached = cached_tokens or 0
    told = {"input_tokens": prompt_tokens - cached, "cache_creation_input_tokens": 0}
    return told | {"cache_read_input_tokens": cached, "output_tokens": said}


def _ids(ask: Ask, answer: Answer) -> dict[str, Any]:
    if not ask.return_token_ids:
        return {}
    return {"prompt_token_ids": list(answer.prompt_ids), "token_ids": answer.tokens.tolist()}
