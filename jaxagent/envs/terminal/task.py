"""A terminal task, whatever format it came from: an instruction, an initial state, tests, and a solution.

initial state = the image, then `setup` run in it
initial_test  = a script whose exit status 0 says that the initial state is as the instruction claims
final_test    = a script that is brought in only when the agent has finished; `reward_from` says how it speaks
oracle        = a script that solves the task
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)  # absolute path inside -> file or folder here


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


def level_of(difficulty: str) -> int:
    """1, 2 or 3 for the words that task authors use, 0 for any other."""
    return {"easy": 1, "medium": 2, "hard": 3}.get(difficulty.strip().lower(), 0)
