"""Finished groups -> the numbers a person watches: rewards, scores by kind, stop reasons, lengths, turns.

Means are over episodes that did not fail; failures are counted beside them, never averaged in as zeros. The mean of
nothing is None, `null` in files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxagent.config import ConfigError
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
