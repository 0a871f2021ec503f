"""The words of the house, as frozen dataclasses: Task, Generation, Trajectory, Episode, Group, StopReason.

Everything that crosses a room's door is one of these. Arrays are NumPy, never JAX, so environment worker
processes can import this module in milliseconds. Axis letters: T tokens of one trajectory.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class StopReason(enum.StrEnum):
    """Why an episode ended. A failure is data: it is counted, and never looks like an honest reward of 0."""

    ANSWER = "answer"  # the policy ended the episode itself
    TURN_LIMIT = "turn_limit"  # the environment's last turn is over and there is no answer
    TOKEN_LIMIT = "token_limit"  # a turn or the context ran out of tokens
    TIME_LIMIT = "time_limit"  # the time that the task gives the policy is over; its own slowness, so no failure
    TIMEOUT = "timeout"  # a deadline of the episode, a tool or the engine passed
    ENV_ERROR = "env_error"  # the environment or one of its tools failed
    ENGINE_ERROR = "engine_error"  # generation failed
    CANCELLED = "cancelled"  # the run no longer wants the episode

    @property
    def is_failure(self) -> bool:
        """True when the episode says nothing about the policy: it is left out of groups and of evaluation means."""
        return self in FAILURES


FAILURES = frozenset({StopReason.TIMEOUT, StopReason.ENV_ERROR, StopReason.ENGINE_ERROR, StopReason.CANCELLED})


class TokenKind(enum.IntEnum):
    """What a token of a trajectory is. Only ACTION tokens were sampled by the policy."""

    PROMPT = 0  # the task's prompt, and every template token (role headers, end-of-turn marks)
    ACTION = 1  # sampled by the policy; trained by the policy objective
    OBSERVATION = 2  # body of an observation that the environment produced; ECHO's target
    WARNING = 3  # harness feedback inside an observation (invalid action, format warnings)


@dataclasses.dataclass(frozen=True)
class Task:
    """One row of data.

    `prompt` is what the environment renders (for search: the bare question). `answers` are the gold answers.
    `kind` groups tasks in reports, e.g. "one_hop/capital". `metadata` is whatever else the verifier needs.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    kind: str = ""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Generation:
    """What the engine sampled in one turn.

    `overshoot_bytes` counts bytes of the last token that lie past the end of the stop string it completed:
    the token is kept as sampled (it is what is trained), the text past the boundary is not the action's.
    """

    tokens: np.ndarray  # i32[T] as sampled, the token that completed the stop string or EOS included
    logprobs: np.ndarray  # f32[T] of the distribution actually sampled (temperature and truncation included)
    policy_versions: np.ndarray  # i32[T] published steps behind the weights that sampled each token
    finish: str  # "stop" (a stop string), "eos", "length" (token budget or context)
    stop_string: str | None = None  # which stop string, when finish == "stop"
    overshoot_bytes: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0  # context tokens that needed no prefill
    # u8|u16[N, W] what the model chose for tokens of the sequence, its experts: for the N that end before the last one
    # and were not told of in an earlier turn. None: nobody recorded it.
    experts: np.ndarray | None = None


def unrecorded(tokens: int, width: int, dtype: np.dtype | type) -> np.ndarray:
    """Experts [tokens, width] that nobody recorded: the trainer's router chooses."""
    return np.full((tokens, width), np.iinfo(dtype).max, dtype)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """ONE token sequence, exactly as the engine saw it. Built only of `rollout.columns.Columns`."""

    tokens: np.ndarray  # i32[T]
    kinds: np.ndarray  # u8[T]   TokenKind of each token
    logprobs: np.ndarray  # f32[T]  behaviour log-prob of ACTION tokens, 0 elsewhere
    policy_versions: np.ndarray  # i32[T]  version that sampled it, -1 where not sampled
    turns: np.ndarray  # i32[T]  0 for prompt and first turn, then 1, 2, ...
    # u8|u16[T, W]  the experts that the engine chose for each token, of each layer in ascending order; `unrecorded`
    # where nobody told. None: they were not recorded.
    experts: np.ndarray | None = None

    @property
    def action_mask(self) -> np.ndarray:
        """bool[T]: True where the policy sampled the token."""
        return self.kinds == TokenKind.ACTION

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class UntrainedConversation:
    """A conversation with a role that is not trained, or of the policy where it is only shown.

    For people and for checks.
    """

    role: str
    turns: Sequence[tuple[str, str]]  # (what it was shown, what it said)
    trajectory: Trajectory | None = None  # its tokens, where an engine of this run sampled them; never trained
    after: int = 0  # trained conversations of the episode that had begun before it


@dataclasses.dataclass(frozen=True)
class Episode:
    """All trajectories of one attempt at one task, with what the verifier said."""

    task: Task
    sample: int  # index of this attempt inside its group
    trajectories: Sequence[Trajectory]
    reward: float  # paid at its end
    rewards: Mapping[str, float]  # its named components, for reports ("em", "format", ...)
    stop_reason: StopReason
    turns: int
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # counters and timings (`*_s`, `*_tokens`)
    text: str = ""  # decoded, for people; never read by training
    error: str = ""  # one line, when stop_reason.is_failure
    turn_rewards: tuple[float, ...] = ()  # paid at the end of each turn, beside `reward`; () = no process rewards
    heard: Sequence[UntrainedConversation] = ()  # conversations with roles that are not trained
    # The attempt (its `sample`) whose first `forked_at` turns this one begins with, as context; None: it is no fork.
    fork_of: int | None = None
    forked_at: int = 0

    @property
    def total_reward(self) -> float:
        """What the attempt earned, at its end and in its turns: what compares, chooses or counts attempts reads this.

        The sum is rounded once, whatever the order: attempts that earned the same have the same number.
        """
        return math.fsum((self.reward, *self.turn_rewards)) if self.turn_rewards else self.reward


@dataclasses.dataclass(frozen=True)
class Group:
    """The G episodes of one task."""

    task: Task
    episodes: Sequence[Episode]

    @property
    def valid(self) -> tuple[Episode, ...]:
        """Episodes that did not fail for reasons outside the policy."""
        return tuple(e for e in self.episodes if not e.stop_reason.is_failure)

    @property
    def roots(self) -> Group:
        """Without forks, which begin where others have come to: what statistics of the policy at the task read."""
        return dataclasses.replace(self, episodes=tuple(e for e in self.episodes if e.fork_of is None))
