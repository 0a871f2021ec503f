"""The ToolRL environment: one turn of a dialogue, answered by a thought and tool calls, a response, or both.

    <think> ... </think>
    <tool_call>
    {"name": "weather", "parameters": {"city": "Oslo"}}
    </tool_call>

No tool runs: the calls are compared with those of the ground truth (`rewards`). The prompt, which lists
the tools and says the format, comes with the task (`rows`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jaxagent.config import ConfigError
from jaxagent.envs.base import Attempt, Environment, Message, Opening, Step, Transcript, Verdict
from jaxagent.envs.toolcalls import rewards, rows
from jaxagent.rewards.view import View
from jaxagent.types import StopReason, Task

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<response>", "</response>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCalls(Environment):
    """Tasks of one turn, whose answers are tool calls. A generation ends where the policy ends its message."""

    reward: rewards.ToolRL = dataclasses.field(default_factory=rewards.ToolRL)

    score = "solved"
    components = ("format", "correctness")
    calls = "tool_calls"
    needs_answers = True
    tokens = TAGS

    def __post_init__(self) -> None:
        """Raises ConfigError for more than one turn, which no task has."""
        if self.max_turns != 1:
            raise ConfigError(f"env.max_turns={self.max_turns} must be 1: the environment 'toolrl' has one turn.")

    def oracle(self, task: Task) -> Sequence[str] | None:
        """The ground truth, which is written as the policy should write it."""
        return task.answers[:1]

    def messages(self, text: str) -> tuple[Message, ...]:
        """The task's own messages."""
        return tuple(Message(role, content) for role, content in rows.messages(text))

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], ToolCallAttempt]]:
        """Looks at the ground truths of the held-out tasks."""
        for task in opening.tasks:
            rewards.truth_calls(task.id, task.answers[0] if task.answers else "")
        yield lambda task: ToolCallAttempt(task, self)


class ToolCallAttempt(Attempt):
    """One attempt at one task."""

    stop_strings: Sequence[str] = ()

    def __init__(self, task: Task, config: ToolCalls) -> None:
        self._task, self._config = task, config
        self.counters: dict[str, float] = {"tool_calls": 0.0, "unreadable_calls": 0.0}

    async def start(self) -> Sequence[Message]:
        """The task's messages."""
        return self._config.messages(self._task.prompt)

    async def step(self, action: str) -> Step:
        """Counts the calls; whatever they are, the attempt is over."""
        try:
            self.counters["tool_calls"] += len(rows.parse_calls(action)) if "<tool_call>" in action else 0
        except (ValueError, RecursionError):
            self.counters["unreadable_calls"] += 1
        return Step(stop_reason=StopReason.ANSWER)

    async def verify(self, transcript: Transcript) -> Verdict:
        """ToolRL's reward, also of a turn that ran out of tokens, as published."""
        scores = self._config.reward(View(self._task, transcript.turns))
        return Verdict(scores.pop("reward"), scores)
