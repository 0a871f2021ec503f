"""Which groups are learnt from: DAPO's dynamic sampling and RAGEN's filter of groups. Groups in, groups out.

Decisions go by the order of tasks and by rewards, never by which group finished first, so that a run has the same
groups whatever the concurrency.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxagent.algorithms.advantages import zero_signal
from jaxagent.algorithms.streams import rewards
from jaxagent.config import RefillConfig
from jaxagent.types import Group


@dataclasses.dataclass(frozen=True)
class Selection:
    """The rollouts of one step."""

    groups: list[Group]  # to learn from, in the order of tasks
    played: list[Group]  # all that were sampled, in the order of tasks: what statistics are taken of
    rounds: int


def refill(play: Callable[[int, int], list[Group]], wanted: int, cfg: RefillConfig | None) -> Selection:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): rounds of new tasks until enough groups have signal.

    Without, one round is played, and what was played is what is learnt from. With it, groups whose counted rewards are
    all equal are left out; a round plays `tasks_per_round` tasks, or as many as are missing where that is 0. The first
    `wanted` groups with signal are kept. After `max_rounds` rounds the step goes on with as many as there are.

    Args:
      play: (round, tasks) -> their groups, in task order.
      wanted: groups to learn from.
      cfg: the bound; None: without.
    """
    if cfg is None:
        groups = play(0, wanted)
        return Selection(groups, groups, 1)
    played: list[Group] = []
    kept: list[Group] = []
    number = 0
    while len(kept) < wanted and number < cfg.max_rounds:
        groups = play(number, cfg.tasks_per_round or wanted - len(kept))
        played += groups
        kept += [group for group, live in zip(groups, signal(groups), strict=True) if live]
        number += 1
    return Selection(kept[:wanted], played, number)


def signal(groups: Sequence[Group]) -> np.ndarray:
    """bool[N]: groups whose counted rewards are not all equal."""
    return ~zero_signal(*rewards(groups)) if groups else np.zeros(0, bool)


def most_varied(groups: Sequence[Group], frac: float) -> list[Group]:
    """StarPO-S (RAGEN, arXiv 2504.20073, section 3.3): the top fraction of groups by the std of their rewards.

    floor(frac * N) groups, one at least, in their order; among equals the earlier. The std is the unbiased one of the
    attempts that count, so that partial groups compare with whole ones; 0 for fewer than two.
    """
    if frac >= 1 or not groups:
        return list(groups)
    spread = [reward_std(group) for group in groups]
    count = max(1, math.floor(frac * len(groups) + 1e-9))
    best = sorted(range(len(groups)), key=lambda i: (-spread[i], i))[:count]
    return [groups[i] for i in sorted(best)]


def reward_std(group: Group) -> float:
    """Unbiased standard deviation of a group's counted rewards."""
    values = [episode.total_reward for episode in group.valid]
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def selection_metrics(selection: Selection) -> dict[str, float]:
    """Counts of one step: what was sampled, what was left out and why."""
    live = int(np.sum(signal(selection.played)))
    return {
        "sampling/rounds": float(selection.rounds),
        "sampling/groups_played": float(len(selection.played)),
        "sampling/groups_without_signal": float(len(selection.played) - live),
        "sampling/groups_trained": float(len(selection.groups)),
    }
