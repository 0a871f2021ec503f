"""OpenAI's Chat Completions: `POST /v1/chat/completions`.

Beside OpenAI's fields: `top_k`, `min_p`, `reasoning_content`, and `return_token_ids` with vLLM's fields in the answer.
"""

from __future__ import annotations

from typing import Any

from jaxagent.gateway.chat import Answer, Ask, BadRequest, Call, ChatMessage, Delta, Ident, Reasoning, Text, Tool
from jaxagent.gateway.forms import checks, completions, events, parts
from jaxagent.gateway.forms.checks import Fields, Ignored

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type of a part -> the field with its text
FINISH = {"stop": "stop", "stop_sequence": "stop", "length": "length", "tool_calls": "tool_calls"}


# -------------------------------------------------------------------- the request


def parse(raw: bytes) -> Ask:
    """Reads the body of a request.

    Raises:
      BadRequest: a mistake of the client's, described in one line.
    """
    ignored = Ignored()
    body = Fields(checks.parse_json(raw, mend=True), "", ignored)
    messages = _messages(body.need("messages", list), ignored)
    tools = _tools(body.take("tools", list, default=[]), ignored)
    for name in ("functions", "function_call"):
        body.refuse(name, "OpenAI replaced it by 'tools' and 'tool_choice'; send these", [], "auto", "none")
    body.refuse("continue_final_message", "this server does not continue a message", False)
    body.refuse("audio", "this server reads and writes text only")
    body.refuse("modalities", "this server reads and writes text only", ["text"])
    if not body.take("parallel_tool_calls", bool, default=True):
        ignored.add("parallel_tool_calls")
    newer, older = checks.take_positive(body, "max_completion_tokens"), checks.take_positive(body, "max_tokens")
    told = checks.take_common(body) | checks.take_openai(body)
    told |= dict(
        messages=messages,
        tools=checks.offered(body, tools),
        max_tokens=older if newer is None else newer,
        logprobs=body.take("logprobs", bool, default=False),
    )
    body.done()
    return Ask(**told, ignored=ignored.names())


def _messages(data: list, ignored: Ignored) -> tuple[ChatMessage, ...]:
    found: list[ChatMessage] = []
    names: dict[str, str] = {}  # of the tools called so far, by the call's id
    for item, at in checks.items(data, "messages", checks.MAX_MESSAGES):
        message = Fields(item, at, ignored)
        if (role := message.need("role", str)) not in ROLES:
            raise BadRequest(f"'{at}.role' must be one of {', '.join(ROLES)}", f"{at}.role")
        text = parts.content(message, TEXT_PARTS, "" if role == "assistant" else "\n")
        if role == "assistant":
            message.refuse("audio", "this server reads and writes text only")
            calls = tuple(_calls(message))
            names |= {call.id: call.name for call in calls}
            reasonings = [
                message.take(name, str, dict, list, default="") for name in ("reasoning_content", "reasoning")
            ]
            reasoning = next((one for one in reasonings if one and isinstance(one, str)), "")
            text = text or message.take("refusal", str, default="")
            message.drop("refusal")
            found.append(ChatMessage("assistant", text, calls, reasoning=reasoning))
        elif role == "tool":
            call = message.take("tool_call_id", str, default="")
            name = message.take("name", str, default="") or names.get(call, "")
            found.append(ChatMessage("tool", text, call_id=call, name=name))
        else:
            found.append(ChatMessage(ROLES[role], text))
        message.done()
    if not found:
        raise BadRequest("'messages' must not be empty", "messages")
    if found[-1].role == "assistant":
        ignored.add("messages: the last one is the assistant's, and another one follows it")
    return tuple(found)


def _calls(message: Fields) -> list[Call]:
    message.refuse("function_call", "OpenAI replaced it by 'tool_calls'; send these")
    calls = []
    data = message.take("tool_calls", list, default=[])
    for item, at in checks.items(data, message.path("tool_calls"), checks.MAX_MESSAGES):
        call = Fields(item, at, message.ignored)
        if (kind := call.take("type", str, default="function")) != "function":
            raise BadRequest(f"'{at}.type' must be 'function', it is '{kind[:40]}'", f"{at}.type")
        function = Fields(call.need("function", dict), f"{at}.function", message.ignored)
        arguments = checks.arguments(function.take("arguments", str, default=""))
        calls.append(Call(function.need("name", str), arguments, call.take("id", str, default="")))
        call.drop("index")
        call.done()
        function.done()
    return calls


