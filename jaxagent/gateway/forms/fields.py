"""What the dialects read alike: JSON, fields and their types, sampling ranges, stop strings, texts, tools and calls.

A field that is null counts as absent. What is sent and has no effect is collected, so that somebody can count it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxagent.config import LEAST_TEMPERATURE, SamplingConfig
from jaxagent.gateway.chat import BadRequest, ChatMessage, Tool

MAX_DEPTH = 128  # of the JSON
MAX_STOPS, MAX_STOP_BYTES = 128, 256
MAX_TOOLS, MAX_MESSAGES = 1024, 16384
MAX_IGNORED, MAX_IGNORED_CHARS = 64, 80
MOST_TEMPERATURE = 1000.0
MAX_CHOICES = 128  # of one request
LEAST_TOP_P = 1e-6  # what a top_p of 0 means: the likeliest token alone
CHOICES = {"auto": False, "none": False, "required": True, "any": True}  # of a tool -> whether that is a wish only
NUMBER = (int, float)
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


# -------------------------------------------------------------------- JSON


def parse_json(raw: bytes) -> Any:
    """JSON that is UTF-8, with finite numbers, no key twice, and `MAX_DEPTH` levels at most.

    Half of a surrogate pair becomes U+FFFD. Programs that cut a tool's output by UTF-16 units send such halves, with
    every later request too, and could never go on if that were refused.

    Raises:
      BadRequest: it is not.
    """
    try:
        value = _loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    halves = b"\\ud" in raw.lower()  # only an escape can be one: the bytes were UTF-8
    return _mended(value) if halves else value


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is; None if it is none, or has half of a surrogate pair."""
    try:
        value = _loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _loads(text: str) -> Any:
    value = _DECODER.decode(text)
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"it has more than {MAX_DEPTH} levels")
        nests = [one for one in level if isinstance(one, dict | list)]
        level = [child for one in nests for child in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return value


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large for a number")
    return number


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        names_so_far: set[str] = set()
        twice = next(key for key, _ in pairs if key in names_so_far or names_so_far.add(key))
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return data


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_no_key_twice)


def _mended(value: Any) -> Any:
    """The value with U+FFFD for every half of a surrogate pair."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mended(child) for child in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(child) for key, child in value.items()}
    return value


# -------------------------------------------------------------------- fields


class Fields:
    """An object whose fields are taken one by one, with their types; what is left over in the end is ignored.

    Args:
      data: the object.
      at: its place in the body; "" for the body itself.
      ignored: gets the names of what was sent and has no effect, each once, `MAX_IGNORED` at most; None: such a field
        is refused.

    Raises:
      BadRequest: the data are no object.
    """

    def __init__(self, data: Any, at: str, ignored: dict[str, None] | None) -> None:
        if not isinstance(data, dict):
            raise BadRequest(f"'{at}' must be an object" if at else "the body must be an object", at or None)
        self._unread = {name: value for name, value in data.items() if value is not None}
        self.at, self.ignored = at, ignored

    def path(self, name: str) -> str:
        """The field's name from the top of the body."""
        return f"{self.at}.{name}" if self.at else name

    def take(self, name: str, *types: type, default: Any = None) -> Any:
        """The field's value, or the default where it is absent; 100 for 100.0 where a whole number is wanted.

        Raises:
          BadRequest: the value is of another type.
        """
        if (value := self._unread.pop(name, None)) is None:
            return default
        if type(value) is float and int in types and value.is_integer():  # JSON knows one kind of numbers
            value = int(value)
        if type(value) not in types:
            type_names = " or ".join({"dict": "object"}.get(t.__name__, t.__name__) for t in types)
            raise BadRequest(f"'{self.path(name)}' must be {type_names}", self.path(name))
        return value

    def need(self, name: str, *types: type) -> Any:
        """The value of a field that must be there."""
        if (value := self.take(name, *types)) is None:
            raise BadRequest(f"'{self.path(name)}' is missing", self.path(name))
        return value

    def inner(self, name: str, default: Mapping[str, Any] | None = None) -> Fields:
        """The object in a field, which must be there unless there is a default."""
        data = self.need(name, dict) if default is None else self.take(name, dict, default=default)
        return Fields(data, self.path(name), self.ignored)

    def each(self, data: Sequence[Any], name: str, most: int | None = None) -> Iterator[Fields]:
        """The objects of a list of the field `name`, of which what is left over is ignored once each has been read."""
        for item, at in items(data, self.path(name), MAX_MESSAGES if most is None else most):
            fields = Fields(item, at, self.ignored)
            yield fields
            fields.refuse_rest()

    def text_or_each(self, name: str) -> str | Iterator[Fields]:
        """The text of a field, "" where it is absent, or the objects of its list."""
        data = self.take(name, str, list, default="")
        return data if isinstance(data, str) else self.each(data, name)

    def drop(self, *names: str) -> None:
        """Passes over fields that are a client's book-keeping."""
        for name in names:
            self._unread.pop(name, None)

    def refuse(self, name: str, why: str, *harmless: Any) -> None:
        """Raises BadRequest where the field asks for something: where it has none of the harmless values."""
        value = self._unread.pop(name, None)
        if value is not None and value not in harmless:
            raise BadRequest(f"'{self.path(name)}': {why}", self.path(name))

    def ignore(self, name: str) -> None:
        """Notes what has no effect; positions in lists are left out of its name. Raises BadRequest in a strict body."""
        if self.ignored is None:
            raise BadRequest(f"unknown field '{name[:MAX_IGNORED_CHARS]}'", name)
        if len(self.ignored) < MAX_IGNORED:
            self.ignored[re.sub(r"\[\d+\]", "[]", name)[:MAX_IGNORED_CHARS]] = None

    def refuse_rest(self) -> None:
        """Ignores the fields that nobody took."""
        for name in self._unread:
            self.ignore(self.path(name))

    def ignore_all(self, name: str) -> None:
        """Ignores the whole object under one name."""
        self._unread = {}
        self.ignore(name)


