"""Where the RL loop meets the rest of a run: what it trains on, who gets its weights, what must not be forgotten.

In one process these are `collect`, the engine, and bundles with logs (local.py). In a run of many processes they are a
coordinator that plays no episode itself, versions of weights on disk, and a ledger. The loop cannot tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxagent.engine.driver import Driver
from jaxagent.learner.state import TrainState
from jaxagent.models.params import Params
from jaxagent.rollout.experience import Experience
from jaxagent.rollout.failures import Failures
from jaxagent.rollout.selection import Selection
from jaxagent.runs.parts import Parts
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Group


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What a step trains on."""

    chosen: Selection
    metrics: dict[str, float | None]
    failures: Failures  # of all that was begun, also in groups that are dropped
    rounds: Sequence[Sequence[Group]]  # all that was begun, as it was played: what the run's record keeps


class Source(Protocol):
    """Where a step's groups come from."""

    def batch(self, step: int) -> Rollouts:
        """The groups of a step. Blocks until they are played. Asked again for a step, it gives the same ones."""
        ...


class Sink(Protocol):
    """Who gets the weights."""

    def publish(self, version: int, state: TrainState) -> None:
        """Version `version` exists: the policy after so many steps. Rollouts of step version + S may be made with it.

        Called before the first step with the version that the stage begins or goes on with (and before with `past` of
        its bundle), and after every step, when `Experience` has learnt from its groups: it then knows the tasks of step
        version + S.
        """
        ...

    def past(self) -> Mapping[int, Params]:
        """What is trained (`TrainState.params`) of the versions before the newest that rollouts may still be made with.

        Bundles hold it. None are given where they are kept elsewhere.
        """
        ...

    def missing(self, version: int) -> Sequence[int]:
        """Of the versions before `version` that rollouts may still be made with those that are not there.

        Asked when a stage goes on with `version`: what its bundle holds of them is published again before it, oldest
        first. None where they are kept elsewhere.
        """
        ...

    def held(self, version: int) -> Params | None:
        """What was trained of a version that rollouts may still be made with; None where it is not held.

        For scoring a step's tokens again (rescore.py). Processes that share a trainer's mesh all ask for the same ones.
        """
        ...

    def newest(self) -> contextlib.AbstractContextManager[None]:
        """The driver of this process has the newest version inside, for evaluation."""
        ...


class Ledger(Protocol):
    """What must survive."""

    def commit(self, step: int) -> None:
        """Bundles hold everything before `step`, the oldest one too: nothing earlier is asked for again."""
        ...


@dataclasses.dataclass(frozen=True)
class Seams:
    """The three of one RL stage."""

    source: Source
    sink: Sink
    ledger: Ledger
    bound: int  # versions by which a token may be older than the one that trains on it; more is an error


class Connect(Protocol):
    """What `loop.run` is given, and calls once when the stage "rl" begins or goes on. `local.connect` is one."""

    def __call__(
        self, parts: Parts, workdir: Workdir, driver: Driver, experience: Experience, steps_before: int, /
    ) -> Seams:
        """Opens the seams; whoever gave this function to `loop.run` closes what it opens.

        Args:
          parts, workdir, driver: of the run.
          experience: knows the tasks of every step.
          steps_before: steps that an earlier stage has sampled for: attempts are numbered over both.
        """
        ...
