"""What every rollout does with an environment's numbers and exceptions: checks, counts, says them in one line."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxagent import contract
from jaxagent.envs.base import Verdict
from jaxagent.types import StopReason, TokenKind, Trajectory


async def verdict_of(attempt: Any, turns: int, *shown: Any) -> Verdict:
    """What an attempt's `verify` says of an episode of so many turns, with Python's floats (NumPy's cannot be logged).

    Raises:
      ConfigError: no Verdict of finite numbers, or turn rewards for another number of turns; names the class.
    """
    verdict = await contract.awaited(attempt, "verify", *shown, wanted=Verdict)
    if not isinstance(paid := verdict.turn_rewards, (tuple, list)) or len(paid) not in (0, turns):
        came = f"{len(paid)} turn rewards" if hasattr(paid, "__len__") else f"turn_rewards {contract.described(paid)}"
        raise contract.wrong(
            attempt, f"{came} for {turns} turns", "a tuple of one for each turn, or of none,", "verify"
        )
    return Verdict(
        contract.number(attempt, verdict.reward, "a reward", "verify"),
        contract.by_name(attempt, verdict.components, "components", "verify"),
        tuple(contract.number(attempt, pay, f"turn_rewards[{turn}]", "verify") for turn, pay in enumerate(paid)),
    )


def counted(attempt: Any) -> dict[str, float]:
    """An attempt's counters."""
    return contract.by_name(attempt, attempt.counters, "counters", "counters")


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
