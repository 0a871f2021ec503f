"""What the loop must know of a stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxagent.config import Config
from jaxagent.engine.driver import Driver
from jaxagent.models.params import Params
from jaxagent.runs.parts import Parts
from jaxagent.runs.workdir import Run


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """One entry of `loop.STAGES`.

    `run` gets the policy that the stage before left (random or loaded for the first; overwritten from the bundle where
    `saved.resumes(stage)`) and returns the one it leaves. `for step in saved.steps(name, ...)` goes on where the bundle
    ends, saves and stops. The engine serves whatever the stage last gave `driver.update_params`.
    """

    run: Callable[[Parts, Run, Driver, Params], Params]
    steps: Callable[[Config], int]  # planned: a last stage whose bundle holds as many is done
    check: Callable[[Parts], None]  # raises ConfigError for data it cannot work with, before any device work


def nothing_to_check(parts: Parts) -> None:
    """For a stage that reads no data of its own."""
