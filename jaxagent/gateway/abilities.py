"""What a chat template can show, found by trying: templates say so nowhere, and many drop what they do not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.gateway.chat import Call, Tool
from jaxagent.rollout.templates import Chat
from jaxagent.tools import FAMILIES, ToolParser

WORDS = [f"PLACEHOLDER-{i}-END" for i in range(9)]  # plain ASCII: no template trims, escapes or strips them


@dataclasses.dataclass(frozen=True)
class Abilities:
    """Each field: whether the template shows all of it, in order."""

    system: bool  # a system message that comes first
    systems: bool  # system messages anywhere, several in a row
    user_runs: bool  # two user messages in a row
    tool_role: str  # the role that shows a tool's result: "tool", or "user" where the template does not know it
    tools: bool  # the tools that are offered
    tools_before: bool  # the tools change nothing of what follows an assistant message
    calls: bool  # the calls of an assistant message
    several_calls: bool  # more than one in a message
    text_and_calls: bool  # text beside them


def find_abilities(chat: Chat) -> Abilities:
    """Renders small conversations and looks for their words."""
    a, b, c, d, e, f, g = WORDS[:7]
    result = _message("tool", f) | {"name": b}

    def shows(
        messages: Sequence[Mapping[str, Any]], *words: str | Sequence[str], tools: Sequence[Any] | None = None
    ) -> bool:
        """Whether the words stand in the text one after the other; those of a tuple in any order."""
        try:
            text = chat.render(messages, tools)
        except ConfigError:
            return False
        at = 0
        for word in words:
            places = [text.find(spelling, at) for spelling in ((word,) if isinstance(word, str) else word)]
            if min(places) < 0:
                return False
            at = max(places) + 1
        return True

    def calls(text: str, *names: str) -> list[Mapping[str, Any]]:
        tool_calls = [{"type": "function", "function": {"name": name, "arguments": {d: e}}} for name in names]
        called = _message("assistant", text) | {"tool_calls": tool_calls}
        return [_message("user", a), called, *[result] * (role == "tool"), _message("user", g)]

    question, answer = _message("user", a), _message("assistant", e)
    role = "tool" if shows([question, answer, result, question], a, e, f, a) else "user"
    tool = {"type": "function", "function": {"name": b, "description": c, "parameters": {"type": "object"}}}
    several = [("system", a), ("system", b), ("user", c), ("assistant", d), ("system", e), ("user", f), ("system", g)]

    def behind_answer(tools: Sequence[Any] | None) -> str | None:
        try:
            return chat.render([question, answer, *[result] * (role == "tool"), question], tools).partition(e)[2]
        except ConfigError:
            return None

    return Abilities(
        system=shows([_message("system", b), question], b, a),
        systems=shows([_message(*message) for message in several], a, b, c, d, e, f, g)
        and shows([question, answer, _message("system", b)], a, e, b),
        user_runs=shows([question, _message("user", b)], a, b),
        tool_role=role,
        tools=shows([question], (b, c), tools=[tool]),
        tools_before=behind_answer(None) == behind_answer([tool]),
        calls=shows(calls("", b), a, (b, d, e), g),
        several_calls=shows(calls("", b, c), a, (b, d, e), (c, d, e), g),
        text_and_calls=shows(calls(c, b), a, c, (b, d, e), g),
    )


def find_family(chat: Chat) -> type[ToolParser] | None:
    """The family that reads a call as the template writes it; None where it writes none, or in another way."""
    question_text, name, key, value = WORDS[:4]
    question = _message("user", question_text)
    call = {"type": "function", "function": {"name": name, "arguments": {key: value}}}
    try:
        header = chat.render([question, _message("assistant", value)], None, False).partition(question_text)[2]
        text = chat.render([question, _message("assistant", "") | {"tool_calls": [call]}], None, False)
    except ConfigError:
        return None
    text = text.partition(question_text)[2].removeprefix(header.partition(value)[0])
    for family in FAMILIES:
        parser = family([Tool(name, "", {})])
        if Call(name, {key: value}) in parser.feed(text) + parser.end():
            return family
    return None


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}
