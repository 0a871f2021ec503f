"""Sources of tasks that an environment itself has: seeds of its worlds, rows of its data set, what its server lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxagent.config import ConfigError, EnvConfig, SourceConfig
from jaxagent.config.choice import Choice
from jaxagent.config.parse import to_dict
from jaxagent.config.ranges import NonNegativeInt, PositiveInt
from jaxagent.data.dataset import Generated
from jaxagent.envs.browser.environment import Browser
from jaxagent.envs.gymnasium.environment import Gymnasium
from jaxagent.envs.openenv.environment import OpenEnv
from jaxagent.envs.reasoning_gym.environment import ReasoningGym
from jaxagent.envs.verifiers.environment import Verifiers
from jaxagent.envs.verifiers.tasksets import Taskset

E = TypeVar("E", bound=EnvConfig)


@dataclasses.dataclass(frozen=True)
class Seeds(Generated):
    """Tasks that are nothing but a seed, of which `gymnasium` and `textarena` make their own worlds."""

    num_train: PositiveInt = 1_000
    num_heldout: PositiveInt = 100
    num_demonstrations: NonNegativeInt = 0  # of random play, of `gymnasium`: see random_play.py

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Demonstrations are what the environment shows."""
        settings = dict(num_train=self.num_train, num_heldout=self.num_heldout, seed=seed)
        if not self.num_demonstrations:
            return settings
        shown = to_dict(environment_of(env, Gymnasium, self))
        names = ("make", "arguments", "instructions", "actions", "show", "max_turns")
        return settings | dict(num_demonstrations=self.num_demonstrations) | {name: shown[name] for name in names}

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes seeds, which no two tasks share, and demonstrations of training seeds and further ones."""
        import random

        from jaxagent.data_pipelines import generated, random_play

        further = max(0, self.num_demonstrations - self.num_train)
        drawn = random.Random(seed).sample(range(2**31), self.num_train + self.num_heldout + further)
        same = {"prompt": "Begin.", "answers": [], "kind": ""}
        rows = [{"id": f"seed-{s}", **same, "metadata": {"seed": s}} for s in drawn[: len(drawn) - further]]
        splits = {"train": rows[: self.num_train], "heldout": rows[self.num_train :]}
        beside = {}
        if self.num_demonstrations:
            seeds = (drawn[: self.num_train] + drawn[len(rows) :])[: self.num_demonstrations]
            shown = random_play.demonstrations(environment_of(env, Gymnasium, self), seeds)
            texts = [
                text
                for row in shown[:2_000]
                for text in (*(message["content"] for message in row["prompt"]), *_turn_texts(row))
            ]
            beside = {"full.jsonl": shown, "texts.jsonl": generated.as_rows(texts)}
        generated.write_dataset(folder, splits, beside, need_answers=False)


@dataclasses.dataclass(frozen=True)
class Rows(Generated):
    """The rows of the environments `verifiers` and `verifiers_v1`, each a task."""

    num_heldout: PositiveInt = 100  # of the training rows, the last ones, where the environment has no held-out rows

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """The rows are the environment's own."""
        return dict(num_heldout=self.num_heldout, **self._environment(env).made_of)

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes which row a task is, and what it is asked, for reports."""
        from jaxagent.data_pipelines.write import write_tasks

        splits = self._environment(env).tasks(self.num_heldout)
        write_tasks(folder, splits, need_answers=False)

    def _environment(self, env: EnvConfig) -> Verifiers | Taskset:
        return env if isinstance(env, Taskset) else environment_of(env, Verifiers, self)


@dataclasses.dataclass(frozen=True)
class Puzzles(Generated):
    """Items of the data set of the environment `reasoning_gym`; no question is both training and held-out."""

    num_train: PositiveInt = 2_000
    num_heldout: PositiveInt = 100

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """The items are the data set's."""
        puzzles = environment_of(env, ReasoningGym, self)
        counts = dict(num_train=self.num_train, num_heldout=self.num_heldout)
        return counts | dict(seed=seed, make=puzzles.make, arguments=puzzles.arguments)

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes which item a task is, and its question."""
        from jaxagent.data_pipelines.write import write_tasks

        splits = environment_of(env, ReasoningGym, self).tasks(seed, self.num_train, self.num_heldout)
        write_tasks(folder, splits, need_answers=False)


@dataclasses.dataclass(frozen=True)
class ServerTasks(Generated):
    """The tasks that a server of the environment `openenv` lists itself, by its splits."""

    num_heldout: PositiveInt = 100  # of the training tasks, the last ones, where the server has no other split

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """The list is the server's own."""
        openenv = environment_of(env, OpenEnv, self)
        return dict(num_heldout=self.num_heldout, server=openenv.server, variables=list(openenv.variables))

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes which split and index a task is."""
        from jaxagent.data_pipelines.write import write_tasks

        write_tasks(folder, environment_of(env, OpenEnv, self).tasks(self.num_heldout), need_answers=False)


@dataclasses.dataclass(frozen=True)
class SiteTasks(Generated):
    """The tasks that the site of the environment `browser` has itself."""

    num_train: PositiveInt = 2_000
    num_heldout: PositiveInt = 100

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """The tasks are the site's."""
        site = to_dict(environment_of(env, Browser, self))["site"]
        return dict(num_train=self.num_train, num_heldout=self.num_heldout, seed=seed, site=site)

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes what the site calls its tasks. Raises ConfigError: it has none."""
        from jaxagent.data_pipelines.write import write_tasks

        site = environment_of(env, Browser, self).site
        if not hasattr(site, "tasks"):
            raise ConfigError(f"data.source='site': {type(site).__name__} has no tasks of its own.")
        write_tasks(folder, site.tasks(seed, self.num_train, self.num_heldout), need_answers=False)


def environment_of(env: EnvConfig, wanted: type[E], source: SourceConfig) -> E:
    """The environment's settings, which must be of the kind that the source's demonstrations are for."""
    if not isinstance(env, wanted):
        name = Choice("jaxagent.data_pipelines.sources:SOURCES").name_of(source)
        environments = Choice("jaxagent.envs:ENVIRONMENTS")
        (right,) = (name for name, cls in environments.entries.items() if cls is wanted)
        raise ConfigError(
            f"data.source='{name}' makes tasks for the environment '{right}', and config.env is "
            f"'{environments.name_of(env)}': set data.source to tasks of that one."
        )
    return env


def _turn_texts(row: Mapping[str, Any]) -> list[str]:
    return [text for turn in row["turns"] for text in (turn["action"], turn["observation"]) if text]