def items(data: Sequence[Any], at: str, most: int) -> list[tuple[Any, str]]:
    """The elements of a list that is not too long, each with its place in the body."""
    if len(data) > most:
        raise BadRequest(f"'{at}' has {len(data)} elements, it may have {most}", at)
    return [(item, f"{at}[{i}]") for i, item in enumerate(data)]


# -------------------------------------------------------------------- parameters


def take_common(body: Fields, most_top_k: int = 2**31 - 1) -> dict[str, Any]:
    """What an Ask has of fields that all dialects share. A top_k of -1 is off, as vLLM's clients say it.

    `most_top_k`: the size of the vocabulary, for who knows it.
    """
    top_k, seed = body.take("top_k", int, default=0), body.take("seed", int, default=0)
    if not -(2**63) <= seed < 2**64:
        raise BadRequest("'seed' must fit 64 bits", "seed")
    temperature, top_p = (body.take(name, *NUMBER, default=1.0) for name in ("temperature", "top_p"))
    top_k, min_p = 0 if top_k == -1 else top_k, body.take("min_p", *NUMBER, default=0.0)
    if not 0 <= temperature <= MOST_TEMPERATURE:
        raise BadRequest(
            f"'temperature' must be from 0 to {MOST_TEMPERATURE:g} (below {LEAST_TEMPERATURE:g} sampling is greedy)",
            "temperature",
        )
    for name, value, most in (("top_p", top_p, 1), ("top_k", top_k, most_top_k), ("min_p", min_p, 1)):
        if not 0 <= value <= most:
            raise BadRequest(f"'{name}' must be from 0 to {most}", name)
    sampling = SamplingConfig(float(temperature), max(float(top_p), LEAST_TOP_P), top_k, float(min_p))
    flags = {name: body.take(name, bool, default=False) for name in ("stream", "return_token_ids")}
    return {"sampling": sampling, "seed": seed, "model": body.take("model", str), **flags}


def take_openai(body: Fields) -> dict[str, Any]:
    """What an Ask has of fields that OpenAI's older two dialects share."""
    options = body.inner("stream_options", {})
    stream_usage = options.take("include_usage", bool, default=False)
    options.refuse_rest()
    stop, user = stops(body.take("stop", str, list, default=[])), body.take("user", str, default="")
    if not 1 <= (n := body.take("n", int, default=1)) <= MAX_CHOICES:
        raise BadRequest(f"'n' must be from 1 to {MAX_CHOICES}", "n")
    return {"stream_usage": stream_usage, "n": n, "stops": stop, "user": user}


def take_positive(body: Fields, name: str) -> int | None:
    """A number of tokens."""
    if (value := body.take(name, int)) is not None and value < 1:
        raise BadRequest(f"'{name}' must be positive", name)
    return value


def stops(stop: str | list, name: str = "stop") -> tuple[str, ...]:
    """Stop strings, each once. Raises BadRequest for too many or too long ones."""
    many = [stop] if isinstance(stop, str) else stop
    if len(many) > MAX_STOPS or not all(isinstance(s, str) for s in many):
        raise BadRequest(f"'{name}' must be a string or a list of {MAX_STOPS} at most", name)
    for text in many:
        if not 1 <= len(text.encode()) <= MAX_STOP_BYTES:
            raise BadRequest(f"a stop string must have 1 to {MAX_STOP_BYTES} bytes", name)
    return tuple(dict.fromkeys(many))


# -------------------------------------------------------------------- texts, tools and calls


def content(message: Fields, parts: dict[str, str], joint: str, name: str = "content") -> str:
    """A message's text: a text itself, or the texts of its parts with the joint between them.

    Args:
      message: its field `name` is taken.
      parts: type of a part -> the field that has its text.
      joint: what stands between two parts.
      name: the field.

    Raises:
      BadRequest: a part is no text, such as an image.
    """
    data = message.text_or_each(name)
    return data if isinstance(data, str) else joint.join(part_text(part, parts) for part in data)


