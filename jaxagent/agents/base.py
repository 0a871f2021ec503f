"""What an agent program is to a rollout: the files that it needs, how it is started, and its environment.

An agent program (Codex, Claude Code, a script) is not told that it is trained. It is pointed at a URL and given a
token; what stands behind the URL is the policy. An `Agent` says how that is done for one program. It is a frozen
dataclass whose fields are settings of a run (`config.env.agent`), and its methods are pure: nothing is read, written or
started here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True)
class Where:
    """What one episode tells the agent program."""

    url: str  # of the gateway as the program reaches it, "http://127.0.0.1:PORT", without a path
    token: str  # names the episode's session; goes where the program puts its API key
    model: str  # the name that the program asks for
    instruction: str  # the task
    directory: str  # absolute path: where the program starts; the same in every episode, since it appears in prompts
    home: str  # absolute path: its HOME, likewise
    context_tokens: int  # of a conversation, at most; programs compact or give up in time if they know it
    turn_tokens: int  # of an answer, at most

    @property
    def settings(self) -> str:
        """The folder for files that the program's own conventions put nowhere in particular."""
        return f"{self.home}/.agent"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent:
    """One agent program: `config.env.agent`. A subclass is a frozen dataclass whose fields are its settings.

    Attributes:
      spawns: those of its tools whose calls begin a sub-agent.
    """

    spawns: ClassVar[tuple[str, ...]] = ()
    side_requests: Literal["drop", "train"] = "drop"  # requests without tools beside others with tools: titles
    foreign: Literal["drop", "train"] = "drop"  # conversations that are not the program's: see docs/gateway.md

    def files(self, where: Where) -> Mapping[str, bytes]:
        """Absolute paths in the sandbox, and what is written there before the program starts."""
        return {}

    def argv(self, where: Where) -> Sequence[str]:
        """The command line. Standard input is empty."""
        raise NotImplementedError

    def env(self, where: Where) -> Mapping[str, str]:
        """Variables on top of those that every program of the sandbox has."""
        return {"HOME": where.home}
