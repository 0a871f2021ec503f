"""Our own minimal agent program: `shell_agent.py`, written into the sandbox and started there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxagent.agents.base import Agent, Where
from jaxagent.config import ConfigError
from jaxagent.config.ranges import PositiveInt, Seconds

PROGRAM = Path(__file__).with_name("shell_agent.py").read_bytes()
SYSTEM = """\
You work in a shell. Write one command in each reply, between <cmd> and </cmd>. It is run, and you are shown what it \
prints. When the task is done, write <done>."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shell(Agent):
    """A loop of one shell command per reply, over Chat Completions without tools."""

    python: str = "python3"  # in the sandbox; 3.8 or later, nothing installed
    system: str = SYSTEM  # "" = no system message
    task: str = "{instruction}"  # the first user message
    begin: str = "<cmd>"  # what stands before a command ("```sh\n" does, too)
    end: str = "</cmd>"  # and behind it
    done: str = "<done>"  # in a reply: the task is done, and no command of this reply is run
    shown: str = "{output}\n[exit status {code}]"
    failed: str = ""  # the same for a status other than 0; "" = as `shown`
    late: str = "{output}\n[stopped after {timeout_s:g} s]"
    cut: str = "[...] "  # before an output whose beginning is not shown
    no_command: str = "Write a command between <cmd> and </cmd>, or <done>."
    max_turns: PositiveInt = 16  # replies
    command_timeout_s: Seconds = 30.0
    output_chars: PositiveInt = 2_000  # of a command's output, at most; its end is shown

    def __post_init__(self) -> None:
        """Refuses texts in which the program could not fill in what it shows."""
        if not (self.begin and self.end and self.done):
            raise ConfigError("env.agent 'shell' needs texts for begin, end and done that are not empty.")
        for name, examples in (
            ("task", {"instruction": ""}),
            ("shown", {"output": "", "code": 0}),
            ("failed", {"output": "", "code": 0}),
            ("late", {"output": "", "timeout_s": 1.0}),
        ):
            try:
                getattr(self, name).format(**examples)
            except (KeyError, IndexError, ValueError) as error:
                rule = f"may name {', '.join('{' + key + '}' for key in examples)} and no other braces ({error})"
                raise ConfigError(f"env.agent.{name} {rule}.") from None

    def files(self, where: Where) -> Mapping[str, bytes]:
        """The program, its settings, and the token, in a file that it removes before it runs a command."""
        settings = dataclasses.asdict(self) | {
            "url": where.url,
            "model": where.model,
            "instruction": where.instruction,
        }
        return {
            f"{where.settings}/shell_agent.key": where.token.encode(),
            f"{where.settings}/shell_agent.py": PROGRAM,
            f"{where.settings}/shell_agent.json": json.dumps(settings, indent=1).encode(),
        }

    def argv(self, where: Where) -> Sequence[str]:
        """The program with its settings. -I: nothing of the task's directory is imported."""
        return (self.python, "-I", *(f"{where.settings}/shell_agent.{end}" for end in ("py", "json", "key")))
