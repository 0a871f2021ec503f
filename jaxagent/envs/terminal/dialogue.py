"""How an agent and its terminal speak, in two published formats and a short one. Pure text, both directions.

endless     <command>ls</command> and <action>done</action>             Endless Terminals, arXiv 2601.16443
qwen3_xml   <tool_call><function=bash>... and <function=done>           ECHO, arXiv 2605.24517
plain       <cmd>ls</cmd> and <done>, answered by <out>...</out>        for a small policy taught by examples

What an agent wrote is read by `replies.parse`.
"""

from __future__ import annotations

from typing import Literal

Style = Literal["plain", "endless", "qwen3_xml"]

# Generation ends with these. In the published formats it ends where the policy ends its chat message.
STOP_STRINGS: dict[Style, tuple[str, ...]] = {"plain": ("</cmd>", "<done>"), "endless": (), "qwen3_xml": ()}
# How each tool call begins.
PREFIXES: dict[Style, tuple[str, ...]] = {
    "plain": ("<cmd>", "<done>"),
    "endless": ("<command>", "<action>done</action>"),
    "qwen3_xml": ("<tool_call>\n<function=bash>\n<parameter=command>\n", "<tool_call>\n<function=done>"),
}
TAGS: dict[Style, tuple[str, ...]] = {
    "plain": ("<cmd>", "</cmd>", "<done>", "<out>", "</out>"),
    "endless": ("<command>", "</command>", "<action>", "</action>", "<think>", "</think>"),
    "qwen3_xml": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
}
# The chat role of what the terminal says; "" continues the policy's own text.
ROLES: dict[Style, str] = {"plain": "", "endless": "user", "qwen3_xml": "tool"}
# Our words for what the published instructions ask; their wording is not known to us.
SYSTEM: dict[Style, str] = {
    "plain": "",
    "endless": (
        "You are an agent that works in a Linux terminal. In every turn, first think inside <think> and </think>, then "
        "give exactly one of these: a single shell command as <command>...</command>, or <action>done</action> when "
        "the task is complete. The shell stays open between your turns, and you are shown the output and the exit "
        "code of every command. Do not use commands that wait for input."
    ),
    "qwen3_xml": (
        "You are an agent that works in a Linux terminal. In every turn, first think inside <think> and </think>, then "
        "call exactly one function. To run a shell command:\n"
        "<tool_call>\n<function=bash>\n<parameter=command>\nls -l\n</parameter>\n</function>\n</tool_call>\n"
        "When the task is complete:\n<tool_call>\n<function=done>\n</function>\n</tool_call>\n"
        "The shell stays open between your turns. Do not use commands that wait for input."
    ),
}
PARTIAL_CHARS = 500  # shown of a command that timed out, in the Endless format


def action(style: Style, command: str) -> str:
    """What an agent writes to run a command."""
    if style == "plain":
        return f"<cmd>{command}</cmd>"
    if style == "endless":
        return f"<command>{command}</command>"
    return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


def finish(style: Style) -> str:
    """What an agent writes when it has finished."""
    if style == "plain":
        return "<done>"
    if style == "endless":
        return "<action>done</action>"
    return "<tool_call>\n<function=done>\n</function>\n</tool_call>"


def observation(style: Style, command: str, output: str, exit_status: int) -> str:
    """What it is shown after a command. Endless Terminals collapses the status to 0 or 1."""
    if style == "plain":
        return f"<out>{output}</out>\n" if exit_status == 0 else f"<out>{output}\n(exit_code={exit_status})</out>\n"
    how = "executed successfully" if exit_status == 0 else "failed"
    if style == "endless":
        return f"Command {how}. Output: {output}\n\n(exit_code={min(abs(exit_status), 1)})"
    return f"Command '{command}' {how}. Output: {output}\n\n(exit_code={exit_status})"


def timed_out(style: Style, command: str, output: str, seconds: float) -> str:
    """What it is shown after a command that was stopped at its deadline."""
    if style == "plain":
        return f"<out>{output}\n(timed out)</out>\n"
    if style == "endless":
        return f"Command timed out. Partial output:\n{output[:PARTIAL_CHARS]}"
    return f"Command '{command}' timed out after {seconds:g} seconds.\n\n(exit_code=-1)"
