"""How a policy writes what it does, and how it is shown what comes of it.

    env.tools    it calls a tool                        it speaks              a tool's answer is shown
    native       <tool_call>{...}</tool_call>           any other text         in a "tool" message
    qwen3_coder  <tool_call><function=...>...           any other text         in a "tool" message
    llama3       {"name": ..., "parameters": {...}}     any other text         in a "tool" message
    react        Thought: ... Action: {...}             the action "respond"   in a user message, "API output: ..."
    act          Action: {...}                          the action "respond"   the same
    plain        see plain.py, for a policy that learns from demonstrations alone

The texts of native are those of Qwen's chat template, with slime's sentence about calls in it; Hermes's models write
calls in the same way. qwen3_coder and llama3 are read by the gateway's parsers. react and act are tau-bench's own. Of
several calls in one message only the first counts. A message that cannot be read is answered with a warning and costs a
turn, where the published programs end in an error; in react and act an action that is no JSON at all is spoken to the
customer, as published.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxagent.envs.base import Message, Observation
from jaxagent.envs.tau import catalog, plain, prompts
from jaxagent.tools import Hermes, Llama3, Qwen3Coder, ToolParser
from jaxagent.tools.base import load_json
from jaxagent.tools.calls import Call
from jaxagent.tools.hermes import CLOSE, OPEN, read_answer
from jaxagent.types import TokenKind

RESPOND, CONTENT = "respond", "content"
Style = Literal["native", "qwen3_coder", "llama3", "react", "act", "plain"]
Tools = Sequence[Mapping[str, Any]]
Action = tuple[str, Mapping[str, Any], int]
MOST_DEPTH = 32  # of arguments: lists in lists


@dataclasses.dataclass(frozen=True)
class Format:
    """One style.

    Attributes:
      messages: (the customer's first words, the shop's policy, its tools in OpenAI's form) -> the prompt.
      parse: (a message, the tools) -> (tool, its arguments, how many further calls are ignored), with RESPOND and
        CONTENT for words to the customer; raises ValueError, which says what to write, where there is no action.
      after: (a tool or RESPOND, a text) -> what comes of it: the customer's words after speech, else the tool's answer.
      refused: why a message does nothing -> what the policy is shown.
      stop_strings: what ends a generation; nothing where a message ends by itself.
      prefixes: how each action begins; for `rl.tool_epsilon`.
      tokens: texts that a tokenizer trained for the run keeps whole.
    """

    messages: Callable[[str, str, Tools], Sequence[Message]]
    parse: Callable[[str, Tools], Action]
    after: Callable[[str, str], Observation]
    refused: Callable[[str], Observation] = lambda reason: Observation(((reason, TokenKind.WARNING),), "user")
    stop_strings: Sequence[str] = ()
    prefixes: Sequence[str] = ()
    tokens: Sequence[str] = ()


def _native(family: type[ToolParser]) -> Format:
    """Calls as a family of models writes them. Text beside a call is not spoken, and neither is reasoning."""
    example = family.write("", [Call("NAME", {"PARAMETER": "VALUE"})])
    tagged = example.startswith(OPEN)

    def messages(opening: str, policy: str, tools: Tools) -> Sequence[Message]:
        described = "\n".join(json.dumps(form, ensure_ascii=False) for form in tools)
        how = prompts.QWEN_CALL if family is Hermes else prompts.CALL.format(example=example)
        system = f"{policy}\n\n{prompts.TOOLS.format(tools=described)}\n\n{how}"
        return Message("system", system), Message("user", opening)

    def parse(text: str, tools: Tools) -> Action:
        answer = read_answer(text, catalog.tools_of(tools), family)
        if answer.calls:
            call = answer.calls[0]
            return _action(call.name, call.arguments, len(answer.calls) - 1)
        if answer.malformed:
            raise ValueError(f"Write a call as\n{example}")
        return _action(RESPOND, {CONTENT: answer.text.strip()})

    def after(name: str, text: str) -> Observation:
        return Observation(((text, TokenKind.OBSERVATION),), "user" if name == RESPOND else "tool")

    tags = (OPEN, CLOSE) if tagged else ()
    return Format(messages, parse, after, stop_strings=tags[1:], prefixes=(example.partition("NAME")[0],), tokens=tags)


def _text_agent(how: str) -> Format:
    """tau-bench's text agents, told `how`: what stands behind the last "Action:" counts."""

    def messages(opening: str, policy: str, tools: Tools) -> Sequence[Message]:
        system = f"{policy}\n#Available tools\n{json.dumps(list(tools))}{how}"
        return Message("system", system), Message("user", opening)

    def parse(text: str, tools: Tools) -> Action:
        action_text = text.rpartition("Action:")[2].strip()
        try:
            action = load_json(action_text)
        except ValueError:
            return _action(RESPOND, {CONTENT: action_text})
        if not isinstance(action, dict) or not isinstance(action.get("name"), str) or "arguments" not in action:
            raise ValueError('Write an action as {"name": ..., "arguments": {...}}.')
        return _action(action["name"], action["arguments"])

    def after(name: str, text: str) -> Observation:
        observation = text if name == RESPOND else f"API output: {text}"
        return Observation(((observation, TokenKind.OBSERVATION),), "user")

    return Format(messages, parse, after, prefixes=('Action:\n{"name": "',), tokens=("Thought:", "Action:"))


def _plain() -> Format:
    """The format of plain.py, which has a policy of its own."""

    def after(name: str, text: str) -> Observation:
        observation = plain.customer_text(text) if name == RESPOND else plain.tool_text(text)
        return Observation(((observation, TokenKind.OBSERVATION),))

    return Format(
        lambda opening, policy, tools: plain.messages(opening),
        lambda text, tools: _action(*plain.parse(text)),
        after,
        lambda reason: Observation(((plain.tool_text(reason), TokenKind.WARNING),)),
        plain.STOP_STRINGS,
        plain.PREFIXES,
        plain.TOKENS,
    )


def _action(name: str, arguments: Any, ignored: int = 0) -> Action:
    """An action that can be carried out, and stored, whatever its arguments are. Raises ValueError: it cannot."""
    if not isinstance(arguments, Mapping):
        raise ValueError("The arguments of a call must be an object.")
    if _depth(arguments) > MOST_DEPTH:
        raise ValueError("The arguments of a call are nested too deep.")
    if name == RESPOND:
        content = arguments.get(CONTENT)
        if not isinstance(content, str):
            raise ValueError(f'"{RESPOND}" needs the argument "{CONTENT}", a text.')
        if not content.strip():
            raise ValueError("Your message is empty.")
    return name, dict(arguments), ignored


def _depth(value: Any) -> int:
    """How deep a value is nested; stops counting beyond `MOST_DEPTH`."""
    level, depth = [value], 0
    while level and depth <= MOST_DEPTH:
        inner = [v.values() if isinstance(v, Mapping) else v for v in level if isinstance(v, Mapping | list)]
        level, depth = [inner_value for values in inner for inner_value in values], depth + 1
    return depth


FORMATS: Mapping[str, Format] = {
    "native": _native(Hermes),
    "qwen3_coder": _native(Qwen3Coder),
    "llama3": _native(Llama3),
    "react": _text_agent(prompts.REACT),
    "act": _text_agent(prompts.ACT),
    "plain": _plain(),
}
