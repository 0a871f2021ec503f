"""Sections of tasks: where they come from."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from jaxagent.config.choice import Choice
from jaxagent.config.env import EnvConfig
from jaxagent.config.errors import ConfigError, Removed
from jaxagent.config.ranges import PositiveInt, between

Seed = Annotated[int, between(0, 2**32 - 1)]  # what every generator of random numbers here takes


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Where tasks come from: `data.dataset.Files`, or what a run makes for itself, a `data.dataset.Generated`."""

    def folder(self, workdir: str, seed: int, env: EnvConfig, note: Callable[[str], None]) -> pathlib.Path:
        """The folder or file of the tasks, which are made under `workdir` where they are not there yet."""
        raise NotImplementedError


SOURCES = Choice("jaxagent.data_pipelines.sources:SOURCES", otherwise="files:path")


Unchecked = Literal["warn", "refuse", "ignore"]
Layout = Literal["auto", "ours", "verl", "toolrl", "flashrag", "long_text", "software", "tau_bench", "tau2"]


@dataclasses.dataclass(frozen=True)
class Columns:
    """What other people's rows call the columns of our own layout; "" = as we do. One that is set must be there."""

    id: str = ""
    prompt: str = ""  # such as "question"
    answers: str = ""  # such as "answer"; a text or a number is the one answer
    kind: str = ""
    metadata: str = ""

    off: ClassVar = dict.fromkeys(("id", "prompt", "answers", "kind", "metadata"), "")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Task sources."""

    source: Annotated[SourceConfig, SOURCES]  # a name, or a folder / file of tasks: docs/bring_your_own.md
    eval_source: str  # a folder / file of held-out tasks; "" = the held-out split of `source`
    seed: Seed  # of the world, not of the run: the held-out questions are the same for every run
    num_eval: PositiveInt  # held-out tasks, spread evenly over families of kinds ("one_hop", "two_hop") and over kinds
    layout: Layout = "auto"  # of the rows, see data/rows.py; "auto" = by their columns
    columns: Columns | None = None  # rows are read as our own, with these names of columns
    # Tasks that `python -m jaxagent.envs.check` has not proven. None: those in files are counted, in one line
    unchecked: Unchecked | None = None

    removed: ClassVar = {"only_proven": Removed("it is data.unchecked=refuse", False, true=("unchecked", "refuse"))}

    def __post_init__(self) -> None:
        """Raises ConfigError for columns of another layout than ours."""
        if self.layout not in ("auto", "ours") and self.columns is not None:
            raise ConfigError(f"data.columns are those of our own layout, and data.layout is '{self.layout}': set one.")
