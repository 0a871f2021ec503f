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
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxagent.envs.base import Message, Observation
from jaxagent.envs.tau import catalog, plain, prompts
from jaxagent.envs.tau.plain import Malformed
from jaxagent.tools import Hermes, Llama3, Qwen3Coder, ToolParser
from jaxagent.tools.base import load_json
from jaxagent.tools.calls import Call
from jaxagent.tools.hermes import CLOSE, OPEN
from jaxagent.tools.reading import read_answer
from jaxagent.types import TokenKind

RESPOND, CONTENT = "respond", "content"
Style = Literal["native", "qwen3_coder", "llama3", "react", "act", "plain"]
MOST_DEPTH = 32  # of arguments: lists in lists


@dataclasses.dataclass(frozen=True)
class Action:
    """One thing that the policy does: the call of a tool, or RESPOND with CONTENT.

    Attributes:
      ignored: further calls in the same message.
    """

    name: str
    arguments: Mapping[str, Any]
    ignored: int = 0


class Format:
    """One style.

    Attributes:
      stop_strings: what ends a generation; nothing where a message ends by itself.
      prefixes: how each action begins; for `rl.tool_epsilon`.
      tokens: texts that a tokenizer trained for the run keeps whole.
    """

    stop_strings: Sequence[str] = ()
    prefixes: Sequence[str] = ()
    tokens: Sequence[str] = ()

    def messages(self, opening: str, policy: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
        """The prompt: the shop's policy and tools (OpenAI's form), and the customer's first words."""
        raise NotImplementedError

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Action:
        """What a message does.

        Raises:
          Malformed: nothing.
        """
        raise NotImplementedError

    def after(self, action: Action, text: str) -> Observation:
        """What comes of an action: the customer's words after speech, else the tool's answer."""
        raise NotImplementedError

    def refused(self, reason: str) -> Observation:
        """Why a message does nothing."""
        return Observation(((reason, TokenKind.WARNING),), "user")


class Native(Format):
    """Calls as a family of models writes them."""

    def __init__(self, family: type[ToolParser]) -> None:
        self._family = family
        self._example = family.write("", [Call("NAME", {"PARAMETER": "VALUE"})])
        tagged = self._example.startswith(OPEN)
        self.stop_strings: Sequence[str] = (CLOSE,) if tagged else ()
        self.prefixes: Sequence[str] = (self._example.partition("NAME")[0],)
        self.tokens: Sequence[str] = (OPEN, CLOSE) if tagged else ()

    def messages(self, opening: str, policy: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
        """See `Format`."""
        described = "\n".join(json.dumps(form, ensure_ascii=False) for form in tools)
        how = prompts.QWEN_CALL if self._family is Hermes else prompts.CALL.format(example=self._example)
        system = f"{policy}\n\n{prompts.TOOLS.format(tools=described)}\n\n{how}"
        return Message("system", system), Message("user", opening)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Action:
        """A call, or all the text without reasoning; text beside a call is not spoken."""
        said = read_answer(text, catalog.tools_of(tools), self._family)
        if said.calls:
            call = said.calls[0]
            return _checked(call.name, call.arguments, len(said.calls) - 1)
        if said.malformed:
            raise Malformed(f"Write a call as\n{self._example}")
        return _checked(RESPOND, {CONTENT: said.text.strip()})

    def after(self, action: Action, text: str) -> Observation:
        """See `Format`."""
        return Observation(((text, TokenKind.OBSERVATION),), "user" if action.name == RESPOND else "tool")


class Written(Format):
    """tau-bench's text agents: "react" with a thought before every action, "act" without."""

    prefixes: Sequence[str] = ('Action:\n{"name": "',)
    tokens: Sequence[str] = ("Thought:", "Action:")

    def __init__(self, thought: bool) -> None:
        self._thought = thought

    def messages(self, opening: str, policy: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
        """See `Format`."""
        how = prompts.REACT if self._thought else prompts.ACT
        return Message("system", f"{policy}\n#Available tools\n{json.dumps(list(tools))}{how}"), Message(
            "user", opening
        )

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Action:
        """What stands behind the last "Action:"."""
        written = text.rpartition("Action:")[2].strip()
        try:
            action = load_json(written)
        except ValueError:
            return _checked(RESPOND, {CONTENT: written})
        if not isinstance(action, dict) or not isinstance(action.get("name"), str) or "arguments" not in action:
            raise Malformed('Write an action as {"name": ..., "arguments": {...}}.')
        return _checked(action["name"], action["arguments"])

    def after(self, action: Action, text: str) -> Observation:
        """See `Format`."""
        shown = text if action.name == RESPOND else f"API output: {text}"
        return Observation(((shown, TokenKind.OBSERVATION),), "user")


class Plain(Format):
    """The format of plain.py, which has a policy of its own."""

    stop_strings: Sequence[str] = plain.STOP_STRINGS
    prefixes: Sequence[str] = plain.PREFIXES
    tokens: Sequence[str] = plain.TOKENS

    def messages(self, opening: str, policy: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
        """See `Format`."""
        return plain.messages(opening)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Action:
        """See `Format`."""
        return _checked(*plain.parse(text))

    def after(self, action: Action, text: str) -> Observation:
        """See `Format`."""
        shown = plain.heard(text) if action.name == RESPOND else plain.returned(text)
        return Observation(((shown, TokenKind.OBSERVATION),))

    def refused(self, reason: str) -> Observation:
        """See `Format`."""
        return Observation(((plain.returned(reason), TokenKind.WARNING),))


FORMATS: Mapping[str, Format] = {
    "native": Native(Hermes),
    "qwen3_coder": Native(Qwen3Coder),
    "llama3": Native(Llama3),
    "react": Written(True),
    "act": Written(False),
    "plain": Plain(),
}


def _checked(name: str, arguments: Any, ignored: int = 0) -> Action:
    """An action that can be carried out, and stored, whatever its arguments are.

    Raises:
      Malformed: it cannot.
    """
    if not isinstance(arguments, Mapping):
        raise Malformed("The arguments of a call must be an object.")
    if _depth(arguments) > MOST_DEPTH:
        raise Malformed("The arguments of a call are nested too deep.")
    if name == RESPOND:
        content = arguments.get(CONTENT)
        if not isinstance(content, str):
            raise Malformed(f'"{RESPOND}" needs the argument "{CONTENT}", a text.')
        if not content.strip():
            raise Malformed("Your message is empty.")
    return Action(name, dict(arguments), ignored)


def _depth(value: Any) -> int:
    """How deep a value is nested; stops counting beyond `MOST_DEPTH`."""
    level, depth = [value], 0
    while level and depth <= MOST_DEPTH:
        inner = [v.values() if isinstance(v, Mapping) else v for v in level if isinstance(v, Mapping | list)]
        level, depth = [one for values in inner for one in values], depth + 1
    return depth
