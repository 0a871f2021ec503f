"""What an agent wrote -> the command in it, or that it has finished, or what is wrong. In every format finishing wins
over a command in the same reply, as Endless Terminals has it. Reading takes time linear in the text (`envs.tags`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from jaxagent.envs import tags
from jaxagent.envs.terminal.dialogue import Style


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """One turn of an agent. Exactly one of `done`, `command` and `error` says what to do."""

    command: str = ""
    done: bool = False
    error: str = ""  # what the agent is shown where it asked for nothing that can be done
    warnings: tuple[str, ...] = ()  # shown before the output


def parse(style: Style, text: str) -> ParsedTurn:
    """Reads one turn, or so much of it as `tags.MAX_CHARS` allows."""
    return _PARSERS[style](text[: tags.MAX_CHARS])


_PLAIN = tags.pair("cmd")


def _plain(text: str) -> ParsedTurn:
    """`<done>`, or the first command."""
    if "<done>" in text:
        return ParsedTurn(done=True)
    commands = tags.inside(*_PLAIN, text)
    command = commands[0].strip() if commands else ""
    return ParsedTurn(command) if command else ParsedTurn(error="<out>no command</out>\n")


_COMMAND = tags.pair("command", re.IGNORECASE)
_ACTION_DONE = re.compile(r"<action>\s*done\s*</action>", re.IGNORECASE)
_ENDLESS_INVALID = (
    "Could not parse a single <command>...</command> or <action>done</action>. Please respond with exactly one of "
    "those."
)


def _endless(text: str) -> ParsedTurn:
    """Finished wherever that stands; else the last command (an older release took the first)."""
    if _ACTION_DONE.search(text):
        return ParsedTurn(done=True)
    commands = [command.strip() for command in tags.inside(*_COMMAND, text)]
    return ParsedTurn(commands[-1]) if commands and commands[-1] else ParsedTurn(error=_ENDLESS_INVALID)


_THINK = tags.pair("think")
_CALL = tags.pair("tool_call")
_FUNCTION = re.compile(r"<function=([\w-]+)>"), re.compile("</function>")
_PARAMETER = re.compile("<parameter=command>"), re.compile("</parameter>")
_NO_CALL = "No <tool_call> found in response."
_NO_COMMAND = "No commands provided. Please provide commands to execute or set done."


def _qwen3_xml(text: str) -> ParsedTurn:
    """The first command of all tool calls behind the thoughts. The two errors are published, the warnings our words."""
    text, warnings = _without_thoughts(text)
    calls = tags.inside(*_CALL, text)
    if text.count("<tool_call>") > len(calls):
        nested = any("<tool_call>" in call for call in calls)
        warnings.append("Nested <tool_call>." if nested else "Unclosed <tool_call>.")
    if tags.outside(*_CALL, text).strip() and calls:
        warnings.append("Text outside of <think> and <tool_call>.")
    if not calls:
        return ParsedTurn(error=_NO_CALL, warnings=tuple(warnings))
    functions = [
        (start[1], call[start.end() : end.start()]) for call in calls for start, end in tags.spans(*_FUNCTION, call)
    ]
    if any(name == "done" for name, _ in functions):
        return ParsedTurn(done=True, warnings=tuple(warnings))
    values_of_calls = [tags.inside(*_PARAMETER, body) for name, body in functions if name == "bash"]
    values_of_commands = [values[0].strip() for values in values_of_calls if values]
    commands = [command for command in values_of_commands if command]
    if len(commands) < len(values_of_commands):
        warnings.append("Empty command.")
    if len(commands) > 1:
        warnings.append("Several commands: only the first is executed.")
    if not commands:
        return ParsedTurn(error=_NO_COMMAND, warnings=tuple(warnings))
    return ParsedTurn(commands[0], warnings=tuple(warnings))


def _without_thoughts(text: str) -> tuple[str, list[str]]:
    """The text behind its thoughts, and warnings about them. A chat template may have written the opening tag."""
    if "</think>" in text and "<think>" not in text.partition("</think>")[0]:
        text = "<think>" + text
    thoughts = tags.inside(*_THINK, text)
    rest, warnings = tags.outside(*_THINK, text), []
    if "<think>" in rest:
        warnings.append("Unclosed <think>.")
        rest = rest.replace("<think>", "")
    elif not thoughts:
        warnings.append("Missing <think> block.")
    if len(thoughts) > 1:
        warnings.append("Several <think> blocks.")
    if any(not thought.strip() for thought in thoughts):
        warnings.append("Empty <think> block.")
    return rest, warnings


_PARSERS: dict[Style, Callable[[str], ParsedTurn]] = {"plain": _plain, "endless": _endless, "qwen3_xml": _qwen3_xml}
