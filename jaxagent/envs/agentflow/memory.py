"""What tools gave so far, as every role is shown it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Action:
    """One step that was taken."""

    tool: str
    sub_goal: str
    command: str
    result: str  # cut by `cut`


def cut(text: str, chars: int) -> str:
    """The text with its middle left out where it is longer than `chars`, as published."""
    if len(text) <= chars:
        return text
    head, tail = chars // 2, (chars + 1) // 2
    return f"{text[:head]}\n... [truncated {len(text) - chars} chars] ...\n{text[len(text) - tail :]}"


def brief(actions: tuple[Action, ...], chars: int) -> tuple[Action, ...]:
    """The memory with what the policy and the executor wrote cut, too: for roles, whose contexts the policy could fill.

    Args:
      actions: the memory.
      chars: of a tool's name, of a sub-goal and of a command.
    """
    return tuple(
        dataclasses.replace(
            action,
            tool=cut(action.tool, chars),
            sub_goal=cut(action.sub_goal, chars),
            command=cut(action.command, chars),
        )
        for action in actions
    )


def published(actions: tuple[Action, ...]) -> str:
    """The memory as the published codes show it: a Python dictionary of dictionaries."""
    names = {"tool_name": "tool", "sub_goal": "sub_goal", "command": "command", "result": "result"}
    shown = {
        f"Action Step {number}": {name: getattr(action, field) for name, field in names.items()}
        for number, action in enumerate(actions, 1)
    }
    return str(shown)


def compact(actions: tuple[Action, ...]) -> str:
    """The memory in few tokens, a line for every step: "tool: sub-goal =result".

    No blank before the result: so a number there has the tokens that it has in \\boxed{...}.
    """
    return "".join(f"{action.tool}: {action.sub_goal} ={action.result}\n" for action in actions)
