"""The stages a config can chain, each a function (parts, workdir, driver, params) -> params; `rl` stands in loop.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxagent.config import Config, ConfigError, Stage
from jaxagent.engine.driver import Driver
from jaxagent.models.params import Params
from jaxagent.runs.parts import Parts
from jaxagent.runs.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """One entry of `loop.STAGES`.

    `run` gets the policy that the stage before left (random or loaded for the first; overwritten from the bundle where
    `workdir.resumes(stage)`) and returns the one it leaves. `for step in workdir.steps(name, ...)` goes on where the
    bundle ends, saves and stops. The engine serves whatever the stage last gave `driver.update_params`.
    """

    run: Callable[[Parts, Workdir, Driver, Params], Params]
    steps: Callable[[Config], int]  # planned: a last stage whose bundle holds as many is done
    # Raises ConfigError for data it cannot work with, before any device work.
    check: Callable[[Parts], None] = lambda parts: None


def stages_left(workdir: Workdir, programs: Mapping[Stage, StageProgram]) -> tuple[Stage, ...]:
    """The stages that are not done, the interrupted one first.

    Raises:
      ConfigError: the workdir stands in a stage that the config no longer has, or beyond the steps that it gives it.
    """
    cfg = workdir.cfg
    at = workdir.host.get("stage", cfg.stages[0])
    if at not in cfg.stages:
        raise ConfigError(f"{cfg.workdir} was interrupted in stage '{at}', which config.stages does not have.")
    if workdir.step_of(at) > programs[at].steps(cfg):
        raise ConfigError(
            f"{cfg.workdir} has done {workdir.step_of(at)} steps of '{at}', and the config gives it "
            f"{programs[at].steps(cfg)}: what is trained cannot be taken back. Give it as many, which ends it there, "
            "or use another workdir."
        )
    is_done = at == cfg.stages[-1] and workdir.step_of(at) >= programs[at].steps(cfg)
    return () if is_done else cfg.stages[cfg.stages.index(at) :]
