"""Curricula: tasks drawn by how often the policy solves them. NumPy, no JAX.

Every task has a running success rate, of its attempts so far with older ones counting less. `weights` turns rates into
chances; `Curriculum` draws, learns what came out, and is saved with the checkpoint. A draw depends on (seed, step,
round) and on the statistics alone, never on which attempt finished first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from jaxagent import contract
from jaxagent.config.errors import ConfigError
from jaxagent.config.ranges import FiniteFloat, PositiveFloat, ZeroToOne, between
from jaxagent.data.sources import TaskSource
from jaxagent.types import Group


@dataclasses.dataclass(frozen=True)
class BySuccess:
    """What `rl.curriculum` can name: which success rates are worth most. The constants that all of them have."""

    explore: ZeroToOne = 0.1  # part of the draws that go evenly over all tasks
    success_reward: FiniteFloat = 1.0  # from which an attempt counts as a success
    decay: Annotated[float, between(0, 1, without="low")] = 0.9  # of a task's older attempts, per group; 1 = never
    prior: ZeroToOne = 0.5  # success rate of a task not met yet
    prior_attempts: PositiveFloat = 2.0  # how many attempts the prior counts as

    def __call__(self, success: np.ndarray) -> np.ndarray:
        """float[N] success rates in [0, 1] -> float[N], not negative."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Target(BySuccess):
    """Success-rate targeting: 1 - |p - target| / width, at least 0."""

    target: ZeroToOne = 0.5  # the success rate that is looked for
    width: PositiveFloat = 0.5  # distance from it at which a task's chance is 0

    def __call__(self, success: np.ndarray) -> np.ndarray:
        return np.maximum(1.0 - np.abs(success - self.target) / self.width, 0.0)


class Failed(BySuccess):
    """Failed tasks come again: 1 - p."""

    def __call__(self, success: np.ndarray) -> np.ndarray:
        return 1.0 - success


class Learnability(BySuccess):
    """p (1 - p), the variance of a success, largest where a group disagrees most.

    "SFL": Rutherford et al., arXiv 2408.15099, section 4.
    """

    def __call__(self, success: np.ndarray) -> np.ndarray:
        return success * (1.0 - success)


CURRICULA: dict[str, type] = {"target": Target, "failed": Failed, "learnability": Learnability}


def weights(success: np.ndarray, cfg: BySuccess) -> np.ndarray:
    """Chances of being drawn first, f64[N] of sum 1, of success rates in [0, 1].

    `explore` of the chance is spread evenly over all tasks; all of it where the curriculum gives no task any weight.
    """
    raw = contract.factors(cfg, success)
    total, even = raw.sum(), np.full(len(raw), 1.0 / len(raw))
    return even if total <= 0 else (1.0 - cfg.explore) * raw / total + cfg.explore * even


def draw(chances: np.ndarray, count: int, key: Sequence[int]) -> list[int]:
    """`count` different indices, one after the other in proportion to the chances of those that are left.

    Gumbel top-k (Kool et al., arXiv 1903.06059): the order of log chance + Gumbel noise is that of such a draw. Indices
    of chance 0 come last, in a random order too. `key` is of the randomness. Raises ValueError for more than there are.
    """
    if count > len(chances):
        raise ValueError(f"{count} different tasks of {len(chances)}")
    noise = np.random.default_rng(key).gumbel(size=len(chances))
    with np.errstate(divide="ignore"):
        score = np.log(chances.astype(np.float64)) + noise
    return np.lexsort((-noise, -score))[:count].tolist()


def check_enough(source: TaskSource, count: int) -> None:
    """Raises ConfigError where a source has fewer tasks than a round draws."""
    if count > len(source):
        raise ConfigError(f"rl.curriculum draws {count} different tasks, {source.name} has {len(source)}.")


class Curriculum:
    """The running success of every task, and the draw. Owned by the loop; not thread-safe.

    A task's rate is (s + prior * prior_attempts) / (n + prior_attempts), where s successes and n attempts are
    multiplied by `decay` each time a new group of the task comes in.
    """

    def __init__(self, source: TaskSource, cfg: BySuccess, seed: int):
        self._source, self._cfg, self._seed = source, cfg, seed
        self._successes = np.zeros(len(source))
        self._attempts = np.zeros(len(source))

    @property
    def success(self) -> np.ndarray:
        """f64[N]: the running success rate of every task."""
        prior, strength = self._cfg.prior, self._cfg.prior_attempts
        return (self._successes + prior * strength) / (self._attempts + strength)

    def take(self, count: int, step: int, number: int, excluded: Collection[int] = ()) -> list[int]:
        """Indices of different tasks for round `number` of a step, others than `excluded` as long as there are any.

        Raises ConfigError where more are asked for than the source has.
        """
        check_enough(self._source, count)
        chances, key = weights(self.success, self._cfg), [self._seed, step, number]
        new = np.ones(len(chances), bool)
        new[list(excluded)] = False
        drawn: list[int] = []
        for some in (np.flatnonzero(new), np.flatnonzero(~new)):
            drawn += some[draw(chances[some], min(count - len(drawn), len(some)), key)].tolist()
        return drawn

    def record(self, groups: Sequence[Group], indices: Mapping[str, int]) -> None:
        """Counts the attempts of a step's groups; failed ones say nothing. `indices`: places in the source, by id."""
        for group in groups:
            index, valid = indices[group.task.id], group.valid
            if valid:
                solved = sum(e.total_reward >= self._cfg.success_reward for e in valid)
                self._successes[index] = self._cfg.decay * self._successes[index] + solved
                self._attempts[index] = self._cfg.decay * self._attempts[index] + len(valid)

    def metrics(self) -> dict[str, float | None]:
        """Tasks met so far, and their mean running success."""
        attempted = self._attempts > 0
        return {
            "curriculum/tasks_seen": float(attempted.sum()),
            "curriculum/success": float(self.success[attempted].mean()) if attempted.any() else None,
        }

    def get_state(self) -> dict[str, Any]:
        """Statistics of the tasks met so far, as JSON values; floats survive JSON to the bit."""
        (attempted,) = np.nonzero(self._attempts)
        return {
            "fingerprint": self._source.fingerprint,
            "index": attempted.tolist(),
            "successes": self._successes[attempted].tolist(),
            "attempts": self._attempts[attempted].tolist(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from statistics taken with `get_state`. Raises ConfigError where they are of other data."""
        if state["fingerprint"] != self._source.fingerprint:
            raise ConfigError(
                f"The checkpoint's success statistics are of other data than {self._source.name}. Restore the data, "
                "or use a new workdir."
            )
        self._successes[:], self._attempts[:] = 0.0, 0.0
        self._successes[state["index"]] = state["successes"]
        self._attempts[state["index"]] = state["attempts"]
