"""Sections of tasks: where they come from, and which come next."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Annotated, Literal

from jaxagent.config.choice import Choice
from jaxagent.config.env import EnvConfig
from jaxagent.config.ranges import FiniteFloat, PositiveFloat, PositiveInt, ZeroToOne, between

Seed = Annotated[int, between(0, 2**32 - 1)]  # what every generator of random numbers here takes


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Where tasks come from: `data.dataset.Files`, or what a run makes for itself, a `data.dataset.Generated`."""

    def folder(self, workdir: str, seed: int, env: EnvConfig, note: Callable[[str], None]) -> pathlib.Path:
        """The folder or file of the tasks, which are made under `workdir` where they are not there yet."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Task sources."""

    # A source's name, one of yours as "package.module:Class", or a folder / file: array_record, parquet, jsonl.
    source: Annotated[SourceConfig, Choice("jaxagent.data_pipelines.sources:SOURCES", otherwise="files:path")]
    eval_source: str  # a folder / file of held-out tasks; "" = the held-out split of `source`
    seed: Seed  # of the world, not of the run: the held-out questions are the same for every run
    num_eval: PositiveInt  # held-out tasks, spread evenly over families of kinds ("one_hop", "two_hop") and over kinds


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """Which tasks come next. See data/curriculum.py for the formulas."""

    name: Literal["off", "target", "failed", "learnability"]  # off: whole shuffled epochs
    target: ZeroToOne  # read by "target": the success rate that is looked for
    width: PositiveFloat  # read by "target": distance from it at which a task's chance is 0
    explore: ZeroToOne  # part of the draws that go evenly over all tasks
    success_reward: FiniteFloat  # from which an attempt counts as a success
    decay: Annotated[float, between(0, 1, without="low")]  # of a task's older attempts, per new group; 1 = never
    prior: ZeroToOne  # success rate of a task not met yet
    prior_attempts: PositiveFloat  # how many attempts the prior counts as
