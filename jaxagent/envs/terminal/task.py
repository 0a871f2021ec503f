"""A terminal task, whatever format it came from: an instruction, an initial state, tests, and a solution.

initial state = the image, then `setup` run in it
initial_test  = a script whose exit status 0 says that the initial state is as the instruction claims
final_test    = a script that is brought in only when the agent has finished; `reward_from` says how it speaks
oracle        = a script that solves the task
steps         = of a task of several: each a task itself, in the same sandbox, whose files and limits are its own
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

Format = Literal["generated", "endless", "harbor", "terminal_bench"]
RewardFrom = Literal["exit_status", "reward_file", "pytest_summary"]

HOME = "/home/user"  # Endless Terminals' home directory; generated tasks only say $HOME or stay relative to it
_HEREDOC_END = "END-OF-SCRIPT-b41d"


@dataclasses.dataclass(frozen=True)
class Script:
    """One shell command and the files that must stand in place before it runs."""

    command: str
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)  # path inside -> file or folder here


@dataclasses.dataclass(frozen=True)
class Image:
    """Where the root file system comes from. What a format does not say is "" or None; no field set = the base root."""

    name: str = ""  # of a container image in a registry
    dockerfile: Path | None = None
    definition: Path | None = None  # Apptainer .def
    context: Path | None = None  # folder that COPY and %files are relative to


@dataclasses.dataclass(frozen=True)
class TaskLimits:
    """What the task's author allows; where nothing is said, Harbor's defaults. Seconds are wall-clock."""

    agent_timeout_s: float
    verifier_timeout_s: float
    build_timeout_s: float = 600.0
    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int = 10240
    stated: Sequence[str] = dataclasses.field(default=(), compare=False)  # of the last three, what the author says


@dataclasses.dataclass(frozen=True)
class Healthcheck:
    """A command that must end with status 0 before the agent comes; tried as Docker's HEALTHCHECK. Seconds."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0  # in which failures do not count
    start_interval_s: float = 5.0
    retries: int = 3


@dataclasses.dataclass(frozen=True)
class Server:
    """An MCP server that runs in the agent's sandbox, spoken to over its stdin and stdout."""

    name: str
    command: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Artifact:
    """What a verifier with a sandbox of its own gets of the agent's: a file or folder, at the same place."""

    source: str  # absolute, or relative to the working directory
    exclude: Sequence[str] = ()  # patterns as tar's --exclude


@dataclasses.dataclass(frozen=True)
class TerminalTask:
    """One task. A part that the source does not hold is None."""

    id: str
    instruction: str  # all that the agent sees
    format: Format
    limits: TaskLimits
    image: Image = Image()
    workdir: str = ""  # where agent, oracle and final test start; "" = the image's own working directory
    setup: Script | None = None
    initial_test: Script | None = None
    final_test: Script | None = None
    oracle: Script | None = None
    reward_from: RewardFrom = "exit_status"
    reward_range: tuple[float, float] = (0.0, 1.0)  # of reward files: a number outside of it is an error
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # for agent, oracle and tests
    verifier_env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # for the final test alone
    oracle_env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # for the oracle alone
    user: str = ""  # whose programs run in the sandbox, all of them; "" = the image's own
    same_user: str = ""  # who the final test must run as, where the task says so: whoever `user` is
    healthchecks: Sequence[Healthcheck] = ()  # after the setup
    servers: Sequence[Server] = ()  # whose tools the agent may call
    skills_dir: str = ""  # folders with a SKILL.md each, which the agent is told of
    collect: Sequence[tuple[str, float]] = ()  # commands and their seconds, after the agent and before the final test
    artifacts: Sequence[Artifact] = ()
    verifier: TerminalTask | None = None  # where the final test has a sandbox of its own: image and test of that
    steps: Sequence[TerminalTask] = ()
    rewards_of: Literal["mean", "final"] = "mean"  # of steps
    min_rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)  # less ends a task at this step
    judged_when_cut: bool = False  # also an attempt whose time or tokens ran out is tested, as its format has it
    looks_at_processes: bool = False  # the final test does: they must not be stopped before it
    level: int = 0  # 1 easy, 2 medium, 3 hard; 0 = the author does not say
    folder: Path | None = None  # that it was read from


def inline(interpreter: str, text: str) -> Script:
    """A script that is fed to its interpreter through a pipe, so that it is never a file an agent could prepare for.

    Args:
      interpreter: "sh", "bash", or "python3": isolated, so that neither the working directory nor the environment
        can put modules in its way.
      text: the program.
    """
    start = {"sh": "sh -s", "bash": "bash -s", "python3": "python3 -I -"}[interpreter]
    if _HEREDOC_END in text:
        raise ValueError(f"a script must not contain {_HEREDOC_END!r}")
    body = text if text.endswith("\n") else text + "\n"
    return Script(f"{start} <<'{_HEREDOC_END}'\n{body}{_HEREDOC_END}\n")


def level_of(difficulty: object) -> int:
    """1, 2 or 3 for the words that task authors use, 0 for all else that they may write there."""
    return {"easy": 1, "medium": 2, "hard": 3}.get(str(difficulty).strip().lower(), 0)
