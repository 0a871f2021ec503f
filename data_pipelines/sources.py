"""Names of `config.data.source`: the data sets that come with the package, and files of your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxagent.config import ConfigError, EnvConfig, SourceConfig
from jaxagent.config.parse import to_dict
from jaxagent.config.ranges import NonNegativeInt, PositiveInt, ZeroToOne
from jaxagent.data.dataset import Files, Generated
from jaxagent.data_pipelines.environment_tasks import Puzzles, Rows, Seeds, ServerTasks, SiteTasks, environment_of
from jaxagent.envs.agentflow.environment import AgentFlow
from jaxagent.envs.browser.environment import Browser
from jaxagent.envs.coding.environment import Coding
from jaxagent.envs.memagent.environment import MemAgent
from jaxagent.envs.orchestra.environment import ToolOrchestra
from jaxagent.envs.python.environment import Python as PythonEnv
from jaxagent.envs.ragen.environment import Ragen
from jaxagent.envs.search.environment import Search
from jaxagent.envs.speedup.environment import Speedup
from jaxagent.envs.tau.environment import TauBench
from jaxagent.envs.terminal.environment import Terminal
from jaxagent.envs.toolcalls.environment import ToolCalls


@dataclasses.dataclass(frozen=True)
class Geography(Generated):
    """Questions about countries and cities with short passages, for the search environment; see geography.py."""

    num_cities: PositiveInt = 600  # size of the world
    num_curriculum: NonNegativeInt = 8_000  # one-passage demonstrations
    num_demonstrations: NonNegativeInt = 24_000  # whole episodes
    early_answer_frac: ZeroToOne = 0.8  # of two-hop demonstrations, what answers too early: what RL has to unlearn

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Demonstrations show as many passages as a search finds."""
        search = environment_of(env, Search, self)
        settings = dict(
            num_cities=self.num_cities,
            seed=seed,
            topk=search.retriever.topk,
            early_answer_frac=self.early_answer_frac,
            curriculum=self.num_curriculum,
            full=self.num_demonstrations,
        )
        # Left out where it is the usual one, so that the folders of earlier runs keep their names.
        return settings if search.protocol == "search_r1" else settings | {"protocol": search.protocol}

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes tasks, passages and demonstrations."""
        from jaxagent.data_pipelines import geography

        geography.write(folder, **self.settings(seed, env))


@dataclasses.dataclass(frozen=True)
class TerminalTasks(Generated):
    """One or two small things to do in a shell; see terminal.py."""

    num_tasks: NonNegativeInt = 4_000  # training and held-out together
    num_demonstrations: NonNegativeInt = 6_000
    early_answer_frac: ZeroToOne = 0.8  # of demonstrations of two things, what finishes after the first

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Demonstrations are written as the environment's policy writes."""
        return dict(
            num=self.num_tasks,
            seed=seed,
            laptop=True,
            num_demonstrations=self.num_demonstrations,
            style=environment_of(env, Terminal, self).tools,
            early_done_frac=self.early_answer_frac,
        )

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes tasks and demonstrations."""
        from jaxagent.data_pipelines import terminal

        terminal.write(folder, **self.settings(seed, env))


@dataclasses.dataclass(frozen=True)
class _ForPython(Generated):
    num_tasks: NonNegativeInt = 4_000  # training and held-out together
    num_demonstrations: NonNegativeInt = 12_000
    early_answer_frac: ZeroToOne = 0.8  # of the harder demonstrations, what ends too early: what RL has to unlearn

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Demonstrations are written as the environment's policy writes."""
        return dict(
            num=self.num_tasks,
            seed=seed,
            num_demonstrations=self.num_demonstrations,
            style=environment_of(env, PythonEnv, self).format,
            early_frac=self.early_answer_frac,
        )


@dataclasses.dataclass(frozen=True)
class Arithmetic(_ForPython):
    """Word problems of one or two steps with large numbers; see arithmetic.py."""

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes problems and demonstrations."""
        from jaxagent.data_pipelines import arithmetic

        arithmetic.write(folder, **self.settings(seed, env))


@dataclasses.dataclass(frozen=True)
class PythonTasks(_ForPython):
    """Small functions on top of a library whose description may be out of date; see python_tasks.py."""

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes tasks with hidden tests, and demonstrations."""
        from jaxagent.data_pipelines import python_tasks

        python_tasks.write(folder, **self.settings(seed, env))


@dataclasses.dataclass(frozen=True)
class Fixes(Generated):
    """Small Python repositories with one mistake, for the coding environment; see fixes.py."""

    num_tasks: NonNegativeInt = 4_000  # training and held-out together
    num_demonstrations: NonNegativeInt = 12_000
    guess_frac: ZeroToOne = 0.7  # of demonstrations, what mends without having looked: what RL has to unlearn

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Demonstrations are written in the plain style only."""
        if (tools := environment_of(env, Coding, self).tools) != "plain":
            raise ConfigError(f"data.source='fixes' has demonstrations for env.tools='plain' only, which is '{tools}'.")
        return dict(
            num=self.num_tasks,
            seed=seed,
            num_demonstrations=self.num_demonstrations,
            guess_frac=self.guess_frac,
        )

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes tasks and demonstrations."""
        from jaxagent.data_pipelines import fixes

        fixes.write(folder, **self.settings(seed, env))


