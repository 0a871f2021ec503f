"""What a chat template can show, found by trying: templates say so nowhere, and many drop what they do not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.rollout.templates import Chat

WORDS = [f"PLACEHOLDER-{i}-END" for i in range(9)]  # plain ASCII: no template trims, escapes or strips them


@dataclasses.dataclass(frozen=True)
class Abilities:
    """Each field: whether the template shows all of it, in order."""

    system: bool  # a system message that comes first
    systems: bool  # system messages anywhere, several in a row
    user_runs: bool  # two user messages in a row
    tool_role: str  # the role that shows a tool's result: "tool", or "user" where the template does not know it
    tools: bool  # the tools that are offered
    calls: bool  # the calls of an assistant message
    several_calls: bool  # more than one in a message
    text_and_calls: bool  # text beside them


def find_abilities(chat: Chat) -> Abilities:
    """Renders small conversations and looks for their words."""
    a, b, c, d, e, f, g = WORDS[:7]

    def shows(messages: Sequence[Mapping[str, Any]], words: Sequence[str], tools: list[Any] | None = None) -> bool:
        try:
            text = chat.render(messages, tools)
        except ConfigError:
            return False
        at = 0
        for word in words:
            at = text.find(word, at) + 1
            if not at:
                return False
        return True

    def calls(text: str, *names: str) -> list[Mapping[str, Any]]:
        made = [{"type": "function", "function": {"name": name, "arguments": {d: e}}} for name in names]
        after = [{"role": role, "content": f}, {"role": "user", "content": g}][role == "user" :]
        return [_message("user", a), _message("assistant", text) | {"tool_calls": made}, *after]

    role = chat.role("tool")
    tool = {"type": "function", "function": {"name": b, "description": c, "parameters": {"type": "object"}}}
    several = [("system", a), ("system", b), ("user", c), ("assistant", d), ("system", e), ("user", f), ("system", g)]
    return Abilities(
        system=shows([_message("system", a), _message("user", b)], [a, b]),
        systems=shows([_message(*one) for one in several], [a, b, c, d, e, f, g]),
        user_runs=shows([_message("user", a), _message("user", b)], [a, b]),
        tool_role=role,
        tools=shows([_message("user", a)], [b, c], [tool]),
        calls=shows(calls("", b), [a, b, d, e, g]),
        several_calls=shows(calls("", b, c), [a, b, d, e, c, d, e, g]),
        text_and_calls=shows(calls(c, b), [a, c, b, d, e, g]),
    )


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}
