"""The interface of an attempt that an agent program plays: where it starts, and what is judged when it has ended.

    place = await attempt.start()                 # a sandbox, prepared; within init_s
    ...                                           # the rollout starts attempt.agent there; at most run_s
    verdict = await attempt.verify(stop_reason)   # unless the episode failed; within verify_s
    await attempt.close()                         # always, even after an exception

Such an environment's `rollout` is "jaxagent.gateway.harness:HarnessRollout". As everywhere, exceptions are allowed:
they become StopReason.ENV_ERROR, or TIMEOUT when a deadline has passed, and never a reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from jaxagent.envs.base import Verdict
from jaxagent.types import StopReason

HOME = "/home/user"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an agent program starts, and what it is to do. Paths are the same in every episode: prompts show them."""

    sandbox: Any  # a `sandbox.base.Sandbox`, or what has its write, open_port, execute, stop_processes and close
    directory: str  # absolute path
    instruction: str
    home: str = HOME  # absolute path; the program writes its settings there


class AgentAttempt(Protocol):
    """One attempt at one task, played by an agent program. Single use.

    Attributes:
      agent: the program, an `agents.base.Agent`.
      init_s, run_s, verify_s: the time for `start`, for the program, and for `verify`.
      counters: what happened so far; read at the end, even after a failure.
      stop_reason: how a program that ended by itself says that it ended; may be missing, then ANSWER.
    """

    agent: Any
    init_s: float
    run_s: float
    verify_s: float
    counters: Mapping[str, float]

    async def start(self) -> Place:
        """Prepares the place where the program starts."""
        ...

    async def verify(self, stop_reason: StopReason) -> Verdict:
        """Judges what the program has left behind. All its processes have been killed; the place is still there.

        Args:
          stop_reason: ANSWER when the program ended by itself, TIME_LIMIT when its time was over, TOKEN_LIMIT and
            TURN_LIMIT when it had no more tokens or requests.
        """
        ...

    async def close(self) -> None:
        """Releases everything, the place's sandbox too. Called exactly once, also when `start` failed."""
