"""Where tasks come from, the limits that every environment and every role has, and where commands run.

An environment's settings stand beside its code, and the entries of roles in `jaxagent.roles`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from jaxagent.config.choice import Choice
from jaxagent.config.errors import ConfigError, Removed
from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seconds, between


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The limits of an attempt, whatever the environment. Each entry of `envs.ENVIRONMENTS` adds its own fields."""

    max_turns: PositiveInt = 4  # of an attempt
    turn_tokens: PositiveInt = 512  # sampled tokens per turn, at most
    observation_tokens: PositiveInt = 512  # an observation is cut to this many tokens (head kept)
    context_tokens: PositiveInt = 4096  # the whole trajectory, at most; also the engine's cache length
    episode_timeout_s: Seconds = 600.0
    concurrent_episodes: NonNegativeInt = 0  # at once; 0 = engine.slots. More of them fill the slots of those who wait
    max_failed_steps: NonNegativeInt = 3  # steps in a row with failed episodes only: the run saves, stops; 0 = never

    @property
    def most_turns(self) -> int:
        """Generations of one attempt, at most."""
        return self.max_turns


@dataclasses.dataclass(frozen=True)
class WorkersConfig:
    """The workers of the back end "remote"."""

    workers: str = ""  # their URLs, separated by commas
    token_file: str = ""  # a file with their token


@dataclasses.dataclass(frozen=True)
class SoftwareConfig:
    """What sandboxes have installed; see docs/sandboxes.md, Images."""

    root: str = ""  # folder that holds a whole root; "" = a minimal one over this machine's /usr
    image: str = ""  # of docker and podman; "" = the root
    # Folder with a layer per task id, for tasks with an image of their own (Dockerfile, container.def).
    layers: str = ""
    images: str = ""  # folder where such images are kept once they are built; "" = none is built
    bases: tuple[str, ...] = ()  # what FROM may name: "debian:12=debootstrap:bookworm"
    build_network: bool = False  # build steps have this machine's network; only for tasks that you trust


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """Where commands run; see docs/sandboxes.md. Every limit is one sandbox's."""

    backend: str = "auto"  # "auto" = the best that works here, "remote", or names: "bubblewrap,podman"
    unsafe: bool = False  # plain processes, without any protection, where nothing else works
    warm: NonNegativeInt = 16  # sandboxes kept started ahead
    memory_mb: PositiveInt = 256
    disk_mb: PositiveInt = 16  # everything written
    files: PositiveInt = 1_000  # files and folders written
    processes: PositiveInt = 64
    cpus: PositiveFloat = 1.0
    remote: WorkersConfig | None = None
    software: SoftwareConfig | None = None  # None: a minimal root over this machine's /usr

    moved: ClassVar = {name: f"remote.{name}" for name in ("workers", "token_file")} | {
        name: f"software.{name}" for name in ("root", "image", "layers", "images", "bases", "build_network")
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """A role that is not trained. Prices are in any one currency; a role without one costs nothing that is known."""

    repeatable: ClassVar[bool] = True  # whether it answers the same to the same at any time
    price_prompt: NonNegativeFloat | None = None  # of a million tokens that it is shown
    price_reply: NonNegativeFloat | None = None  # of a million tokens that it says
    reply_tokens: PositiveInt = 512  # of one reply, at most
    timeout_s: Seconds = 60.0  # for one reply

    @property
    def prices(self) -> tuple[float | None, float | None]:
        """Of a million tokens that it is shown, and that it says."""
        return self.price_prompt, self.price_reply

    def cost(self, prompt_tokens: int, reply_tokens: int) -> float | None:
        """What one reply costs; None where the role has no price."""
        prompt, reply = self.prices
        if prompt is None and reply is None:
            return None
        return ((prompt or 0.0) * prompt_tokens + (reply or 0.0) * reply_tokens) / 1e6


Seed = Annotated[int, between(0, 2**32 - 1)]  # what every generator of random numbers here takes


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Where tasks come from: `data.dataset.Files`, or what a run makes for itself, a `data.dataset.Generated`."""

    def folder(self, workdir: str, seed: int, env: EnvConfig, note: Callable[[str], None]) -> pathlib.Path:
        """The folder or file of the tasks, which are made under `workdir` where they are not there yet."""
        raise NotImplementedError


SOURCES = Choice("jaxagent.data_pipelines.sources:SOURCES", otherwise="files:path")


Unchecked = Literal["warn", "refuse", "ignore"]
Layout = Literal["auto", "ours", "verl", "toolrl", "flashrag", "long_text", "software", "tau_bench", "tau2", "nemo_gym",
                 "kernelbench"]  # fmt: skip


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
