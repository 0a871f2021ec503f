"""Where the RL loop meets the rest of a run: what it trains on, who gets its weights, what must not be forgotten.

In a run of one process these are `collect`, the engine, and bundles with logs (`one_process`). In a run of many they
are a coordinator that plays no episode itself, versions of weights on disk, and a ledger. The loop cannot tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxagent.engine.driver import Driver
from jaxagent.learner.state import TrainState
from jaxagent.models.params import Params
from jaxagent.rollout.experience import Experience
from jaxagent.runs.attempts import Rollouts, collect
from jaxagent.runs.lag import LaggedWeights
from jaxagent.runs.parts import Parts
from jaxagent.runs.workdir import Workdir


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

    def weights_of(self, version: int) -> Params | None:
        """What was trained of a version that rollouts may still be made with; None where it is not held.

        For scoring a step's tokens again (lag.py). Processes that share a trainer's mesh all ask for the same ones.
        """
        ...

    def newest(self) -> contextlib.AbstractContextManager[None]:
        """The driver of this process has the newest version inside, for evaluation."""
        ...


@dataclasses.dataclass(frozen=True)
class Seams:
    """Those of one RL stage.

    Attributes:
      batch: the groups of a step. Blocks until they are played. Asked again for a step, it gives the same ones.
      sink: who gets the weights.
      commit: is told a step before which bundles hold everything, the oldest one too: nothing earlier is asked for
        again, and may be forgotten.
      bound: versions by which a token may be older than the one that trains on it; more is an error.
    """

    batch: Callable[[int], Rollouts]
    sink: Sink
    commit: Callable[[int], None]
    bound: int


# What `loop.run` is given, and calls once when the stage "rl" begins or goes on: (parts, workdir, driver, experience,
# steps that an earlier stage has sampled for: attempts are numbered over both). Whoever gave it closes what it opens.
Connect = Callable[[Parts, Workdir, Driver, Experience, int], Seams]


def one_process(parts: Parts, workdir: Workdir, driver: Driver, experience: Experience, steps_before: int) -> Seams:
    """The seams of a run of one process: it plays, it trains, and its bundles and logs are what survives."""

    def commit(step: int) -> None:
        """Older bundles are deleted as newer ones are complete."""

    staleness = parts.cfg.rl.staleness
    batch = functools.partial(collect, parts, driver, experience, steps_before=steps_before)
    return Seams(batch, LaggedWeights(driver, staleness), commit, staleness)


def publish_past(
    sink: Sink, workdir: Workdir, stage: str, state: TrainState, merged: Callable[[TrainState], TrainState]
) -> None:
    """Publishes what the bundle of a stage that goes on holds of earlier versions, for rollouts still to be made."""
    step = workdir.step_of(stage)
    missing = sink.missing(step)
    if not missing:
        return
    past = workdir.checkpoints.past(state.params)
    at_hand = [version for version in missing if version in past]
    for version in at_hand:
        sink.publish(version, merged(state.replace(params=past[version])))
    if len(at_hand) < len(missing):
        workdir.progress.note(
            f"the bundle of step {step} holds {len(at_hand)} of the {len(missing)} policies before it: rollouts get "
            "their staleness back step by step, and differ from those of a run that was not stopped"
        )
