"""OpenAI's Chat Completions: `POST /v1/chat/completions`.

Beside OpenAI's fields: `top_k`, `min_p`, `reasoning_content`, and `return_token_ids` with vLLM's fields in the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxagent.gateway.chat import Answer, Ask, BadRequest, Call, ChatMessage, Ident, Tool
from jaxagent.gateway.forms import completions, events, fields
from jaxagent.gateway.forms.fields import Fields

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type of a part -> the field with its text
TEXT_ONLY = "this server reads and writes text only"
FINISH = {"stop": "stop", "stop_sequence": "stop", "length": "length", "tool_calls": "tool_calls"}


# -------------------------------------------------------------------- the request


def parse(raw: bytes) -> Ask:
    """Reads the body of a request.

    Raises:
      BadRequest: a mistake of the client's, described in one line.
    """
    body = Fields(fields.parse_json(raw), "", ignored := {})
    messages = fields.conversation(_messages(body), "messages", joins=False)
    if messages[-1].role == "assistant":
        body.ignore("messages: the last one is the assistant's, and another one follows it")
    tools = fields.take_tools(body, {"function": _tool}, "function")
    for name in ("functions", "function_call"):
        body.refuse(name, "OpenAI replaced it by 'tools' and 'tool_choice'; send these", [], "auto", "none")
    body.refuse("continue_final_message", "this server does not continue a message", False)
    body.refuse("audio", TEXT_ONLY)
    body.refuse("modalities", TEXT_ONLY, ["text"])
    if not body.take("parallel_tool_calls", bool, default=True):
        body.ignore("parallel_tool_calls")
    newer, older = fields.take_positive(body, "max_completion_tokens"), fields.take_positive(body, "max_tokens")
    common = fields.take_common(body) | fields.take_openai(body)
    offered, logprobs = fields.offered(body, tools), body.take("logprobs", bool, default=False)
    body.refuse_rest()
    most = older if newer is None else newer
    return Ask(messages, offered, max_tokens=most, logprobs=logprobs, ignored=tuple(ignored), **common)


def _messages(body: Fields) -> Iterator[ChatMessage]:
    for message in body.each(body.need("messages", list), "messages"):
        if (role := message.need("role", str)) not in ROLES:
            raise BadRequest(f"'{message.path('role')}' must be one of {', '.join(ROLES)}", message.path("role"))
        text = fields.content(message, TEXT_PARTS, "" if role == "assistant" else "\n")
        if role == "assistant":
            message.refuse("audio", TEXT_ONLY)
            calls = _calls(message)
            thoughts = [message.take(n, str, dict, list, default="") for n in ("reasoning_content", "reasoning")]
            reasoning = next((one for one in thoughts if one and isinstance(one, str)), "")
            text = text or message.take("refusal", str, default="")
            message.drop("refusal")
            yield ChatMessage("assistant", text, calls, reasoning=reasoning)
        elif role == "tool":
            call, name = (message.take(field, str, default="") for field in ("tool_call_id", "name"))
            yield ChatMessage("tool", text, call_id=call, name=name)
        else:
            yield ChatMessage(ROLES[role], text)


def _calls(message: Fields) -> tuple[Call, ...]:
    message.refuse("function_call", "OpenAI replaced it by 'tool_calls'; send these")
    calls = []
    for call in message.each(message.take("tool_calls", list, default=[]), "tool_calls"):
        if (kind := call.take("type", str, default="function")) != "function":
            raise BadRequest(f"'{call.path('type')}' must be 'function', it is '{kind[:40]}'", call.path("type"))
        function = call.inner("function")
        arguments = fields.arguments(function.take("arguments", str, default=""))
        calls.append(Call(function.need("name", str), arguments, call.take("id", str, default="")))
        call.drop("index")
        call.refuse_rest()
        function.refuse_rest()
    return tuple(calls)


def _tool(tool: Fields) -> Tool:
    function = tool.inner("function")
    parsed_tool = fields.function_tool(function)
    function.refuse_rest()
    tool.drop("cache_control")
    return parsed_tool


# -------------------------------------------------------------------- the answer


def body(ask: Ask, *answers: Answer, ident: Ident) -> dict[str, Any]:
    """The whole answer; each of several is a choice."""
    choices = [{"index": i, "message": _message(a, ident)} | _end(ask, a) for i, a in enumerate(answers)]
    answer = _head(ident, "chat.completion") | {"choices": choices, "usage": completions.usage_of(answers)}
    return answer | _prompt(ask, answers[0])


def _message(answer: Answer, ident: Ident) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call, i, ident) for i, call in enumerate(answer.calls)]
    elif not answer.text:
        message["content"] = ""
    return message


error = completions.error


class _ChatEvents(events.EventWriter):
    """`chat.completion.chunk` events. Log-probs and token ids come with the finish reason."""

    _index = 0  # of the choice

    def begin(self, prompt_tokens: int, cached_tokens: int | None) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def _text(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def _reasoning(self, text: str) -> bytes:
        return self._chunk({"reasoning_content": text})

    def _call(self, call: Call, number: int) -> bytes:
        return self._chunk({"tool_calls": [{"index": number} | _call(call, number, self._ident)]})

    def end(self, *answers: Answer) -> bytes:
        rest = b""
        for self._index, answer in enumerate(answers):
            if self._index:
                self._texts = self._reasonings = self._calls = 0
                rest += self.begin(0, None)
            rest += self._rest(answer)
            rest += self._chunk({}, _prompt(self._ask, answer), **_end(self._ask, answer))
        if self._ask.stream_usage:
            head = _head(self._ident, "chat.completion.chunk")
            rest += events.event(head | {"choices": [], "usage": completions.usage_of(answers)})
        return rest + b"data: [DONE]\n\n"

    def ping(self) -> bytes:
        """A chunk with an empty delta: clients that read `choices[0]` of every chunk survive it."""
        return self._chunk({})

    def failed(self, message: str, status: int, code: str | None) -> bytes:
        return events.event(error(message, status, None, code))

    def _chunk(self, delta: dict[str, Any], more: dict[str, Any] | None = None, **choice: Any) -> bytes:
        one = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None} | choice
        more = ({"usage": None} if self._ask.stream_usage else {}) | (more or {})
        return events.event(_head(self._ident, "chat.completion.chunk") | {"choices": [one]} | more)


writer = _ChatEvents


def _head(ident: Ident, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{ident.id}", "object": kind, "created": ident.created, "model": ident.model}


def _call(call: Call, number: int, ident: Ident) -> dict[str, Any]:
    function = {"name": call.name, "arguments": events.arguments_text(call)}
    return {"id": events.call_id(call, "call_", ident, number), "type": "function", "function": function}


def _end(ask: Ask, answer: Answer) -> dict[str, Any]:
    """How a choice ended; `stop_reason` is vLLM's: the stop string."""
    end: dict[str, Any] = {"finish_reason": FINISH[answer.finish], "stop_reason": answer.stop_string}
    end["logprobs"] = {"content": events.log_probs(answer), "refusal": None} if ask.logprobs else None
    return end | ({"token_ids": answer.tokens.tolist()} if ask.return_token_ids else {})


def _prompt(ask: Ask, answer: Answer) -> dict[str, Any]:
    return {"prompt_token_ids": list(answer.prompt_ids)} if ask.return_token_ids else {}
