"""How an agent and its terminal speak, in the two published formats. Pure text, both directions of a demonstration.

endless     <command>ls</command> and <action>done</action>             Endless Terminals, arXiv 2601.16443
qwen3_xml   <tool_call><function=bash>... and <function=done>           ECHO, arXiv 2605.24517
"""

from __future__ import annotations

from typing import Literal

Style = Literal["endless", "qwen3_xml"]


def action(style: Style, command: str) -> str:
    """What an agent writes to run a command."""
    if style == "endless":
        return f"<command>{command}</command>"
    return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


def done(style: Style) -> str:
    """What an agent writes when it has finished."""
    if style == "endless":
        return "<action>done</action>"
    return "<tool_call>\n<function=done>\n</function>\n</tool_call>"


def observation(style: Style, command: str, output: str, exit_status: int) -> str:
    """What it is shown after a command. Endless Terminals collapses the status to 0 or 1."""
    how = "executed successfully" if exit_status == 0 else "failed"
    if style == "endless":
        return f"Command {how}. Output: {output}\n\n(exit_code={min(abs(exit_status), 1)})"
    return f"Command '{command}' {how}. Output: {output}\n\n(exit_code={exit_status})"
