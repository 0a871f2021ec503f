"""The loop's seams where one process is the whole run: it plays, it trains, and its bundles are what survives."""

from __future__ import annotations

import dataclasses

from jaxagent.engine.driver import Driver
from jaxagent.rollout.experience import Experience
from jaxagent.runs.collect import collect
from jaxagent.runs.parts import Parts
from jaxagent.runs.seams import Rollouts, Seams
from jaxagent.runs.stages.served import Served
from jaxagent.runs.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Played:
    """A source that plays a step's groups when it is asked for them."""

    parts: Parts
    driver: Driver
    experience: Experience
    steps_before: int

    def batch(self, step: int) -> Rollouts:
        """The groups of a step, sampled now with the weights that the driver has."""
        return collect(self.parts, self.driver, self.experience, step, self.steps_before)


class Bundles:
    """A ledger that has nothing to forget: what a run needs is in its bundles and logs, which `Workdir` writes."""

    def commit(self, step: int) -> None:
        """Older bundles are deleted as newer ones are complete."""


def connect(parts: Parts, workdir: Workdir, driver: Driver, experience: Experience, steps_before: int) -> Seams:
    """The seams of a run of one process."""
    source, staleness = Played(parts, driver, experience, steps_before), parts.cfg.rl.staleness
    return Seams(source, Served(driver, staleness), Bundles(), bound=staleness)
