"""Where the RL loop meets the rest of a run: what it trains on, who gets its weights, what must not be forgotten.

In a run of one process these are `collect`, the engine, and bundles with logs (`one_process`). In a run of many they
are a coordinator that plays no episode itself, versions of weights on disk, and a ledger. The loop cannot tell.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from jaxagent.engine.driver import Driver
from jaxagent.learner.state import TrainState
from jaxagent.models.params import Params
from jaxagent.rollout.experience import Experience
from jaxagent.runs.attempts import Rollouts, collect
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

    def held(self, version: int) -> Params | None:
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

    def batch(step: int) -> Rollouts:
        return collect(parts, driver, experience, step, steps_before)

    def commit(step: int) -> None:
        """Older bundles are deleted as newer ones are complete."""

    staleness = parts.cfg.rl.staleness
    return Seams(batch, LaggedWeights(driver, staleness), commit, staleness)


def publish_past(
    sink: Sink, workdir: Workdir, stage: str, state: TrainState, merged: Callable[[TrainState], TrainState]
) -> None:
    """Publishes what the bundle of a stage that goes on holds of earlier versions, for rollouts still to be made.

    Args:
      sink: says which it needs.
      workdir: the run; says it where its bundle does not hold them all.
      stage: its name.
      state: restored.
      merged: multiplies a state's adapters out.
    """
    step = workdir.step_of(stage)
    wanted = sink.missing(step)
    if not wanted:
        return
    past = workdir.checkpoints.past(state.params)
    at_hand = [version for version in wanted if version in past]
    for version in at_hand:
        sink.publish(version, merged(state.replace(params=past[version])))
    if len(at_hand) < len(wanted):
        workdir.progress.note(
            f"the bundle of step {step} holds {len(at_hand)} of the {len(wanted)} policies before it: rollouts get "
            "their staleness back step by step, and differ from those of a run that was not stopped"
        )


class LaggedWeights:
    """Which weights the engine has: the newest, or with `rl.staleness` those of so many steps ago.

    Staleness on one machine is what a run sees whose rollouts are that much older, step for step. The weights of
    the steps between are kept on the device, and bundles hold them.
    """

    def __init__(self, driver: Driver, staleness: int):
        self._driver = driver
        self._staleness = staleness
        # (version, policy to generate with, what was trained: the same, or its LoRA adapters), oldest first
        self._kept: collections.deque[tuple[int, Params, Params]] = collections.deque(maxlen=staleness + 1)

    def publish(self, version: int, state: TrainState) -> None:
        """The policy after `version` steps exists: rollouts get the oldest that is kept."""
        self._kept.append((version, state.policy, state.params))
        self._serve(0)

    def past(self) -> Mapping[int, Params]:
        """What is trained of every version but the newest, by version, oldest first."""
        return {version: trained for version, _, trained in list(self._kept)[:-1]}

    def missing(self, version: int) -> Sequence[int]:
        """All of them: a process that starts has none."""
        return range(max(0, version - self._staleness), version)

    def held(self, version: int) -> Params | None:
        """What was trained of one of the versions that are kept."""
        return next((trained for number, _, trained in self._kept if number == version), None)

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """For evaluation. Where nothing lags the engine is left alone, and keeps what it has cached."""
        if len(self._kept) > 1:
            self._serve(-1)
        yield
        if len(self._kept) > 1:
            self._serve(0)

    def _serve(self, place: int) -> None:
        version, policy, _ = self._kept[place]
        self._driver.update_params(policy, version)
