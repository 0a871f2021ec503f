"""Which groups are learnt from: DAPO's dynamic sampling, RAGEN's filter of groups, oversampling. Groups in, groups out.

Decisions go by the order of tasks and by rewards, never by which group finished first, so that a run has the same
groups whatever the concurrency; oversampling alone depends on which attempts ended in time. Formulas of the strategies:
docs/algorithms.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxagent.algorithms.advantages import zero_signal
from jaxagent.algorithms.checks import extend
from jaxagent.algorithms.corrections import Importance
from jaxagent.algorithms.estimators import GroupAdvantage, NoReward
from jaxagent.algorithms.streams import rewards
from jaxagent.config import ConfigError, RefillConfig, RLConfig
from jaxagent.data.curriculum import BySuccess
from jaxagent.types import Group, StopReason


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
    chosen: list[Group] = []
    number = 0
    while len(chosen) < wanted and number < cfg.max_rounds:
        groups = play(number, cfg.tasks_per_round or wanted - len(chosen))
        played += groups
        chosen += [group for group, live in zip(groups, signal(groups), strict=True) if live]
        number += 1
    return Selection(chosen[:wanted], played, number)


def signal(groups: Sequence[Group]) -> np.ndarray:
    """bool[N]: groups whose counted rewards are not all equal."""
    return ~zero_signal(*rewards(groups)) if groups else np.zeros(0, bool)


def keep_most_varied(groups: Sequence[Group], frac: float) -> list[Group]:
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


def usable(groups: Sequence[Group], min_group: int, wanted: int) -> list[Group]:
    """The `wanted` groups with most counted attempts, of those with `min_group` or more; in task order.

    Partial groups are used as they are: advantages are of the attempts that count.
    """
    enough = [i for i, group in enumerate(groups) if len(group.valid) >= min_group]
    largest = sorted(enough, key=lambda i: (-len(groups[i].valid), i))[:wanted]
    return [groups[i] for i in sorted(largest)]


def oversample_metrics(groups: Sequence[Group], group_size: int, kept: Sequence[Group]) -> dict[str, float]:
    """Attempts that were cancelled, and groups used with fewer attempts than asked for."""
    cancelled = itertools.chain.from_iterable(group.episodes for group in groups)
    return {
        "sampling/attempts_cancelled": float(sum(e.stop_reason == StopReason.CANCELLED for e in cancelled)),
        "sampling/groups_partial": float(sum(len(group.valid) < group_size for group in kept)),
        "sampling/groups_dropped": float(len(groups) - len(kept)),
    }


def selects(rl: RLConfig) -> bool:
    """Whether some of the groups that were sampled may not be learnt from."""
    return rl.refill is not None or rl.keep_groups_frac < 1 or rl.oversample is not None


def check(rl: RLConfig) -> None:
    """Refuses combinations that cannot work, before any device work.

    Raises:
      ConfigError: naming the fields.
    """
    over = rl.oversample
    if over is not None and not (over.extra_tasks or over.extra_attempts):
        raise ConfigError("rl.oversample must have extra_tasks or extra_attempts, or be none.")
    if over is not None and over.min_group > rl.group_size:
        raise ConfigError(
            f"rl.oversample.min_group must be at most rl.group_size ({rl.group_size}), got {over.min_group}."
        )
    if rl.group_size < 2 and (rl.refill or rl.keep_groups_frac < 1):
        raise ConfigError(
            "rl.refill and rl.keep_groups_frac < 1 need rl.group_size of 2 or more: a group of one has no signal and "
            "no std."
        )
    if rl.curriculum is not None:
        extend(rl.curriculum, "rl.curriculum", BySuccess)
    if rl.replay is not None and rl.replay.use == "policy":
        _check_replayed_policy(rl)


def _check_replayed_policy(rl: RLConfig) -> None:
    advantage = rl.advantage
    if not isinstance(rl.correction, Importance) or not isinstance(advantage, GroupAdvantage):
        raise ConfigError(
            "rl.replay.use='policy' needs rl.correction of 'truncate' or 'mask', since past attempts are another "
            "policy's, and an rl.advantage from groups; else use 'nll'."
        )
    changed = rl.whiten_advantages or advantage.multi_trajectory != "full" or (rl.kl and rl.kl.where != "loss")
    if changed or isinstance(advantage, NoReward):
        raise ConfigError(
            "rl.replay.use='policy' keeps the advantage that rewards give in a group: it needs rl.whiten_advantages="
            "False, rl.advantage.multi_trajectory='full', rl.kl.where='loss' and an advantage other than 'no_reward'."
        )
