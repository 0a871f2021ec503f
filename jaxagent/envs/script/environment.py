"""The script environment: every attempt starts the user's own agent script on this machine, and its output is judged.

A task's prompt -> one process that asks the policy through OPENAI_BASE_URL -> a reward. How an attempt ends:

    exit status 0                      `reward(task, output)`: by default the number in the last line that it printed
    another, after its last request    reward 0: no more tokens or requests were left, and it did not handle that
      was refused
    another                            an exception: the script failed, which is no reward of 0
    its time is over                   reward 0
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Mapping

from jaxagent.agents.base import Where
from jaxagent.agents.command import Command
from jaxagent.config import ConfigError
from jaxagent.config.ranges import Seconds
from jaxagent.envs.agent_attempt import Place
from jaxagent.envs.base import Environment, Verdict
from jaxagent.envs.script.host import Host
from jaxagent.types import StopReason, Task

TAIL_CHARS = 500
SCORE = "score"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script(Environment):
    """A command line for every attempt. A subclass of yours says the command and, mostly, the reward.

    The process gets the run's variables and OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL (the same for Anthropic's
    client), and TASK: the task as JSON. The command may name {instruction}, the task's prompt, and {url}, {token},
    {model}. Nothing protects this machine from the script, nor from what the policy makes it do.
    """

    command: tuple[str, ...] = ()  # ("python", "my_agent.py", "{instruction}"), in the folder where the run starts
    run_s: Seconds = 300.0  # for one attempt; then it is killed, reward 0
    verify_s: Seconds = 60.0  # for `reward`

    score = SCORE
    rollout = "jaxagent.gateway.harness:HarnessRollout"
    repeatable = False  # a program may look at the clock

    def __post_init__(self) -> None:
        """Refuses an attempt that nothing is started for, or whose own time could never be over."""
        if self.run_s >= self.episode_timeout_s:
            raise ConfigError(
                f"env.run_s={self.run_s:g} must be less than env.episode_timeout_s={self.episode_timeout_s:g}, which "
                "makes an episode a failure."
            )

    def reward(self, task: Task, output: str) -> float:
        """The reward of a script that ended with exit status 0, given the end of what it printed.

        Raises:
          ValueError: no number can be told; the episode is then a failure, no reward of 0.
        """
        last = output.strip().rpartition("\n")[2].strip()
        try:
            return float(last)
        except ValueError:
            raise ValueError(f"the script's last line is its reward, and no number: {last[:TAIL_CHARS]!r}") from None

    def attempt(self, task: Task) -> ScriptAttempt:  # type: ignore[override]
        """A fresh attempt."""
        return ScriptAttempt(task, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Told(Command):
    """The command, told its task."""

    task: str

    def env(self, where: Where) -> Mapping[str, str]:
        """The clients' variables and the task."""
        return {**super().env(where), "TASK": self.task}


class ScriptAttempt:
    """One attempt at one task. See `agent_attempt.AgentAttempt`."""

    def __init__(self, task: Task, config: Script):
        self._task, self._config, self._host = task, config, Host()
        told = {"id": task.id, "prompt": task.prompt, "answers": task.answers, "metadata": dict(task.metadata)}
        self.agent = _Told(words=config.command, task=json.dumps(told, default=str))
        self.init_s, self.run_s, self.verify_s = 60.0, config.run_s, config.verify_s
        self.counters: dict[str, float] = {}

    async def start(self) -> Place:
        """This machine, this folder, this user."""
        return Place(self._host, os.getcwd(), self._task.prompt, os.path.expanduser("~"))

    async def verify(self, ended: StopReason) -> Verdict:
        """What `Script.reward` says, in a thread: it may be slow."""
        result = self._host.result
        assert result is not None
        output = result.output.decode("utf-8", "replace")
        if ended is StopReason.TIME_LIMIT or (result.exit_code != 0 and ended is not StopReason.ANSWER):
            return Verdict(0.0, {SCORE: 0.0})
        if result.exit_code != 0:
            raise RuntimeError(f"the script failed with exit status {result.exit_code}: {output[-TAIL_CHARS:].strip()}")
        reward = float(await asyncio.to_thread(self._config.reward, self._task, output))
        return Verdict(reward, {SCORE: reward})

    async def close(self) -> None:
        """Kills what may still run."""
        await self._host.close()
