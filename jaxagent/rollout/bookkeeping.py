"""What every rollout does with an environment's numbers and exceptions: checks, counts, says them in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence

from jaxagent.envs.base import Verdict
from jaxagent.types import StopReason, TokenKind, Trajectory


def checked(verdict: Verdict, turns: int) -> Verdict:
    """The verdict with Python's floats (NumPy's cannot be logged).

    Args:
      verdict: the environment's.
      turns: of the episode.

    Raises:
      ValueError: a number is not finite, or there are turn rewards for another number of turns.
    """
    if len(verdict.turn_rewards) not in (0, turns):
        raise ValueError(f"{len(verdict.turn_rewards)} turn rewards for {turns} turns")
    rewards = {"reward": verdict.reward, **verdict.components}
    rewards |= {f"turn_rewards[{turn}]": reward for turn, reward in enumerate(verdict.turn_rewards)}
    if wrong := next((name for name, reward in rewards.items() if not math.isfinite(reward)), ""):
        raise ValueError(f"the environment's {wrong} is {rewards[wrong]}, which is not a number to train on")
    return dataclasses.replace(
        verdict,
        reward=float(verdict.reward),
        components={name: float(value) for name, value in verdict.components.items()},
        turn_rewards=tuple(map(float, verdict.turn_rewards)),
    )


def counted(counters: Mapping[str, float]) -> dict[str, float]:
    """An environment's counters. Raises ValueError where one is not finite, and others where one is no number."""
    numbers = {name: float(value) for name, value in counters.items()}
    if wrong := next((name for name, value in numbers.items() if not math.isfinite(value)), ""):
        raise ValueError(f"the environment's counter '{wrong}' is {numbers[wrong]}")
    return numbers


def judged(verdict: Verdict, stop_reason: StopReason) -> Verdict:
    """What an episode keeps of its verdict: nothing where it failed, for a failure is no zero of the policy's."""
    return Verdict(0.0) if stop_reason.is_failure else verdict


def token_counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """An episode's tokens over all of its trajectories: sampled, observed, and all of them."""
    return {
        "action_tokens": float(sum(int(t.action_mask.sum()) for t in trajectories)),
        "observation_tokens": float(sum(int((t.kinds >= TokenKind.OBSERVATION).sum()) for t in trajectories)),
        "trajectory_tokens": float(sum(map(len, trajectories))),
    }


@contextlib.contextmanager
def seconds(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds it was open to `metrics[name]`."""
    started = time.monotonic()
    try:
        yield
    finally:
        metrics[name] += time.monotonic() - started


def one_line(failure: BaseException | None, empty: str) -> str:
    """One line of an exception; asyncio's own timeouts carry no text."""
    text = " ".join(str(failure).split()).encode(errors="replace").decode()  # a log is UTF-8, a file's name may not be
    return f"{type(failure).__name__}: {text}" if text else empty or type(failure).__name__