@dataclasses.dataclass(frozen=True)
class ArithmeticPlans(Generated):
    """The problems of `arithmetic` for a planner with an executor and a verifier; see arithmetic_plans.py."""

    num_tasks: NonNegativeInt = 6_000  # training and held-out together
    num_demonstrations: NonNegativeInt = 9_000  # episodes: each has three or four calls of the planner
    estimate_frac: ZeroToOne = 0.8  # of two-step demonstrations, what asks the generator: what RL has to unlearn
    role_rows: bool = False  # also what executor and verifier say, so that the policy's weights can play them

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Demonstrations are of the compact style, in which a query is a program."""
        flow = environment_of(env, AgentFlow, self)
        if flow.style != "compact" or flow.coder or flow.answer != "boxed":
            raise ConfigError(
                "data.source='arithmetic_plans' has demonstrations for env.style='compact', env.coder=False and "
                f"env.answer='boxed' only, which are {flow.style!r}, {flow.coder} and {flow.answer!r}."
            )
        return dict(
            num=self.num_tasks,
            seed=seed,
            num_demonstrations=self.num_demonstrations,
            estimate_frac=self.estimate_frac,
            role_rows=self.role_rows,
            steps=flow.max_turns,
        )

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes problems and demonstrations."""
        from jaxagent.data_pipelines import arithmetic_plans

        arithmetic_plans.write(folder, **self.settings(seed, env))


