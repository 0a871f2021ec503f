"""The interface of every environment: a task becomes messages, the policy's text becomes observations, then a verdict.

    environment = SearchEnvironment(task, config, retriever)   # one object = one attempt
    messages = await environment.start()
    step = await environment.step(action)                      # until step.stop_reason is set
    verdict = await environment.verify(transcript)             # once, unless the episode failed
    await environment.close()                                  # always, even after an exception

An environment speaks text only: it knows no tokens, no model and no engine. Exceptions are allowed everywhere: the
rollout turns a `TimeoutError` into StopReason.TIMEOUT and any other into StopReason.ENV_ERROR, and calls `close`.
Every await must be cancellable, since the rollout enforces the episode's deadline by cancellation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxagent.config import EnvConfig
from jaxagent.types import StopReason, TokenKind


def most_turns(config: EnvConfig) -> int:
    """Most generations of an episode, with the final one that may not use a tool."""
    return config.max_turns + int(config.final_turn)


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of the prompt. Without a chat template only the contents are used, one after the other."""

    role: str  # "system", "user", ...
    content: str


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the policy is shown after an action.

    `role` "" continues the policy's own text, as Search-R1 does; "user" or "tool" makes it a new chat message. A role
    that the chat template does not know becomes "user", and so does "" after a message that the policy ended itself;
    without a chat template roles mean nothing.
    """

    parts: tuple[tuple[str, TokenKind], ...]  # text with its kind: OBSERVATION, or WARNING for harness feedback
    role: str = ""

    @property
    def text(self) -> str:
        """All parts, one after the other."""
        return "".join(text for text, _ in self.parts)


@dataclasses.dataclass(frozen=True)
class Step:
    """The environment's answer to an action: either something to see, or the end."""

    observation: Observation | None = None
    stop_reason: StopReason | None = None  # ANSWER, TURN_LIMIT or TIME_LIMIT when the episode is over

    def __post_init__(self) -> None:
        if (self.observation is None) == (self.stop_reason is None):
            raise ValueError("A step has either an observation or a stop reason.")


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The episode as text, exactly as far as the policy wrote and saw it (observations after being cut)."""

    prompt: str  # contents of the prompt messages
    turns: tuple[tuple[str, str], ...]  # (action, observation that followed or "")
    action_tokens: tuple[int, ...] = ()  # sampled tokens of each turn; () = not counted
    ended: StopReason | None = None  # why the episode is over; None while it is not

    @property
    def actions(self) -> str:
        """What the policy wrote, and nothing it read."""
        return "".join(action for action, _ in self.turns)

    @property
    def response(self) -> str:
        """Everything after the prompt."""
        return "".join(action + observation for action, observation in self.turns)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verifier's judgement of one episode."""

    reward: float  # the scalar that is trained
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)  # for reports: "em", "well_formed", ...
    turn_rewards: tuple[float, ...] = ()  # one per turn of the transcript, paid beside `reward`; () = none


class Environment(Protocol):
    """One attempt at one task. Single use: there is no reset.

    Attributes:
      stop_strings: a generation ends with the first of these that it completes.
      tool_prefixes: how each tool call begins, for `rl.tool_epsilon`; may be missing, then no call is ever forced.
      counters: what happened so far ("searches", "invalid_actions", ...); read at the end, even after a failure.
    """

    stop_strings: Sequence[str]
    counters: Mapping[str, float]

    async def start(self) -> Sequence[Message]:
        """The prompt. Expensive preparation (a sandbox, a user simulator) belongs here, not into the constructor."""
        ...

    async def step(self, action: str) -> Step:
        """Acts on the policy's text, which ends with its stop string, if one was completed."""
        ...

    async def verify(self, transcript: Transcript) -> Verdict:
        """Judges the finished episode, also one that ended at a turn, token or time limit (`transcript.ended`)."""
        ...

    async def close(self) -> None:
        """Releases everything. Called exactly once, also when `start` failed."""
