"""`View`: everything a reward may look at, as one frozen dataclass; `Reward`: what every reward is.

    reward = partial(length.soft_overlong, max_tokens=4096, buffer_tokens=1024)
    reward(View(task, turns=transcript.turns, action_tokens=transcript.action_tokens))      # -> -0.25

A reward is a pure function of a view. Whatever takes time or may fail (running tests, asking a judge, parsing tool
calls) happens before, in the environment, and its result is a field here. So a reward can be recomputed for any
recorded episode, and a sandbox that died is an error of the episode instead of a reward of 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxagent.types import StopReason, Task


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as the environment parsed it."""

    name: str
    arguments: Mapping[str, Any]  # JSON values
    turn: int = 0  # the turn that made it, from 0


@dataclasses.dataclass(frozen=True)
class View:
    """What rewards look at. Only `task` and `turns` are always there; None means "was not measured"."""

    task: Task
    turns: tuple[tuple[str, str], ...] = ()  # (action, observation that followed or "")
    answer: str | None = None  # the final answer the environment found in the actions; None = there is none
    tool_calls: tuple[ToolCall, ...] = ()
    action_tokens: tuple[int, ...] = ()  # sampled tokens of each turn; () = not counted
    tests: Mapping[str, str] | None = None  # test id -> "passed", "failed", "skipped", "error", ...
    judged: float | None = None  # what `judge.combine` made of the judge's answers, in [0, 1]
    prompt: str = ""  # contents of the prompt messages
    ended: StopReason | None = None  # why the episode is over

    @property
    def actions(self) -> str:
        """What the policy wrote, and nothing it read."""
        return "".join(action for action, _ in self.turns)

    @property
    def response(self) -> str:
        """Everything after the prompt, observations included."""
        return "".join(action + observation for action, observation in self.turns)


# One number, or named numbers of which "reward" is the one that counts and the others are reported beside it.
Reward = Callable[[View], float | Mapping[str, float]]