@dataclasses.dataclass(frozen=True)
class LongGeography(Generated):
    """Questions over documents of any length, for MemAgent; see long_geography.py."""

    num_curriculum: NonNegativeInt = 16_000  # demonstrations over a few facts
    num_demonstrations: NonNegativeInt = 20_000  # over whole chunks
    forget_frac: ZeroToOne = 0.6  # of those with a memory to keep, what loses it: what RL has to unlearn

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Demonstrations show chunks as long as the environment's, in its compact style."""
        if (prompt := environment_of(env, MemAgent, self).prompt) != "compact":
            raise ConfigError(
                f"data.source='long_geography' has demonstrations for env.prompt='compact' only, which is '{prompt}'."
            )
        return dict(
            seed=seed,
            forget_frac=self.forget_frac,
            chunk_tokens=environment_of(env, MemAgent, self).chunk_tokens,
            curriculum=self.num_curriculum,
            full=self.num_demonstrations,
        )

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes tasks, documents and demonstrations."""
        from jaxagent.data_pipelines import long_geography

        long_geography.write(folder, **self.settings(seed, env))


@dataclasses.dataclass(frozen=True)
class Orchestra(Generated):
    """Problems that experts of different price can solve, for the environment tool_orchestra; see orchestra.py."""

    num_tasks: NonNegativeInt = 3_000  # of arithmetic, training and held-out together; half as many facts beside them
    num_cities: PositiveInt = 300  # size of the facts' world
    num_demonstrations: NonNegativeInt = 9_000
    expert_frac: ZeroToOne = 0.0  # conversations of experts beside them, as a part: for experts that an engine plays

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Demonstrations show as many documents as a search finds, and are written in the plain format."""
        orchestra = environment_of(env, ToolOrchestra, self)
        if orchestra.prompt != "plain":
            raise ConfigError(
                f"data.source='orchestra' has demonstrations for env.prompt='plain', not '{orchestra.prompt}'."
            )
        return dict(
            num=self.num_tasks,
            seed=seed,
            num_cities=self.num_cities,
            num_demonstrations=self.num_demonstrations,
            topk=orchestra.retriever.topk,
            expert_frac=self.expert_frac,
        )

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes tasks, passages and demonstrations."""
        from jaxagent.data_pipelines import orchestra

        orchestra.write(folder, **self.settings(seed, env))


@dataclasses.dataclass(frozen=True)
class ToolCallTasks(Generated):
    """Requests for one or two invented tools, for the environment `toolrl`; see tool_calls.py."""

    num_tasks: PositiveInt = 6_000  # training and held-out together
    num_demonstrations: NonNegativeInt = 12_000
    first_only_frac: ZeroToOne = 0.75  # of demonstrations of two calls, what makes the first alone

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Demonstrations are written in ToolRL's form only."""
        environment_of(env, ToolCalls, self)
        return dict(
            num=self.num_tasks,
            seed=seed,
            num_demonstrations=self.num_demonstrations,
            first_only_frac=self.first_only_frac,
        )

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes tasks and demonstrations."""
        from jaxagent.data_pipelines import tool_calls

        tool_calls.write(folder, **self.settings(seed, env))


@dataclasses.dataclass(frozen=True)
class TextWorlds(Generated):
    """Seeds of the world that the environment `ragen` has; see text_worlds.py."""

    num_tasks: PositiveInt = 4_000  # training and held-out together
    num_demonstrations: NonNegativeInt = 0  # only of worlds without chance; then all tasks need several actions a turn
    flawed_frac: ZeroToOne = 0.75  # of demonstrations, what acts too little: what RL has to unlearn

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Tasks and demonstrations are for one world, and for so many turns and actions."""
        written = to_dict(environment_of(env, Ragen, self))
        names = ("world", "prompt", "think", "max_turns", "max_actions_per_turn")
        return {name: written[name] for name in names} | dataclasses.asdict(self) | {"seed": seed}

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes seeds and demonstrations."""
        from jaxagent.data_pipelines import text_worlds

        ragen = environment_of(env, Ragen, self)
        text_worlds.write(folder, ragen, self.num_tasks, seed, self.num_demonstrations, self.flawed_frac)


@dataclasses.dataclass(frozen=True)
class TauStore(Generated):
    """A retail store of tau-bench's schema with customers' wishes; see tau_store/."""

    num_users: PositiveInt = 300  # of the store
    num_tasks: NonNegativeInt = 2_400  # training and held-out together
    compact: bool = True  # short ids and small orders, for a policy of a few hundred tokens of context
    num_demonstrations: NonNegativeInt = 16_000  # always of compact stores
    num_curriculum: NonNegativeInt = 6_000  # excerpts of right demonstrations
    flawed_frac: ZeroToOne = 0.55  # how likely each mistake of a demonstration is: what RL has to unlearn

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Demonstrations are written in the plain style only."""
        if (tools := environment_of(env, TauBench, self).tools) != "plain" and self.num_demonstrations:
            raise ConfigError(
                f"data.source='tau_store' has demonstrations for env.tools='plain' only, which is '{tools}': set "
                "data.source.num_demonstrations=0."
            )
        return dict(
            num=self.num_tasks,
            seed=seed,
            num_users=self.num_users,
            compact=self.compact,
            num_demonstrations=self.num_demonstrations,
            num_curriculum=self.num_curriculum,
            flawed_frac=self.flawed_frac,
        )

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes the store, its tasks and demonstrations."""
        from jaxagent.data_pipelines.tau_store import make

        make.write(folder, **self.settings(seed, env))


@dataclasses.dataclass(frozen=True)
class WebShopGoals(Generated):
    """What is to be bought in generated web shops; see web_shop.py."""

    num_tasks: PositiveInt = 4_000  # training and held-out together
    scale: Literal["compact", "full"] = "compact"  # of the shops
    num_demonstrations: NonNegativeInt = 10_000
    num_curriculum: NonNegativeInt = 6_000  # single turns of right demonstrations
    hasty_frac: ZeroToOne = 0.6  # of demonstrations, what takes the first result: what RL has to unlearn
    careless_frac: ZeroToOne = 0.45  # of demonstrations, what leaves the options as they are: what RL has to unlearn

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """The browser shows what the demonstrations show where its other settings leave a page whole."""
        environment_of(env, Browser, self)
        return dict(
            num=self.num_tasks,
            seed=seed,
            scale=self.scale,
            num_demonstrations=self.num_demonstrations,
            num_curriculum=self.num_curriculum,
            flawed_frac={"looks": self.hasty_frac, "chooses": self.careless_frac},
        )

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes tasks and demonstrations."""
        from jaxagent.data_pipelines import web_shop

        web_shop.write(folder, **self.settings(seed, env))


@dataclasses.dataclass(frozen=True)
class SpeedupTasks(Generated):
    """Functions to make faster, for the environment `speedup`; see speedup_tasks.py."""

    families: Literal["folds", "all"] = "folds"
    num_demonstrations: NonNegativeInt = 6_000  # of folds
    slow_frac: ZeroToOne = 0.8  # of demonstrations, what is content with a loop: what RL has to unlearn

    def settings(self, seed: int, env: EnvConfig) -> Mapping[str, Any]:
        """Programs are written as the environment's policy writes."""
        return dataclasses.asdict(self) | {"seed": seed, "style": environment_of(env, Speedup, self).format}

    def write(self, folder: Path, seed: int, env: EnvConfig) -> None:
        """Writes tasks and demonstrations."""
        from jaxagent.data_pipelines import speedup_tasks

        speedup_tasks.write(folder, **self.settings(seed, env))


SOURCES: dict[str, type[SourceConfig]] = {
    "files": Files,
    "geography": Geography,
    "terminal": TerminalTasks,
    "arithmetic": Arithmetic,
    "python_tasks": PythonTasks,
    "seeds": Seeds,
    "verifiers": Rows,
    "reasoning_gym": Puzzles,
    "openenv": ServerTasks,
    "site": SiteTasks,
    "fixes": Fixes,
    "arithmetic_plans": ArithmeticPlans,
    "long_geography": LongGeography,
    "orchestra": Orchestra,
    "tool_calls": ToolCallTasks,
    "text_worlds": TextWorlds,
    "tau_store": TauStore,
    "web_shop": WebShopGoals,
    "speedup_tasks": SpeedupTasks,
}
