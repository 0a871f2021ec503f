"""The orchestrator's three tools: each is called with the name of the expert that is to do it, and with nothing else.

    <tool_call>{"name": "search", "arguments": {"model": "search-3"}}</tool_call>

An answer may call several tools, each once; they are done in its order, and `answer` ends the episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.config import nearest
from jaxagent.envs import tags
from jaxagent.tools.calls import Call, Tool
from jaxagent.tools.hermes import Hermes, read_answer

REASON, ANSWER, SEARCH = TOOLS = ("enhance_reasoning", "answer", "search")
MODEL = "model"  # a call's one argument
WORDS = {  # what the policy is told of each tool
    REASON: "An expert analyses the problem and writes a Python program; you are shown what the program prints.",
    ANSWER: "An expert gives the final answer, from the problem and all that was found so far. This ends your work.",
    SEARCH: "An expert writes a query for what is still missing; you are shown the documents that are found.",
}
# The text of a call around its two names; a tokenizer trained for the run may keep each piece whole.
PIECES = ('<tool_call>{"name": "', '", "arguments": {"model": "', '"}}</tool_call>')


def tool(name: str, experts: Mapping[str, str]) -> Tool:
    """A tool as the policy is offered it."""
    skills = " ".join(f"{expert}: {words}" for expert, words in experts.items() if words)
    described = f"The expert that does it, one of {', '.join(experts)}. {skills}".strip()
    model = {"type": "string", "enum": list(experts), "description": described}
    return Tool(name, WORDS[name], {"type": "object", "properties": {MODEL: model}, "required": [MODEL]})


def call_text(name: str, expert: str) -> str:
    """The call of a tool as a demonstration has it: on one line, in the pieces of `PIECES`."""
    return f"{PIECES[0]}{name}{PIECES[1]}{expert}{PIECES[2]}"


def read(answer: str, offered: Mapping[str, Tool]) -> tuple[list[tuple[str, str]], str]:
    """The calls of an answer as (tool, expert), or [] and one sentence that says to the policy what is wrong.

    One wrong call is enough: then none of them is made.
    """
    reply = read_answer(answer[: tags.MAX_CHARS], list(offered.values()))
    if reply.malformed or not reply.calls:
        return [], f"Call a tool: {Hermes.write('', [Call(next(iter(offered)), {MODEL: '...'})])}"
    calls: dict[str, str] = {}
    for call in reply.calls:
        if problem := _problem(call, offered):
            return [], problem
        if call.name in calls:
            return [], f"{call.name} is called twice: call a tool once at a time."
        calls[call.name] = str(call.arguments[MODEL])  # type: ignore[index]
    return list(calls.items()), ""


def _problem(call: Call, offered: Mapping[str, Tool]) -> str:
    if call.name not in offered:
        return f"There is no tool {call.name[:60]!r}. {nearest(call.name[:60], offered)}"
    arguments: Any = call.arguments
    if not isinstance(arguments, Mapping) or set(arguments) != {MODEL}:
        return f"{call.name} takes one argument, {MODEL!r}, and no other."
    experts: Sequence[str] = offered[call.name].parameters["properties"][MODEL]["enum"]
    expert = arguments[MODEL]
    if not isinstance(expert, str) or expert not in experts:
        return f"{call.name} has no expert {str(expert)[:60]!r}. {nearest(str(expert)[:60], experts)}"
    return ""
