"""Finished groups -> the numbers a person watches: rewards, scores by kind, stop reasons, lengths, turns, failures.

Means are over episodes that did not fail; failures are counted beside them, never averaged in as zeros. The mean of
nothing is None, `null` in files.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn, Self

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.rollout.workers import ENOUGH
from jaxagent.types import Episode, Group, StopReason


def episode_metrics(groups: Sequence[Group]) -> dict[str, float | None]:
    """Means over the episodes of one rollout batch, with counts of stop reasons as fractions of all episodes."""
    every = [episode for group in groups for episode in group.episodes]
    valid = [episode for episode in every if not episode.stop_reason.is_failure]
    metrics = {f"stop/{reason}": mean(e.stop_reason == reason for e in every) for reason in StopReason}
    metrics |= {
        "reward/mean": mean(e.total_reward for e in valid),
        "episode/turns": mean(e.turns for e in valid),
        "episode/tokens": mean(sum(map(len, e.trajectories)) for e in valid),
        "episode/count": float(len(every)),
    }
    for name in sorted({name for e in valid for name in e.rewards}):
        metrics[f"reward/{name}"] = mean(e.rewards[name] for e in valid if name in e.rewards)
    for name in sorted({name for e in valid for name in e.metrics}):
        metrics[f"episode/{name}"] = mean(e.metrics[name] for e in valid if name in e.metrics)
    return metrics


def by_kind(episodes: Iterable[Episode], score: str) -> dict[str, float | None]:
    """Means of a component of the verdict, such as "em" or "solved": over all, per family of kinds and per kind.

    Returns:
      {"em": ..., "em_one_hop": ..., "em/one_hop/capital": ...}; failed episodes are left out and counted in "failed".
      None where all failed.
    """
    episodes = list(episodes)
    valid = [e for e in episodes if not e.stop_reason.is_failure]
    out = {score: mean(component(e.rewards, score) for e in valid), "failed": float(len(episodes) - len(valid))}
    families: dict[str, list[float]] = {}
    for episode in episodes:
        family, _, rest = episode.task.kind.partition("/")
        names = [f"{score}_{family}", f"{score}/{episode.task.kind}"] if rest else [f"{score}_{family}"]
        for name in names if family else []:
            values = families.setdefault(name, [])
            if not episode.stop_reason.is_failure:
                values.append(component(episode.rewards, score))
    return out | {name: mean(values) for name, values in sorted(families.items())}


def component(rewards: Mapping[str, float], score: str) -> float:
    """The component of a verdict that is the environment's score.

    Raises:
      ConfigError: it has none of this name.
    """
    if score not in rewards:
        raise ConfigError(
            f"config.env has the score '{score}', and its verdicts have {', '.join(rewards) or 'no components'}: "
            "verify() must give it, or the class name another one (score = ...)."
        )
    return rewards[score]


def action_tokens(groups: Sequence[Group]) -> int:
    """Sampled tokens of all groups."""
    return sum(int(t.action_mask.sum()) for g in groups for e in g.episodes for t in e.trajectories)


def mean(values: Iterable[float]) -> float | None:
    """The mean of numbers; None of no numbers."""
    values = list(values)
    return float(np.mean(values)) if values else None


@dataclasses.dataclass(frozen=True)
class Failures:
    """Attempts that an early stop cancelled, because enough groups were complete, are not counted at all."""

    failed: int
    played: int
    reason: str = ""  # "env_error: ConnectionError: ...", the most frequent, of equally frequent ones the first

    @classmethod
    def of(cls, episodes: Iterable[Episode]) -> Self:
        """Counts the failures among episodes."""
        played = [e for e in episodes if not (e.stop_reason is StopReason.CANCELLED and e.error == ENOUGH)]
        reasons = collections.Counter(f"{e.stop_reason}: {e.error}" for e in played if e.stop_reason.is_failure)
        return cls(reasons.total(), len(played), next((reason for reason, _ in reasons.most_common(1)), ""))

    @property
    def all(self) -> bool:
        """Whether every episode failed, so that nothing was measured."""
        return 0 < self.played == self.failed

    def __str__(self) -> str:
        return f"{self.failed} of {self.played} episodes failed: {self.reason}"


class FailedEpisodes:
    """One run's.

    Args:
      max_steps: `env.max_failed_steps`.
      results: of the run, for the summary: "failed_episodes" gets counts by place, "first_failure" place and reason.
      note: prints a line.

    Attributes:
      stuck: why the run is to save and end; "" while it is not.
    """

    def __init__(self, max_steps: int, results: MutableMapping[str, Any], note: Callable[[str], None]):
        self.stuck = ""
        self._max_steps = max_steps
        self._results = results
        self._note = note
        self._told: set[tuple[str, str]] = set()
        self._in_a_row = 0  # steps of this process: who has mended the cause begins anew

    def tell(self, where: str, step: int, failures: Failures) -> None:
        """Counts failed episodes, and prints a line for every kind of failure that has none yet.

        Args:
          where: "rl", "rl.eval", "warm_start.gate", ...
          step: when it was.
          failures: of one batch of episodes.
        """
        if not failures.failed:
            return
        counts = self._results.get("failed_episodes", {})
        self._results["failed_episodes"] = {**counts, where: counts.get(where, 0) + failures.failed}
        self._results.setdefault("first_failure", f"{where}, step {step}: {failures.reason}")
        # Numbers in a reason (a port, a length, seconds) make it no other one; that everything fails does.
        kind = (where, f"{failures.all} {re.sub('[0-9]+', '#', failures.reason)}")
        if kind not in self._told:
            self._told.add(kind)
            self._note(f"{where}, step {step}: {failures}")

    def tell_step(self, where: str, step: int, failures: Failures) -> None:
        """`tell`, of the episodes of a step. Step after step without one that counts, the run is `stuck`."""
        self.tell(where, step, failures)
        if failures.played:
            self._in_a_row = self._in_a_row + 1 if failures.all else 0
        if 0 < self._max_steps <= self._in_a_row:
            steps = "1 step" if self._in_a_row == 1 else f"{self._in_a_row} steps in a row"
            self.stuck = f"stopped and saved after {steps} without an episode that counts ({where}, step {step}): "
            self.stuck += str(failures)


def end(reason: str) -> NoReturn:
    """Ends the process with exit code 1 and one line on stderr."""
    raise SystemExit(f"error: {reason.rstrip('.')}. Mend this and run the same command to continue.")
