"""What the RL stage knows of its tasks beside the weights: which are whose step's, success statistics, past successes.

The tasks of round r of step t are a function of (seed, t, r) and, with a curriculum, of the results of steps before
t - S, where S is `rl.staleness`. So they are known when the weights are that the step's rollouts may be made with, S
steps ahead, and do not depend on who plays them or when.

All of it is host state and goes into every bundle: a resumed run draws the same tasks and replays the same attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.config import Config, RLConfig
from jaxagent.data.curriculum import Curriculum, check_enough, weights
from jaxagent.data.sources import TaskIterator, TaskSource, further
from jaxagent.envs.base import Environment
from jaxagent.rollout.phases import Phases, Values
from jaxagent.rollout.replay import ReplayBuffer
from jaxagent.types import Group, Task


class Experience:
    """Where tasks come from and what is remembered of them. Owned by the loop."""

    def __init__(self, source: TaskSource, cfg: Config, held_out: TaskSource | None = None):
        """`held_out`: tasks that none of the new ones of `rl.phases` may be."""
        rl = self._rl = cfg.rl
        self._source, self._seed = source, cfg.seed
        self._stream = TaskIterator(source, cfg.seed, shuffle=True)
        self._curriculum = Curriculum(source, rl.curriculum, cfg.seed) if rl.curriculum else None
        self.replay = ReplayBuffer(rl.replay, cfg.seed) if rl.replay else None
        self._phases = None
        if rl.phases:
            assert isinstance(cfg.env, Environment) and held_out is not None
            self._phases = Phases(rl.phases, cfg.env, source, held_out, cfg.seed)
        self._begin(0)

    @property
    def num_tasks(self) -> int:
        """The number of tasks in the source."""
        return len(self._source)

    def take(self, count: int, step: int, number: int) -> list[Task]:
        """The first `count` tasks of round `number` of a step: more than one round with dynamic sampling."""
        return self.tasks(self._round(step, number)[:count])

    def tasks(self, indices: Sequence[int]) -> list[Task]:
        """Tasks by their place in the source, behind which those of `rl.phases` stand."""
        size, new = len(self._source), self._phases.tasks if self._phases else ()
        return [self._source[index] if index < size else new[index - size] for index in indices]

    def assign(self, step: int) -> list[list[int]]:
        """The tasks of a step, by their place in the source: of each round that it may have, as many as it may have.

        Known when the groups of step `step` - S - 1 are recorded, and always the same. At most S steps ahead of what
        is recorded; with a curriculum, ones further ahead would know too little.
        """
        rounds = self._rl.refill.max_rounds if self._rl.refill else 1
        return [self._round(step, number) for number in range(rounds)]

    def record(self, groups_of_step: Sequence[Group], step: int, values: Values | None = None) -> dict[str, Any]:
        """Learns from all that a step sampled but forks, after its update; `values`: a critic's of tasks, or none."""
        metrics: dict[str, Any] = {}
        groups_of_step = [group.roots for group in groups_of_step]
        if self._curriculum is not None:
            self._curriculum.record(groups_of_step, self._places(groups_of_step, step))
            metrics |= self._curriculum.metrics()
        if self.replay is not None:
            self.replay.record(groups_of_step, step, self._rl.advantage)
            metrics["replay/size"] = float(len(self.replay))
        if self._phases is not None:
            metrics |= self._phases.record(groups_of_step, step, values)
        for by_step in (self._rounds, self._positions):
            by_step.pop(step, None)
        self._recorded = step + 1
        self._look_ahead()
        return metrics

    def get_state(self) -> dict[str, Any]:
        """Everything, as JSON values. The stream's position is that of the first step that is not recorded."""
        state = self._stream.get_state()
        state["next_index"] = self._positions.get(self._recorded, state["next_index"])
        if self._curriculum is not None:
            state["curriculum"] = self._curriculum.get_state()
            if self._rounds:  # by what was known when they were drawn, which is forgotten
                state["assigned"] = {str(step): rounds for step, rounds in self._rounds.items()}
        if self.replay is not None:
            state["replay"] = self.replay.get_state()
        if self._phases is not None:
            state["phases"] = self._phases.get_state()
        return state

    def set_state(self, state: Mapping[str, Any], step: int) -> None:
        """Goes on at a step from its bundle. A strategy that was off when it was taken starts empty.

        Raises ConfigError for a bundle of other data.
        """
        self._stream.set_state(state)
        if self._curriculum is not None and "curriculum" in state:
            self._curriculum.set_state(state["curriculum"])
        if self.replay is not None and "replay" in state:
            self.replay.set_state(state["replay"])
        if self._phases is not None and "phases" in state:
            self._phases.set_state(state["phases"])
        assigned = state.get("assigned", {}) if self._curriculum is not None else {}
        # A config that asks for another number of tasks has them drawn anew.
        same_size = {int(at): rounds for at, rounds in assigned.items() if all(len(r) == self._size for r in rounds)}
        self._begin(step, same_size)

    def _begin(self, step: int, assigned: Mapping[int, list[list[int]]] | None = None) -> None:
        """Begins at `step`: of later steps only the rounds in `assigned` are drawn already."""
        self._recorded = self._next = step  # `_next`: the step whose first round is drawn next
        self._rounds = dict(assigned or {})  # by step: indices of each round that is drawn
        self._positions: dict[int, int] = {}  # by step: where the stream was before its first round
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Fixes a curriculum's tasks for the next steps now, since later results may not change them."""
        if self._curriculum is not None and self._rl.staleness:
            self.assign(self._recorded + self._rl.staleness)

    def _round(self, step: int, number: int) -> list[int]:
        """Indices of a round. First rounds are drawn step by step, whichever is asked for."""
        while self._next <= step:
            self._positions[self._next] = self._stream.get_state()["next_index"]
            if self._next not in self._rounds:
                self._rounds[self._next] = [self._draw(self._next, 0, [])]
            self._next += 1
        rounds = self._rounds[step]
        while len(rounds) <= number:
            rounds.append(self._draw(step, len(rounds), [index for earlier in rounds for index in earlier]))
        return rounds[number]

    def _places(self, groups_of_step: Sequence[Group], step: int) -> dict[str, int]:
        """Where the tasks of groups are in the source, by id."""
        drawn = {index for number in self._rounds[step] for index in number}
        places = {self._source[index].id: index for index in drawn}
        if all(group.task.id in places for group in groups_of_step):
            return places
        # Groups of other steps, which a run of many processes with a window trains out of turn.
        return {self._source[index].id: index for index in range(len(self._source))}

    def _draw(self, step: int, number: int, excluded: list[int]) -> list[int]:
        if self._curriculum is not None:
            return self._curriculum.take(self._size, step, number, set(excluded))
        if number == 0:
            places = self._phases.places(step, self._size) if self._phases else []
            new = [len(self._source) + place for place in places]
            return new + (self._stream.take_indices(self._size - len(new)) if len(new) < self._size else [])
        return further(len(self._source), self._size, set(excluded), [self._seed, step, number])

    @property
    def _size(self) -> int:
        return round_size(self._rl)


def round_size(rl: RLConfig) -> int:
    """Tasks of a round, at most."""
    groups = (rl.refill.tasks_per_round if rl.refill else 0) or rl.tasks_per_step
    return groups + (rl.oversample.extra_tasks if rl.oversample else 0)


def check_tasks(source: TaskSource, rl: RLConfig) -> None:
    """Raises ConfigError for a curriculum of too few tasks for a round, or without chances, as a step would tell."""
    if rl.curriculum is not None:
        check_enough(source, round_size(rl))
        weights(np.linspace(0.0, 1.0, 7), rl.curriculum)
