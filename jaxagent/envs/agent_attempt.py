"""The interface of an attempt that an agent program plays: where the program runs, and what came of it.

    place = await attempt.start()             # a sandbox in the task's initial state; at most `init_s`
    ... the rollout starts the program in the sandbox, and kills everything in it at `run_s` ...
    verdict = await attempt.verify(ended)     # once; at most `verify_s`
    await attempt.close()                     # always

Exceptions mean what they mean for `envs.base.Attempt`: the episode failed, which is no reward of 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from jaxagent.envs.base import Verdict
from jaxagent.sandbox.base import Sandbox
from jaxagent.types import StopReason


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an agent program works."""

    sandbox: Sandbox  # the attempt closes it
    directory: str  # absolute path inside; the same in every episode of a task
    instruction: str  # what the program is told to do


class AgentAttempt(Protocol):
    """One attempt at one task by an agent program. Single use.

    Attributes:
      agent: the program, `jaxagent.agents.base.Agent`.
      counters: what happened so far; read at the end, even after a failure.
      init_s, run_s, verify_s: deadlines of `start`, of the program and of `verify`.
    """

    agent: Any
    counters: Mapping[str, float]
    init_s: float
    run_s: float
    verify_s: float

    async def start(self) -> Place:
        """Brings the task's initial state about in a sandbox."""
        ...

    async def verify(self, ended: StopReason) -> Verdict:
        """Judges what the program left; its processes have been stopped. `ended` is ANSWER where it ended by itself."""
        ...

    async def close(self) -> None:
        """Releases everything. Called exactly once, also when `start` failed."""
