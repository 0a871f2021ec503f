"""What `rl.group_reward` can name: rewards that compare the attempts of a group, made before anything is learnt.

The environment judges an attempt alone, and some things cannot be judged so: how cheap an attempt was means something
only beside the others at its task. An entry is called with a finished group and gives one reward per episode;
`streams.shaped` puts them into the episodes, so that all that comes after (groups without signal, advantages, logs,
metrics) sees these rewards and no others. Evaluations keep the environment's.
No jax before an entry is called: a config is read without it. Axis letters: G attempts of one group, K features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxagent.algorithms.advantages import group_mean_std
from jaxagent.config import ConfigError
from jaxagent.config.ranges import FiniteFloat, PositiveInt
from jaxagent.contract import check_arrays
from jaxagent.types import Group

PREFERENCES = "preferences"  # of a task's metadata: feature -> weight


@dataclasses.dataclass(frozen=True)
class Preferences:
    """ToolOrchestra's: outcome, cost, latency and use of tools, each compared inside the group, weighted by the user.

    A task has weights of its own in metadata["preferences"]: {"accuracy": 1, "cost": 0.5, "search": -0.2}, of these
    three and of whatever its environment counts as "calls_NAME". The weights here hold where a task has none, and no
    tool has one then. The environment must count "cost" and "latency_s".
    """

    weighs: ClassVar[Sequence[str]] = ("cost", "latency_s")  # the counters that the weights here are for

    accuracy: FiniteFloat = 1.0
    cost: FiniteFloat = 0.5
    latency: FiniteFloat = 0.1
    score: str = "solved"  # the verdict's component that is the outcome; 1 is correct

    def __call__(self, group: Group) -> Sequence[float]:
        """One reward per episode; 0 of an episode that failed, as everywhere.

        Raises:
          ConfigError: the environment's verdict or counters lack what a weight is for.
        """
        preferences = group.task.metadata.get(PREFERENCES)
        weights = weights_of(preferences, group.task.id) if preferences is not None else self.weights
        mask = np.array([not episode.stop_reason.is_failure for episode in group.episodes], bool)
        features, correct = np.zeros((len(mask), len(weights))), np.zeros(len(mask), bool)
        for row in np.flatnonzero(mask).tolist():
            episode, counters, task = group.episodes[row], group.episodes[row].metrics, group.task.id
            outcome = _looked_up(episode.rewards, self.score, "verdict", task)
            correct[row] = outcome >= 1.0
            values = {"accuracy": outcome}
            for name, counter in (("cost", "cost"), ("latency", "latency_s")):
                values[name] = -_looked_up(counters, counter, "counters", task) if name in weights else 0.0
            features[row] = [
                values[name] if name in values else _looked_up(counters, f"calls_{name}", "counters", task)
                for name in weights
            ]
        return preferred(features, np.array(list(weights.values())), correct, mask).tolist()

    @property
    def weights(self) -> Mapping[str, float]:
        """Those of a task that has none."""
        return {"accuracy": self.accuracy, "cost": self.cost, "latency": self.latency}


@dataclasses.dataclass(frozen=True)
class Decoupled:
    """GDPO's (arXiv 2601.05242): each component of the verdict compared in the group by itself, then added up.

    R = sum over components of weight * (r - mean) / (unbiased std + 1e-6). With `rl.advantage=no_baseline` and
    `rl.whiten_advantages` this is GDPO as verl has it: no component drowns in the noise of a larger one.
    """

    components: tuple[str, ...]  # of the verdict
    weights: tuple[FiniteFloat, ...] = ()  # one of each; () = all 1

    def __call__(self, group: Group) -> Sequence[float]:
        """One reward per episode; 0 of an episode that failed.

        Raises:
          ConfigError: a verdict lacks a component.
        """
        mask = np.array([not episode.stop_reason.is_failure for episode in group.episodes], bool)
        values = np.zeros((len(self.components), len(mask)))
        for row in np.flatnonzero(mask).tolist():
            verdict = group.episodes[row].rewards
            values[:, row] = [_looked_up(verdict, name, "verdict", group.task.id) for name in self.components]
        weights = np.array(self.weights or (1.0,) * len(self.components))
        return (weights @ group_mean_std(values, np.broadcast_to(mask, values.shape))).tolist()


def normalised(features: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Each feature of f64[G, K], scaled to [0, 1] between its least and its largest value in the group, f64[G, K].

    `mask` bool[G] is of the attempts that count. A feature that is the same in all of these is 0: it says nothing. So
    is an attempt that does not count, which changes no minimum and no maximum.
    """
    check_arrays(features[..., 0], mask, types=[float, bool], rank=1)
    if not mask.any():
        return np.zeros_like(features)
    low, high = features[mask].min(axis=0), features[mask].max(axis=0)
    span = np.where(high > low, high - low, 1.0)
    return np.where(mask[:, None] & (high > low), (features - low) / span, 0.0)


def preferred(features: np.ndarray, weights: np.ndarray, correct: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """R = normalised features . weights where the attempt is correct, else 0: f64[G].

    "ToolOrchestra" (Su et al., arXiv 2511.21689), the section on rewards: the vector of an attempt is its outcome, its
    cost and its latency (both negative, so that less is more) and how often it used each tool; the weights are the
    user's preferences. Its published code gives cost and latency a plus in the last step, by which more is better;
    this is the paper's. Features f64[G, K], weights f64[K] of them, and bool[G]: correct, and attempts that count.
    """
    check_arrays(features[0], weights, types=float, rank=1)
    check_arrays(features[..., 0], correct, mask, types=[float, bool, bool], rank=1)
    return np.where(correct & mask, normalised(features, mask) @ weights, 0.0)


def weights_of(preferences: Any, task: str) -> dict[str, float]:
    """A task's preferences, in the order of their names.

    Raises:
      ConfigError: no object of finite numbers, or an empty one; names the task.
    """
    fine = isinstance(preferences, Mapping) and preferences
    for name, weight in preferences.items() if fine else ():
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        fine = fine and isinstance(name, str) and number and math.isfinite(weight)
    if not fine:
        raise ConfigError(
            f"task '{task}': metadata.{PREFERENCES} must be an object of numbers by name (accuracy, cost, latency, "
            f"tools, experts), got {preferences!r:.200}."
        )
    return {name: float(preferences[name]) for name in sorted(preferences)}


@dataclasses.dataclass(frozen=True)
class OutcomeModel:
    """What a model says of an episode takes the place of the environment's check, and is opened with it.

    WebRL (arXiv 2411.02337): 1 where its probability of success is 0.5 or more, else 0. See runs/outcomes.py.
    """

    folder: str = ""  # of the stage "outcome_model", or of a language model that answers YES or NO; "" = this run's own
    tokens: PositiveInt = 16384  # of a language model's prompt at most, of which the end is kept; WebRL's code

    def __call__(self, group: Group) -> Sequence[float]:
        """One reward per episode."""
        raise NotImplementedError("opened by the stage that it rewards")


GROUP_REWARDS: dict[str, type] = {"preferences": Preferences, "gdpo": Decoupled, "outcome_model": OutcomeModel}


def _looked_up(values: Mapping[str, float], name: str, where: str, task: str) -> float:
    if name not in values:
        raise ConfigError(
            f"rl.group_reward, task '{task}': the environment's {where} have no '{name}', which a weight is for."
        )
    return float(values[name])
