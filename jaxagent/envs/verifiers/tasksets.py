"""Any taskset of the package verifiers since 0.4 (`verifiers.v1`), played by the package's own harness.

    --config.env=verifiers_v1 --config.env.taskset=my_taskset --config.data.source=verifiers

The package runs in an interpreter of its own, `env.interpreter`, and plays each attempt as its evaluation would: its
environment, harness, tools, limits and rewards. The model that it asks is the run's gateway, so the tokens are those
that the policy sampled. How an attempt ends:

    the package judged it                    its reward; each reward and metric is a component
    max_turns, agent_timeout                 the same, as there: such a trace is complete
    it failed behind a refused request       reward 0: there was no more room, which its harness did not handle
    it failed otherwise                      an exception: no reward of 0
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxagent.agents.programs import Command
from jaxagent.config import ConfigError
from jaxagent.config.ranges import FiniteFloat, PositiveInt, Seconds
from jaxagent.envs import forms
from jaxagent.envs.agent_attempt import AgentAttempt, Place
from jaxagent.envs.base import Environment, Opening, Verdict
from jaxagent.envs.verifiers.playing import Player, Seat, described_tasks
from jaxagent.envs.verifiers.rows import SOLVED, place_of, split_rows
from jaxagent.types import StopReason, Task

STOPS = {"max_turns": StopReason.TURN_LIMIT, "agent_timeout": StopReason.TIME_LIMIT}
STOPS |= dict.fromkeys(("max_input_tokens", "max_output_tokens", "max_total_tokens"), StopReason.TOKEN_LIMIT)
CLOSE_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taskset(Environment):
    """One taskset of the package verifiers, with a harness.

    `settings` is the package's EnvConfig without what the fields here say: the taskset's settings in "taskset", the
    harness in "agent". A runtime that is not named is "subprocess", if the harness runs no code of the model's.
    """

    taskset: str = ""  # its id: an installed package, or a module on PYTHONPATH
    settings: str = "{}"  # the package's EnvConfig, a JSON object
    heldout: str = ""  # a JSON object of the taskset's settings for held-out tasks: '{"split": "test"}'
    interpreter: str = ""  # the Python that has the package; "" = the run's own
    num_tasks: PositiveInt = 10_000  # the first so many of a split, since a taskset need not end
    solved_reward: FiniteFloat = 1.0  # from which reward an attempt counts as solved, in reports
    init_s: Seconds = 120.0  # for the taskset to load
    run_s: Seconds = 300.0  # of the harness, for one attempt; then the package judges what there is
    verify_s: Seconds = 120.0  # of the package's setup and scoring together

    score = SOLVED
    rollout = "jaxagent.gateway.harness:HarnessRollout"
    repeatable = False  # a program may look at the clock

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that are none, and for times that are never over."""
        if not self.taskset:
            raise ConfigError("config.env.taskset is empty: name a taskset of verifiers, such as gsm8k-v1.")
        self.envs()
        if self.run_s + self.verify_s >= self.episode_timeout_s:
            raise ConfigError(
                f"env.run_s={self.run_s:g} and env.verify_s={self.verify_s:g} together must be less than "
                f"env.episode_timeout_s={self.episode_timeout_s:g}, which makes an episode a failure."
            )

    @property
    def made_of(self) -> Mapping[str, Any]:
        """What the tasks depend on."""
        return dict(taskset=self.taskset, settings=self.settings, heldout=self.heldout, num_tasks=self.num_tasks)

    def envs(self) -> dict[str, dict[str, Any]]:
        """The package's EnvConfig of each split. Raises ConfigError: a setting is no JSON object, or says the id."""
        base = forms.json_object(self.settings, "config.env.settings")
        own = base.get("taskset") or {}
        if "id" in own:
            raise ConfigError("config.env.settings: taskset.id is config.env.taskset.")
        named = {**own, "id": self.taskset}
        envs = {"train": {**base, "taskset": named}}
        if self.heldout:
            envs["heldout"] = {**base, "taskset": {**named, **forms.json_object(self.heldout, "config.env.heldout")}}
        return envs

    def tasks(self, num_heldout: int) -> dict[str, list[dict[str, Any]]]:
        """The package's tasks, training and held-out. Raises ConfigError: they cannot be loaded, or are too few."""
        rows = {
            split: described_tasks(self._python, self._player_settings(), split, self.init_s)
            if split in self.envs()
            else []
            for split in ("train", "heldout")
        }
        keys = {split: [row["key"] for row in of] for split, of in rows.items()}
        places = split_rows(keys["train"], keys["heldout"], num_heldout, f"config.env.taskset='{self.taskset}'")
        return {name: [_task_row(split, i, rows[split][i]) for split, i in of] for name, of in places.items()}

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], TasksetAttempt]]:
        """Has the process that plays, from the first attempt to the run's end."""
        for task in opening.tasks:
            place_of(task)
        player = Player(self._python, self._player_settings())
        try:
            yield lambda task: TasksetAttempt(task, self, player)
        finally:
            opening.run(player.close(), CLOSE_S)

    @property
    def _python(self) -> str:
        return self.interpreter or sys.executable

    def _player_settings(self) -> dict[str, Any]:
        return dict(envs=self.envs(), run_s=self.run_s, max_turns=self.max_turns, num_tasks=self.num_tasks)


class TasksetAttempt(AgentAttempt):
    """One attempt at one task, played by the package."""

    def __init__(self, task: Task, config: Taskset, player: Player) -> None:
        self._task, self._config = task, config
        self._seat = Seat(player, *place_of(task))
        self.agent = Command(words=("{url}", "{token}"))
        self.init_s, self.run_s, self.verify_s = config.init_s, config.run_s + config.verify_s, config.verify_s
        self.counters: dict[str, float] = {}

    @property
    def stop_reason(self) -> StopReason:
        """How the package says it ended."""
        return STOPS.get((self._seat.answer or {}).get("stop", ""), StopReason.ANSWER)

    async def start(self) -> Place:
        """A seat in the process."""
        return Place(self._seat, os.getcwd(), self._task.prompt, os.path.expanduser("~"))

    async def verify(self, stop_reason: StopReason) -> Verdict:
        """What the package's rewards say. Raises RuntimeError: they say nothing."""
        answer = self._seat.answer
        if answer is None:
            raise RuntimeError(
                "the package's setup, play and scoring took longer than env.run_s and env.verify_s together"
            )
        if answer["error"]:
            if stop_reason in (StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT):
                return Verdict(0.0, {SOLVED: 0.0})
            raise RuntimeError(f"verifiers: {answer['error']}")
        solved = float(answer["reward"] >= self._config.solved_reward)
        return Verdict(answer["reward"], {**answer["scores"], SOLVED: solved})

    async def close(self) -> None:
        """The process is the run's."""


def _task_row(split: str, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"split": split, "row": number} | ({"name": row["name"]} if row["name"] else {})
    return {"id": f"{split}-{number}", "prompt": row["prompt"], "answers": [], "kind": "", "metadata": metadata}
