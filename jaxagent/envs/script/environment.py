"""The script environment: every attempt starts the user's own agent script on this machine, and its output is judged.

A task's prompt -> one process that asks the policy through OPENAI_BASE_URL -> a reward. How an attempt ends:

    exit status 0                      `reward(task, output)`: by default the number in the last line that it printed
    another, after its last request    reward 0: no more tokens or requests were left, and it did not handle that
      was refused
    another                            an exception: the script failed, which is no reward of 0; `crashes="zero"`: 0
    its time is over                   reward 0
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxagent.agents.base import Where
from jaxagent.agents.programs import Command
from jaxagent.config import ConfigError
from jaxagent.config.ranges import Seconds
from jaxagent.envs.agent_attempt import AgentAttempt, Place
from jaxagent.envs.base import Environment, Verdict
from jaxagent.envs.script.host import Host
from jaxagent.types import StopReason, Task

TAIL_CHARS = 500
SCORE = "score"
# What rows keep for their judge: published ones by these names, ours by that of their environment.
JUDGED = {"answer", "answers", "solution", "solutions", "ground_truth", "gold", "target", "reference", "reward_model"}
JUDGED |= {"tests", "test_cases", "test_list", "rubric", "rubrics", "checker", "verifier", "actions", "coding", "tau2"}
MOST_BYTES = 128 * 1024 - 1  # of a variable or a word of a command line: Linux's MAX_ARG_STRLEN, with its end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script(Environment):
    """A command line for every attempt. A subclass of yours says the command and, mostly, the reward.

    The process gets the run's variables and OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL (the same for Anthropic's
    client), and TASK: the task as JSON without its answers; what is larger than a variable may be stands in the file
    that TASK_FILE names. The command may name {instruction}, the task's prompt, and {url}, {token}, {model}. Nothing
    protects this machine from the script, nor from what the policy makes it do.
    """

    command: tuple[str, ...] = ()  # ("python", "my_agent.py", "{instruction}"), in the folder where the run starts
    run_s: Seconds = 300.0  # for one attempt; then it is killed, reward 0
    verify_s: Seconds = 60.0  # for `reward`
    task_answers: bool = False  # TASK has the answers too; then the policy can read them wherever it can run a command
    crashes: Literal["failure", "zero"] = "failure"  # an exit status that is not 0 is left out, or worth 0
    side_requests: Literal["drop", "train"] = "drop"  # requests without tools beside others with tools

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
        """The reward of a script that ended with exit status 0, given the end of what it printed. Raises ValueError: no
        number can be told; the episode is then a failure, no reward of 0."""
        last = output.strip().rpartition("\n")[2].strip()
        try:
            return float(last)
        except ValueError:
            raise ValueError(f"the script's last line is its reward, and no number: {last[:TAIL_CHARS]!r}") from None

    def script_task(self, task: Task) -> Mapping[str, Any]:
        """What the script is told of its task; of the metadata, what only the judge may know is left out."""
        metadata = {name: value for name, value in task.metadata.items() if name not in JUDGED}
        answers = {"answers": task.answers, "metadata": dict(task.metadata)} if self.task_answers else {}
        return {"id": task.id, "prompt": task.prompt, "metadata": metadata} | answers

    def attempt(self, task: Task) -> ScriptAttempt:  # type: ignore[override]
        """A fresh attempt."""
        return ScriptAttempt(task, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskCommand(Command):
    """The command, told its task."""

    variables: Mapping[str, str]

    def argv(self, where: Where) -> Sequence[str]:
        """The words. Raises ConfigError: one is longer than a command line takes."""
        words = super().argv(where)
        if most := [word for word in words if len(word.encode()) > MOST_BYTES]:
            raise ConfigError(
                f"env.command: a word of {len(most[0].encode())} bytes, a command line takes {MOST_BYTES}; leave "
                "{instruction} out and read the file that TASK_FILE names."
            )
        return words

    def env(self, where: Where) -> Mapping[str, str]:
        """The clients' variables, beside the user's own of what no proxy is asked for, and the task."""
        variables = {**super().env(where), **self.variables}
        for name in ("NO_PROXY", "no_proxy"):
            variables[name] = ",".join(filter(None, (os.environ.get(name), variables[name])))
        return variables


class ScriptAttempt(AgentAttempt):
    """One attempt at one task, played by the user's own script."""

    def __init__(self, task: Task, config: Script):
        self._task, self._config, self._host = task, config, Host()
        self._file: str | None = None
        self.agent = TaskCommand(words=config.command, side_requests=config.side_requests, variables=self._variables())
        self.init_s, self.run_s, self.verify_s = 60.0, config.run_s, config.verify_s
        self.counters: dict[str, float] = {}

    def _variables(self) -> dict[str, str]:
        text = json.dumps(self._config.script_task(self._task), default=str)
        if len(text) <= MOST_BYTES - len("TASK="):  # ASCII
            return {"TASK": text}
        handle, self._file = tempfile.mkstemp(suffix=".json", prefix="task-")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        return {"TASK_FILE": self._file}

    async def start(self) -> Place:
        """This machine, this folder, this user."""
        return Place(self._host, os.getcwd(), self._task.prompt, os.path.expanduser("~"))

    async def verify(self, stop_reason: StopReason) -> Verdict:
        """What `Script.reward` says, in a thread: it may be slow."""
        result = self._host.result
        assert result is not None
        output = result.output.decode("utf-8", "replace")
        if stop_reason is StopReason.TIME_LIMIT or (result.exit_code != 0 and stop_reason is not StopReason.ANSWER):
            return Verdict(0.0, {SCORE: 0.0})
        if result.exit_code != 0 and self._config.crashes == "zero":
            return Verdict(0.0, {SCORE: 0.0})
        if result.exit_code != 0:
            raise RuntimeError(f"the script failed with exit status {result.exit_code}: {output[-TAIL_CHARS:].strip()}")
        reward = float(await asyncio.to_thread(self._config.reward, self._task, output))
        return Verdict(reward, {SCORE: reward})

    async def close(self) -> None:
        """Kills what may still run."""
        await self._host.close()
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._file)
