"""OpenAI's Responses: what a request is answered with, whole and as events.

Clients read the events strictly: each item is added, filled and done, and every event has the next sequence number.
The request is not repeated in the answer (`tools` is empty, `instructions` null).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxagent.gateway.answered import Item
from jaxagent.gateway.chat import Answer, Ask, Call, Delta, Ident, Reasoning, Text
from jaxagent.gateway.forms import events, parts

ERROR_CODES = {429: "rate_limit_exceeded"}  # the codes that OpenAI's clients know


def body(ask: Ask, answer: Answer, *, ident: Ident) -> dict[str, Any]:
    """The whole answer."""
    output = []
    if answer.reasoning:
        output.append(_reasoning(_item_id("rs", ident, 0), answer.reasoning))
    if answer.text.strip():
        logprobs = events.log_probs(answer, always_bytes=True) if ask.logprobs else []
        output.append(_message(_item_id("msg", ident, len(output)), answer.text, logprobs))
    output += [_call(ask, call, i, ident) for i, call in enumerate(answer.calls)]
    return _finished(ask, answer, ident, output)


class Writer:
    """The answer as events. Blanks between items wait for the text that follows them, so that no item is blank."""

    def __init__(self, ask: Ask, ident: Ident) -> None:
        self._ask, self._ident, self._sent = ask, ident, events.Sent()
        self._number = 0  # of the next event
        self._output: list[dict[str, Any]] = []  # items that are done
        self._open: type | None = None  # what the open item is: Text or Reasoning
        self._text, self._blank = "", ""  # of the open item; what waits for the next text

    def begin(self, prompt_tokens: int, cached_tokens: int | None) -> bytes:
        """The events before the first item."""
        response = _response(self._ident, "in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        """Events with the delta; a call comes whole."""
        number = self._sent.calls
        self._sent.add(delta)
        if isinstance(delta, Call):
            return self._close() + self._called(_call(self._ask, delta, number, self._ident))
        if isinstance(delta, Text):
            self._blank, text = "", self._blank + delta.text
            if self._open is not Text and not text.strip():
                self._blank = text
                return b""
        else:
            text = delta.text
        if not text:
            return b""
        opened = b"" if self._open is type(delta) else self._close() + self._begin_item(type(delta))
        self._text += text
        if isinstance(delta, Reasoning):
            return opened + self._inner("response.reasoning_text.delta", delta=text)
        return opened + self._inner("response.output_text.delta", delta=text, logprobs=[])

    @property
    def output(self) -> Sequence[Item]:
        """The items that are done."""
        return self._output

    def end(self, answer: Answer) -> bytes:
        """What has not been sent, the end of the last item, and the whole answer."""
        rest = b"".join(map(self.delta, self._sent.rest(answer)))
        rest += self._close(events.log_probs(answer, always_bytes=True) if self._ask.logprobs else [])
        response = _finished(self._ask, answer, self._ident, self._output)
        return rest + self._event(f"response.{response['status']}", response=response)

    def ping(self) -> bytes:
        """OpenAI's event that work goes on, which says nothing new; its clients refuse types that they do not know."""
        return self._event("response.in_progress", response=_response(self._ident, "in_progress", []))

    def failed(self, message: str, status: int, code: str | None) -> bytes:
        """The event that says why there is no answer."""
        response = _response(self._ident, "failed", self._output)
        known = "server_error" if status >= 500 else "invalid_prompt"
        response["error"] = {"code": code or ERROR_CODES.get(status, known), "message": message}
        return self._event("response.failed", response=response)

    # ---------------------------------------------------------------- items

    def _begin_item(self, kind: type) -> bytes:
        self._open, self._text = kind, ""
        added = self._item("in_progress", [])
        added["content"] = []
        sent = self._event("response.output_item.added", output_index=len(self._output), item=added)
        return sent + self._inner("response.content_part.added", part=self._part([]))

    def _close(self, logprobs: list[dict[str, Any]] | None = None) -> bytes:
        """Ends the open item. Log-probs are of the whole answer and come with the last message."""
        if self._open is None:
            return b""
        name = "output_text" if self._open is Text else "reasoning_text"
        told = {"logprobs": _brief(logprobs)} if self._open is Text else {}
        sent = self._inner(f"response.{name}.done", text=self._text, **told)
        sent += self._inner("response.content_part.done", part=self._part(logprobs))
        item = self._item("completed", logprobs)
        self._open = None
        return sent + self._done(item)

    def _called(self, item: dict[str, Any]) -> bytes:
        at = {"output_index": len(self._output), "item_id": item["id"]}
        custom = item["type"] == "custom_tool_call"
        field = "input" if custom else "arguments"
        name = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        added = item | {field: ""} | ({} if custom else {"status": "in_progress"})
        sent = self._event("response.output_item.added", output_index=at["output_index"], item=added)
        sent += self._event(f"{name}.delta", **at, delta=item[field])
        sent += self._event(f"{name}.done", **at, **({} if custom else {"name": item["name"]}), **{field: item[field]})
        return sent + self._done(item)

    def _done(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _item(self, status: str, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
        """The open item."""
        number = len(self._output)
        if self._open is Text:
            return _message(_item_id("msg", self._ident, number), self._text, logprobs or [], status)
        return _reasoning(_item_id("rs", self._ident, number), self._text, status)

    def _part(self, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
        return self._item("", logprobs)["content"][0]

    def _inner(self, kind: str, **more: Any) -> bytes:
        """An event of the open item's only part."""
        at = {"output_index": len(self._output), "content_index": 0}
        item_id = _item_id("msg" if self._open is Text else "rs", self._ident, len(self._output))
        return self._event(kind, item_id=item_id, **at, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return events.event({"type": kind, "sequence_number": number} | more, kind)


writer = Writer


# -------------------------------------------------------------------- objects


def _item_id(prefix: str, ident: Ident, number: int) -> str:
    return f"{prefix}_{ident.id}{number}"


def _message(item_id: str, text: str, logprobs: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}


def _reasoning(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "status": status, "content": content}


def _call(ask: Ask, call: Call, number: int, ident: Ident) -> dict[str, Any]:
    call_id = events.call_id(call, "call_", ident.id, number)
    if any(tool.name == call.name and isinstance(tool, parts.Freeform) for tool in ask.tools):
        told = {"id": _item_id("ctc", ident, number), "type": "custom_tool_call", "status": "completed"}
        return told | {"call_id": call_id, "name": call.name, "input": parts.freeform_text(call)}
    told = {"id": _item_id("fc", ident, number), "type": "function_call", "status": "completed"}
    return told | {"call_id": call_id, "name": call.name, "arguments": events.arguments_text(call)}


def _brief(logprobs: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Log-probs as the event of a text's end has them: without bytes."""
    return [{name: one[name] for name in ("token", "logprob", "top_logprobs")} for one in logprobs or []]


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
    asked, said = len(answer.prompt_ids), len(answer.tokens)
    response["usage"] = {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": asked + said,
    }
    if ask.return_token_ids:
        response |= {"prompt_token_ids": list(answer.prompt_ids), "token_ids": answer.tokens.tolist()}
    return response