def part_text(part: Fields, parts: dict[str, str], kind: str | None = None, readable: str | None = None) -> str:
    """The text of one part, whose type may have been taken already. Raises BadRequest where the part is no text."""
    if kind is None:
        kind = str(part.take("type", str, default="text"))
    if kind not in parts:
        readable = readable or ", ".join(parts)
        raise BadRequest(f"'{part.at}' is of type '{kind[:40]}'; this server reads text only ({readable})", part.at)
    text = part.need(parts[kind], str)
    part.drop("cache_control", "annotations", "logprobs", "citations", "prompt_cache_breakpoint")
    return text


def conversation(messages: Iterable[ChatMessage], field: str, joins: bool = True) -> tuple[ChatMessage, ...]:
    """The messages of a field, in which each tool's result has the tool's name, as the call before it says it.

    `joins`: neighbouring messages of the assistant's are one. Raises BadRequest where there is no message.
    """
    talk: list[ChatMessage] = []
    names: dict[str, str] = {}  # of the tools called so far, by the call's id
    for message in messages:
        if message.role == "tool" and not message.name and message.call_id in names:
            message = dataclasses.replace(message, name=names[message.call_id])
        names |= {call.id: call.name for call in message.calls}
        if joins and talk and talk[-1].role == message.role == "assistant":
            last = talk.pop()
            text, calls = last.text + message.text, last.calls + message.calls
            message = ChatMessage("assistant", text, calls, reasoning=last.reasoning + message.reasoning)
        talk.append(message)
    if not talk:
        raise BadRequest(f"'{field}' must not be empty", field)
    return tuple(talk)


def tool_name(tool: Fields) -> str:
    """A tool's name, checked."""
    name = tool.need("name", str)
    if not TOOL_NAME.fullmatch(name):
        raise BadRequest(f"'{tool.path('name')}' must match {TOOL_NAME.pattern}", tool.path("name"))
    return name


def function_tool(function: Fields, schema: str = "parameters") -> Tool:
    """A tool of its name, description and the JSON schema in the field `schema`."""
    name = tool_name(function)
    parameters = function.take(schema, dict, default={"type": "object", "properties": {}})
    tool = Tool(name, function.take("description", str, default=""), parameters)
    function.drop("cache_control")
    return tool


def take_tools(body: Fields, readers: Mapping[str, Callable[[Fields], Tool]], kind: str | None = None) -> list[Tool]:
    """The tools that the policy can be offered; others, such as a vendor's own, are ignored.

    Args:
      body: its field `tools` is taken.
      readers: by the type of a tool.
      kind: the type of a tool that does not say it; None: it must.

    Raises:
      BadRequest: two tools have one name.
    """
    tools: dict[str, Tool] = {}
    for fields in body.each(body.take("tools", list, default=[]), "tools", MAX_TOOLS):
        type_name = fields.take("type", str, default=kind) if kind else fields.need("type", str)
        if type_name not in readers:
            fields.ignore_all(f"tools: {type_name}")
            continue
        tool = readers[type_name](fields)
        fields.refuse_rest()
        if tool.name in tools:
            raise BadRequest(f"two tools have the name '{tool.name}'", "tools")
        tools[tool.name] = tool
    return list(tools.values())


def offered(body: Fields, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools that the policy may choose from, by the dialects' `tool_choice`: a text, or an object with a `type`.

    A call that is demanded, of any tool or of one by name, is a wish: a policy that does not call is told so by its
    program, and can learn it.

    Raises:
      BadRequest: the choice is none, or there is no such tool.
    """
    choice = body.take("tool_choice", str, dict, default="auto")
    kind = choice if isinstance(choice, str) else choice.get("type")
    if (isinstance(choice, str) and choice not in CHOICES) or not isinstance(kind, str):
        raise BadRequest(f"'tool_choice' must be one of {', '.join(CHOICES)}, or name a tool", "tool_choice")
    named = choice if isinstance(choice, str) else choice.get("function", choice)
    name = named.get("name") if isinstance(named, dict) else None
    if name is not None and kind in ("function", "tool", "custom") and all(tool.name != name for tool in tools):
        raise BadRequest(f"'tool_choice' names the tool '{str(name)[:80]}', which is not among 'tools'", "tool_choice")
    if CHOICES.get(kind, True) or (isinstance(choice, dict) and choice.get("disable_parallel_tool_use")):
        body.ignore("tool_choice")
    return () if kind == "none" else tuple(tools)


def arguments(text: str) -> dict[str, Any] | str:
    """A call's arguments: the object that the text is, else the text; no text is no arguments."""
    if not text.strip():
        return {}
    return text if (data := json_object(text)) is None else data
