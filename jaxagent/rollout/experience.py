"""What the RL stage knows of its tasks beside the weights: position, success statistics, past successes.

All of it is host state and goes into every bundle: a resumed run draws the same tasks and replays the same attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.config import Config
from jaxagent.data.curriculum import Curriculum
from jaxagent.data.sources import TaskSource
from jaxagent.data.tasks import TaskIterator
from jaxagent.rollout.replay import ReplayBuffer
from jaxagent.types import Group, Task


class Experience:
    """Where tasks come from and what is remembered of them. Owned by the loop.

    Args:
      source: training tasks.
      cfg: the run's.
    """

    def __init__(self, source: TaskSource, cfg: Config):
        rl = self._rl = cfg.rl
        self._tasks = TaskIterator(source, cfg.seed, shuffle=True)
        self._curriculum = Curriculum(source, rl.curriculum, cfg.seed) if rl.curriculum else None
        self.replay = ReplayBuffer(rl.replay, cfg.seed) if rl.replay else None

    def take(self, count: int, step: int, number: int) -> list[Task]:
        """The tasks of round `number` of a step."""
        if self._curriculum is not None:
            return self._curriculum.take(count, step, number)
        return self._tasks.take(count)

    def record(self, played: Sequence[Group], step: int) -> dict[str, float]:
        """Learns from everything that a step sampled, after the step's update. Returns metrics."""
        metrics = {}
        if self._curriculum is not None:
            self._curriculum.record(played)
            metrics |= self._curriculum.metrics()
        if self.replay is not None:
            self.replay.record(played, step, self._rl.advantage)
            metrics["replay/size"] = float(len(self.replay))
        return metrics

    def get_state(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        state = self._tasks.get_state()
        if self._curriculum is not None:
            state["curriculum"] = self._curriculum.get_state()
        if self.replay is not None:
            state["replay"] = self.replay.get_state()
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a bundle. A strategy that was off when it was taken starts empty.

        Raises:
          ConfigError: the bundle is of other data.
        """
        self._tasks.set_state(state)
        if self._curriculum is not None and "curriculum" in state:
            self._curriculum.set_state(state["curriculum"])
        if self.replay is not None and "replay" in state:
            self.replay.set_state(state["replay"])
