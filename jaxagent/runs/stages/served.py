"""Which weights the engine has while the RL stage trains."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxagent.engine.driver import Driver
from jaxagent.learner.state import TrainState
from jaxagent.models.params import Params
from jaxagent.runs.seams import Sink
from jaxagent.runs.workdir import Workdir


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
    found = workdir.checkpoints.past(state.params)
    held = [version for version in wanted if version in found]
    for version in held:
        sink.publish(version, merged(state.replace(params=found[version])))
    if len(held) < len(wanted):
        workdir.progress.note(
            f"the bundle of step {step} holds {len(held)} of the {len(wanted)} policies before it: rollouts get their "
            "staleness back step by step, and differ from those of a run that was not stopped"
        )


class _Version(NamedTuple):
    number: int
    policy: Params  # to generate with
    trained: Params  # the same, or its LoRA adapters


class Served:
    """Which weights the engine has: the newest, or with `rl.staleness` those of so many steps ago.

    Staleness on one machine is what a run sees whose rollouts are that much older, step for step. The weights of
    the steps between are kept on the device, and bundles hold them.
    """

    def __init__(self, driver: Driver, staleness: int):
        self._driver = driver
        self._staleness = staleness
        self._kept: collections.deque[_Version] = collections.deque(maxlen=staleness + 1)

    def publish(self, version: int, state: TrainState) -> None:
        """The policy after `version` steps exists: rollouts get the oldest that is kept."""
        self._kept.append(_Version(version, state.policy, state.params))
        self._serve(self._kept[0])

    def past(self) -> Mapping[int, Params]:
        """What is trained of every version but the newest, by version, oldest first."""
        return {version.number: version.trained for version in list(self._kept)[:-1]}

    def missing(self, version: int) -> Sequence[int]:
        """All of them: a process that starts has none."""
        return range(max(0, version - self._staleness), version)

    def held(self, version: int) -> Params | None:
        """What was trained of one of the versions that are kept."""
        return next((each.trained for each in self._kept if each.number == version), None)

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """For evaluation. Where nothing lags the engine is left alone, and keeps what it has cached."""
        if len(self._kept) > 1:
            self._serve(self._kept[-1])
        yield
        if len(self._kept) > 1:
            self._serve(self._kept[0])

    def _serve(self, version: _Version) -> None:
        self._driver.update_params(version.policy, version.number)
