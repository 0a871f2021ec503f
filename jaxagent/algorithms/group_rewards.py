"""What `rl.group_reward` can name: rewards that compare the attempts of a group, made before anything is learnt.

The environment judges an attempt alone, and some things cannot be judged so: how cheap an attempt was means something
only beside the others at its task. An entry is called with a finished group and gives one reward per episode;
`shaped` puts them into the episodes, so that all that comes after (groups without signal, advantages, logs, metrics)
sees these rewards and no others. Evaluations keep the environment's.
No jax before an entry is called: a config is read without it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxagent import contract
from jaxagent.config import ConfigError, RLConfig
from jaxagent.config.ranges import FiniteFloat
from jaxagent.types import Group, StopReason

PREFERENCES = "preferences"  # of a task's metadata: feature -> weight


@dataclasses.dataclass(frozen=True)
class Preferences:
    """ToolOrchestra's: outcome, cost, latency and use of tools, each compared inside the group, weighted by the user.

    A task has weights of its own in metadata["preferences"]: {"accuracy": 1, "cost": 0.5, "search": -0.2}, of these
    three and of whatever its environment counts as "calls_NAME". The weights here hold where a task has none, and no
    tool has one then. The environment must count "cost" and "latency_s".

    Attributes:
      weighs: the counters that the weights here are for.
    """

    weighs: ClassVar[Sequence[str]] = ("cost", "latency_s")

    accuracy: FiniteFloat = 1.0
    cost: FiniteFloat = 0.5
    latency: FiniteFloat = 0.1
    score: str = "solved"  # the verdict's component that is the outcome; 1 is correct

    def __call__(self, group: Group) -> Sequence[float]:
        """One reward per episode; 0 of an episode that failed, as everywhere.

        Raises:
          ConfigError: the environment's verdict or counters lack what a weight is for.
        """
        import numpy as np

        from jaxagent.algorithms.preferences import preferred

        given = group.task.metadata.get(PREFERENCES)
        weights = weights_of(given, group.task.id) if given is not None else self.weights
        mask = np.array([not episode.stop_reason.is_failure for episode in group.episodes], bool)
        features, correct = np.zeros((len(mask), len(weights))), np.zeros(len(mask), bool)
        for row in np.flatnonzero(mask).tolist():
            episode, counters, task = group.episodes[row], group.episodes[row].metrics, group.task.id
            outcome = _looked_up(episode.rewards, self.score, "verdict", task)
            correct[row] = outcome >= 1.0
            known = {"accuracy": outcome}
            for name, counter in (("cost", "cost"), ("latency", "latency_s")):
                known[name] = -_looked_up(counters, counter, "counters", task) if name in weights else 0.0
            features[row] = [
                known[name] if name in known else _looked_up(counters, f"calls_{name}", "counters", task)
                for name in weights
            ]
        return preferred(features, np.array(list(weights.values())), correct, mask).tolist()

    @property
    def weights(self) -> Mapping[str, float]:
        """Those of a task that has none."""
        return {"accuracy": self.accuracy, "cost": self.cost, "latency": self.latency}


def weights_of(given: Any, task: str) -> dict[str, float]:
    """A task's preferences, in the order of their names.

    Raises:
      ConfigError: no object of finite numbers, or an empty one; names the task.
    """
    fine = isinstance(given, Mapping) and given
    for name, weight in given.items() if fine else ():
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        fine = fine and isinstance(name, str) and number and math.isfinite(weight)
    if not fine:
        raise ConfigError(
            f"task '{task}': metadata.{PREFERENCES} must be an object of numbers by name (accuracy, cost, latency, "
            f"tools, experts), got {given!r:.200}."
        )
    return {name: float(given[name]) for name in sorted(given)}


GROUP_REWARDS: dict[str, type] = {"preferences": Preferences}


def shaped(group: Group, rl: RLConfig) -> Group:
    """The group with the rewards that `rl.group_reward` gives, scaled where an attempt ran out of tokens.

    `rl.shaping.truncated_factor` is ProRL's and ToolOrchestra's stop_properly_penalty. A negative reward stays as
    it is: scaled, it would be a prize for running out of tokens.
    """
    given = [episode.reward for episode in group.episodes]
    if rl.group_reward is not None:
        given = _given(rl.group_reward, group)
    if rl.shaping is not None:
        cut = [episode.stop_reason is StopReason.TOKEN_LIMIT for episode in group.episodes]
        factor = rl.shaping.truncated_factor
        given = [min(r, r * factor) if short else r for r, short in zip(given, cut, strict=True)]
    episodes = [
        episode if episode.stop_reason.is_failure else dataclasses.replace(episode, reward=float(reward))
        for episode, reward in zip(group.episodes, given, strict=True)
    ]
    return dataclasses.replace(group, episodes=episodes)


def _given(reward: Any, group: Group) -> list[float]:
    """What a group reward says of each episode. Raises ConfigError where that is no finite number for each."""
    answer = contract.call(reward, group)
    listed = answer.tolist() if getattr(answer, "ndim", 0) == 1 else answer
    if not isinstance(listed, (list, tuple)) or len(listed) != len(group.episodes):
        came = (
            f"{len(listed)} rewards" if isinstance(listed, (list, tuple)) else f"rewards {contract.described(answer)}"
        )
        raise contract.wrong(reward, came, f"a list of one per episode of the group, {len(group.episodes)},")
    failed = [episode.stop_reason.is_failure for episode in group.episodes]
    return [0.0 if no else contract.number(reward, r, "a reward") for r, no in zip(listed, failed, strict=True)]


def _looked_up(values: Mapping[str, float], name: str, where: str, task: str) -> float:
    if name not in values:
        raise ConfigError(
            f"rl.group_reward='preferences', task '{task}': the environment's {where} have no '{name}', which a weight "
            "is for."
        )
    return float(values[name])
