"""The AgentFlow environment: one question, planned by the policy, worked on by roles that are not trained.

    planner: plan
    up to env.max_turns steps:   planner: next step  ->  executor: command  ->  tool  ->  memory  ->  verifier
    planner: final output

Each call of the planner is a conversation of its own, and so a trajectory of its own. The published codes (AgentFlow's
own Flow-GRPO, and slime-agentic's) differ in which of these calls are trained: `env.trained`; and in how a group's
rewards become advantages: `rl.advantage.multi_trajectory`. Both hide failures, and there we do not follow them: an
episode whose verifier or judge cannot reply has failed; it is no "STOP" and no reward of 0. A role that cannot reply
because the policy has filled its context is another matter: the steps end there, and the episode is judged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from jaxagent.config import ConfigError, SandboxConfig
from jaxagent.config.ranges import NonNegativeInt, PositiveInt, Seconds
from jaxagent.envs.agentflow import prompts, reading
from jaxagent.envs.agentflow.attempt import SOLVED, AgentFlowAttempt
from jaxagent.envs.base import Environment, Message, Opening
from jaxagent.envs.cast import Cast
from jaxagent.envs.python.environment import open_pythons
from jaxagent.types import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentFlow(Environment):
    """A planner with an executor, a verifier and two tools: Python in a sandbox, and a model that just answers.

    `env.max_turns` is the number of steps at most, `env.turn_tokens` of one reply of the planner, and
    `env.context_tokens` of one of its conversations.
    """

    style: prompts.Style = "full"  # full: for models that follow instructions; compact: learnt from demonstrations
    answer: reading.Answer = "boxed"  # how the final output states its answer; tags: <answer>...</answer>
    # Which calls of the planner carry gradient. all: slime-agentic's code; without_final: as its diagram says;
    # steps: AgentFlow's own, in which plan and final output are not the trained model's.
    trained: Literal["all", "without_final", "steps"] = "all"
    planner_role: bool = False  # calls that are not trained are asked of a role "planner", else of the policy
    unknown_tool: Literal["generator", "nothing"] = "generator"  # slime-agentic's: the generator runs; AgentFlow's own
    coder: bool = True  # a role "coder" writes the program that a query asks for, in words; else a query is the program
    judge: bool = False  # a role "judge" decides where the final answer does not equal the gold answer
    token_budget: NonNegativeInt = 16_384  # of the planner's calls together; past it no further step begins; 0 = none
    prompt_tokens: NonNegativeInt = 0  # a planner's call with a longer prompt is played, and not trained; 0 = no limit
    result_chars: PositiveInt = 4_096  # of a tool's result in the memory
    plan_chars: PositiveInt = 4_096  # of the plan, and of a step's context, as roles are shown them
    step_chars: PositiveInt = 2_048  # of a sub-goal and of a command, as roles are shown them
    run_timeout_s: Seconds = 30.0  # of one program
    output_chars: PositiveInt = 4_000  # of a program's output
    traceback: Literal["whole", "message"] = "whole"  # message: without the frames
    sandbox: SandboxConfig = dataclasses.field(default_factory=SandboxConfig)

    score = SOLVED
    calls = "tool_calls"
    needs_answers = True
    rollout = "jaxagent.rollout.play:Play"

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that contradict each other."""
        if self.planner_role and self.trained == "all":
            raise ConfigError("env.planner_role=True needs calls that are not trained: set env.trained to 'steps'.")
        if self.max_turns * self.run_timeout_s >= self.episode_timeout_s:
            raise ConfigError(
                f"env.episode_timeout_s={self.episode_timeout_s:g} must be more than env.max_turns x env.run_timeout_s "
                f"= {self.max_turns * self.run_timeout_s:g}: slow programs are the policy's own fault."
            )

    @property
    def roles(self) -> Sequence[str]:  # type: ignore[override]
        """Who plays beside the policy."""
        some = (("coder", self.coder), ("judge", self.judge), ("planner", self.planner_role))
        return ("executor", "verifier", "generator", *(name for name, there in some if there))

    @property
    def most_turns(self) -> int:
        """Generations of one conversation: each call of the planner is one of its own."""
        return 1

    @property
    def tokens(self) -> Sequence[str]:  # type: ignore[override]
        """What the compact style repeats."""
        return prompts.COMPACT_TOKENS if self.style == "compact" else ()

    def messages(self, text: str) -> Sequence[Message]:
        """What the planner is shown first."""
        return (Message("user", prompts.prompt("plan", self.style, self.coder, question=text)),)

    def role_messages(self, text: str) -> Mapping[str, Sequence[Message]]:
        """The least that each role is shown of a task: with nothing yet of what policy and tools will write."""
        prompt = functools.partial(prompts.prompt, style=self.style, coder=self.coder, question=text, plan="")
        prompt_of_role = {
            "executor": prompt("executor", context="", sub_goal="", tool=reading.GENERATOR),
            "verifier": prompt("verifier"),
            "judge": prompts.judge(text, "", ""),
            "planner": prompt("plan"),
            "coder": prompts.CODER.format(seconds=self.run_timeout_s),
        }
        return {role: (Message("user", prompt_of_role[role]),) for role in self.roles if role in prompt_of_role}

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task, Cast], AgentFlowAttempt]]:  # type: ignore[override]
        """Finds a sandbox that works, begins to fill the pool and runs one program."""
        with open_pythons(opening, self.sandbox) as take:
            yield lambda task, cast: AgentFlowAttempt(task, cast, self, take)
