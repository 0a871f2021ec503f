"""Which weights the engine has while the RL stage trains."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

from jaxagent.engine.driver import Driver
from jaxagent.learner.state import TrainState
from jaxagent.models.params import Params


class Served:
    """Which weights the engine has: the newest, or with `rl.staleness` those of so many steps ago.

    Staleness is an experiment on one machine: what a run would see whose rollouts are that much older. The weights of
    the steps between are kept. They are not in bundles: a resumed run starts with no lag and gets it back step by step.
    """

    def __init__(self, driver: Driver, staleness: int):
        self._driver = driver
        self._past: collections.deque[tuple[Params, int]] = collections.deque(maxlen=staleness + 1)

    def update(self, state: TrainState) -> None:
        """A step's weights exist: rollouts get the oldest that are kept."""
        self._past.append((state.policy, int(state.step)))
        self._driver.update_params(*self._past[0])

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """For evaluation. Where nothing lags the engine is left alone, and keeps what it has cached."""
        if len(self._past) > 1:
            self._driver.update_params(*self._past[-1])
        yield
        if len(self._past) > 1:
            self._driver.update_params(*self._past[0])