def _tools(data: list, ignored: Ignored) -> tuple[Tool, ...]:
    tools = []
    for item, at in checks.items(data, "tools", checks.MAX_TOOLS):
        outer = Fields(item, at, ignored)
        if (kind := outer.take("type", str, default="function")) != "function":
            ignored.add(f"tools: {kind}")
            continue
        tools.append(parts.function_tool(Fields(outer.need("function", dict), f"{at}.function", ignored)))
        outer.drop("cache_control")
        outer.done()
    return checks.no_name_twice(tools)


# -------------------------------------------------------------------- the answer


def body(ask: Ask, *answers: Answer, ident: Ident) -> dict[str, Any]:
    """The whole answer; each of several is a choice."""
    choices = [{"index": i, "message": _said(a, ident)} | _end(ask, a) for i, a in enumerate(answers)]
    told = _head(ident, "chat.completion") | {"choices": choices, "usage": completions.usage_of(answers)}
    return told | _prompt(ask, answers[0])


def _said(answer: Answer, ident: Ident) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call, i, ident) for i, call in enumerate(answer.calls)]
    elif not answer.text:
        message["content"] = ""
    return message


error = completions.error


class Writer:
    """The answer as `chat.completion.chunk` events. Log-probs and token ids come with the finish reason."""

    def __init__(self, ask: Ask, ident: Ident) -> None:
        self._ask, self._ident, self._sent = ask, ident, events.Sent()
        self._index = 0  # of the choice

    def begin(self, prompt_tokens: int, cached_tokens: int | None) -> bytes:
        """The chunk that says who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        """A chunk with the delta; a call comes whole."""
        number = self._sent.calls
        self._sent.add(delta)
        if isinstance(delta, Text):
            return self._chunk({"content": delta.text})
        if isinstance(delta, Reasoning):
            return self._chunk({"reasoning_content": delta.text})
        return self._chunk({"tool_calls": [{"index": number} | _call(delta, number, self._ident)]})

    def end(self, *answers: Answer) -> bytes:
        """What has not been sent, each choice's finish reason, usage where asked for, and [DONE]."""
        rest = b""
        for self._index, answer in enumerate(answers):
            if self._index:
                self._sent = events.Sent()
                rest += self.begin(0, None)
            rest += b"".join(map(self.delta, self._sent.rest(answer)))
            rest += self._chunk({}, _prompt(self._ask, answer), **_end(self._ask, answer))
        if self._ask.stream_usage:
            head = _head(self._ident, "chat.completion.chunk")
            rest += events.event(head | {"choices": [], "usage": completions.usage_of(answers)})
        return rest + b"data: [DONE]\n\n"

    def ping(self) -> bytes:
        """A chunk with an empty delta: clients that read `choices[0]` of every chunk survive it."""
        return self._chunk({})

    def failed(self, message: str, status: int, code: str | None) -> bytes:
        """The error as an event."""
        return events.event(error(message, status, None, code))

    def _chunk(self, delta: dict[str, Any], more: dict[str, Any] | None = None, **choice: Any) -> bytes:
        one = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None} | choice
        more = ({"usage": None} if self._ask.stream_usage else {}) | (more or {})
        return events.event(_head(self._ident, "chat.completion.chunk") | {"choices": [one]} | more)


writer = Writer


def _head(ident: Ident, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{ident.id}", "object": kind, "created": ident.created, "model": ident.model}


def _call(call: Call, number: int, ident: Ident) -> dict[str, Any]:
    function = {"name": call.name, "arguments": events.arguments_text(call)}
    return {"id": events.call_id(call, "call_", ident.id, number), "type": "function", "function": function}


def _end(ask: Ask, answer: Answer) -> dict[str, Any]:
    """How a choice ended; `stop_reason` is vLLM's: the stop string."""
    told: dict[str, Any] = {"finish_reason": FINISH[answer.finish], "stop_reason": answer.stop_string}
    told["logprobs"] = {"content": events.log_probs(answer), "refusal": None} if ask.logprobs else None
    return told | ({"token_ids": answer.tokens.tolist()} if ask.return_token_ids else {})


def _prompt(ask: Ask, answer: Answer) -> dict[str, Any]:
    return {"prompt_token_ids": list(answer.prompt_ids)} if ask.return_token_ids else {}
