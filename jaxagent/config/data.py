"""Sections of tasks: where they come from."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from jaxagent.config.ranges import NonNegativeInt, PositiveInt, between

Seed = Annotated[int, between(0, 2**32 - 1)]  # what every generator of random numbers here takes


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Task sources. Those with a name are built on first use under the workdir; others are paths."""

    source: str  # a name of families/built_in.py (the laptop's), or a folder / file: array_record, parquet, jsonl
    eval_source: str  # "" = the held-out split of `source`
    seed: Seed  # of the world, not of the run: the held-out questions are the same for every run
    num_cities: PositiveInt  # size of the geography world
    num_tasks: NonNegativeInt  # of "terminal", "arithmetic" and "python_tasks", training and held-out together
    num_curriculum: NonNegativeInt  # geography's one-passage demonstrations
    num_demonstrations: NonNegativeInt  # whole episodes, of the built-in sources
    num_eval: PositiveInt  # held-out tasks, spread evenly over families of kinds ("one_hop", "two_hop") and over kinds
