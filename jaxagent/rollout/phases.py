"""Phases: tasks that the policy failed in one beget those of the next, as far as it may learn from them now.

WebRL (Qi et al., arXiv 2411.02337, section 3.1). A phase is `rl.phases.steps` RL steps. At its end each task at which
an attempt failed is given to the environment's generator (`Environment.new_task`), several times with other randomness,
until there are `rl.phases.tasks` new ones. A new task is left out where it is

  known     the same as a training task or an earlier new one: prompt, answers and metadata
  held out  a question of the held-out tasks: their prompt, or where all prompts are one, the whole task
  no use    of a value outside [low, high]: too hard to learn anything from, or learnt already

The value is the critic's, of the new task's prompt; without a critic the success rate of the task that begot it, of its
attempts in the phase, (s + 1) / (n + 2). The next phase plays its new tasks first, in an order of the seed, and for
what is left of its steps tasks of the source. All of it is a function of the seed and of what was played, and is saved
with every bundle.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxagent import contract
from jaxagent.config.run import PhasesConfig
from jaxagent.data import codec
from jaxagent.data.sources import TaskSource, contents_of
from jaxagent.envs.base import Environment
from jaxagent.types import Group, Task

TRIES = 4  # new tasks that are asked for of one failed task
Values = Callable[[Sequence[Task]], Sequence[float]]  # what a critic expects of tasks


class Phases:
    """The new tasks of all phases so far, and what the running one has shown. Owned by the loop."""

    def __init__(self, cfg: PhasesConfig, environment: Environment, train: TaskSource, held_out: TaskSource, seed: int):
        self._cfg, self._environment, self._seed = cfg, environment, seed
        self._known = {whole for _, _, whole in train.contents}
        one_prompt = len({prompt for prompt, _, _ in train.contents}) == 1
        self._part = 2 if one_prompt else 0  # of `contents_of`, by which a held-out task is known
        self._held_out = {parts[self._part] for parts in held_out.contents}
        self.tasks: list[Task] = []  # new ones, of all phases
        self._first = 0  # of the running phase, in `tasks`
        self._played: dict[str, list[Any]] = {}  # by id, in order: the task, its successes and attempts in this phase

    def places(self, step: int, count: int) -> list[int]:
        """Of the running phase's new tasks those that a step plays first, `count` at most; places in `tasks`."""
        at = self._first + step % self._cfg.steps * count
        return list(range(at, min(at + count, len(self.tasks))))

    def record(self, groups: Sequence[Group], step: int, values: Values | None) -> dict[str, float]:
        """Learns from a step's groups, and at the end of a phase makes the next one's tasks. Returns metrics."""
        for group in groups:
            if group.valid:
                row = self._played.setdefault(group.task.id, [group.task, 0, 0])
                row[1] += sum(e.total_reward >= self._cfg.success_reward for e in group.valid)
                row[2] += len(group.valid)
        phase, new = step // self._cfg.steps, {task.id for task in self.tasks[self._first :]}
        at_new = sum(len(group.valid) for group in groups if group.task.id in new)
        metrics = {"phases/number": float(phase), "phases/attempts_at_new_tasks": float(at_new)}
        return metrics | (self._begin(phase + 1, values) if not (step + 1) % self._cfg.steps else {})

    def get_state(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        played = [[codec.encode_task(task), solved, tried] for task, solved, tried in self._played.values()]
        return {"tasks": [codec.encode_task(task) for task in self.tasks], "first": self._first, "played": played}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `get_state` gave."""
        where = "the bundle's phases"
        self.tasks = [codec.decode_task(row, where) for row in state["tasks"]]
        self._known |= {contents_of(task)[2] for task in self.tasks}
        self._first = state["first"]
        played = [(codec.decode_task(row, where), solved, tried) for row, solved, tried in state["played"]]
        self._played = {task.id: [task, solved, tried] for task, solved, tried in played}

    def _begin(self, phase: int, values: Values | None) -> dict[str, float]:
        """Makes the tasks of a phase of those that failed in the one before it; returns counts. Raises ConfigError."""
        failed = [(task, (solved + 1) / (tried + 2)) for task, solved, tried in self._played.values() if solved < tried]
        made: dict[bytes, tuple[Task, float]] = {}  # by content
        counts = Counter(failed=len(failed))
        for number in range(TRIES):
            for task, rate in failed:
                rng = random.Random(f"{self._seed}/phases/{phase}/{task.id}/{number}")
                new = contract.call(self._environment, task, rng, method="new_task")
                if new is None:
                    counts["none"] += 1
                elif not isinstance(new, Task):
                    came = f"a result {contract.described(new)}"
                    raise contract.wrong(self._environment, came, "a Task or None", "new_task")
                elif (parts := contents_of(new))[self._part] in self._held_out:
                    counts["held_out"] += 1
                elif parts[2] in self._known or parts[2] in made:
                    counts["known"] += 1
                else:
                    made[parts[2]] = new, rate
        tasks, rates = zip(*made.values(), strict=True) if made else ((), ())
        expected = values(tasks) if values and tasks else rates
        chosen = [task for task, v in zip(tasks, expected, strict=True) if self._cfg.low <= v <= self._cfg.high]
        counts["no_use"] = len(made) - len(chosen)
        random.Random(f"{self._seed}/phases/{phase}").shuffle(chosen)
        chosen = chosen[: self._cfg.tasks]
        self._first, self._played = len(self.tasks), {}
        self._known |= {contents_of(task)[2] for task in chosen}
        self.tasks += [dataclasses.replace(task, id=f"phase{phase}/{at}") for at, task in enumerate(chosen)]
        counts["new"] = len(chosen)
        names = ("failed", "none", "known", "held_out", "no_use", "new")
        return {f"phases/{name}": float(counts[name]) for name in names}
