"""Finished groups: which of them are learnt from, the numbers that a person watches, and what failed.

Which are learnt from (DAPO's dynamic sampling, RAGEN's filter of groups, oversampling) goes by the order of tasks and
by rewards, never by which group finished first, so that a run has the same groups whatever the concurrency;
oversampling alone depends on which attempts ended in time. Formulas of the strategies: docs/algorithms.md.

Means are over episodes that did not fail; failures are counted beside them, never averaged in as zeros. The mean of
nothing is None, `null` in files.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn, Self

import numpy as np

from jaxagent.algorithms.advantages import zero_signal
from jaxagent.algorithms.checks import extend
from jaxagent.algorithms.corrections import Importance
from jaxagent.algorithms.estimators import GroupAdvantage, NoReward
from jaxagent.algorithms.streams import rewards
from jaxagent.config import ConfigError, RefillConfig, RLConfig
from jaxagent.data.curriculum import BySuccess
from jaxagent.rollout.workers import ENOUGH
from jaxagent.types import Episode, Group, StopReason


@dataclasses.dataclass(frozen=True)
class Selection:
    """The rollouts of one step."""

    groups: list[Group]  # to learn from, in the order of tasks
    sampled: list[Group]  # in the order of tasks; statistics count all of them
    rounds: int


def refill(play: Callable[[int, int], list[Group]], groups_needed: int, cfg: RefillConfig | None) -> Selection:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): rounds of new tasks until enough groups have signal.

    Without, one round is played, and what was played is what is learnt from. With it, groups whose counted rewards are
    all equal are left out; a round plays `tasks_per_round` tasks, or as many as are missing where that is 0. The first
    `groups_needed` groups with signal are kept. After `max_rounds` rounds the step goes on with as many as there are.
    `play`: (round, tasks) -> their groups, in task order.
    """
    if cfg is None:
        groups = play(0, groups_needed)
        return Selection(groups, groups, 1)
    sampled: list[Group] = []
    chosen: list[Group] = []
    number = 0
    while len(chosen) < groups_needed and number < cfg.max_rounds:
        groups = play(number, cfg.tasks_per_round or groups_needed - len(chosen))
        sampled += groups
        chosen += [group for group, live in zip(groups, signal(groups), strict=True) if live]
        number += 1
    return Selection(chosen[:groups_needed], sampled, number)


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
    live = int(np.sum(signal(selection.sampled)))
    return {
        "sampling/rounds": float(selection.rounds),
        "sampling/groups_played": float(len(selection.sampled)),
        "sampling/groups_without_signal": float(len(selection.sampled) - live),
        "sampling/groups_trained": float(len(selection.groups)),
    }


def usable(groups: Sequence[Group], min_group: int, groups_needed: int) -> list[Group]:
    """The `groups_needed` groups with most counted attempts, of those with `min_group` or more; in task order.

    Partial groups are used as they are: advantages are of the attempts that count.
    """
    enough = [i for i, group in enumerate(groups) if len(group.valid) >= min_group]
    largest = sorted(enough, key=lambda i: (-len(groups[i].valid), i))[:groups_needed]
    return [groups[i] for i in sorted(largest)]


def oversample_metrics(groups: Sequence[Group], group_size: int, trained: Sequence[Group]) -> dict[str, float]:
    """Attempts that were cancelled, and groups used with fewer attempts than asked for."""
    cancelled = itertools.chain.from_iterable(group.episodes for group in groups)
    return {
        "sampling/attempts_cancelled": float(sum(e.stop_reason == StopReason.CANCELLED for e in cancelled)),
        "sampling/groups_partial": float(sum(len(group.valid) < group_size for group in trained)),
        "sampling/groups_dropped": float(len(groups) - len(trained)),
    }


def selects(rl: RLConfig) -> bool:
    """Whether some of the groups that were sampled may not be learnt from."""
    return rl.refill is not None or rl.keep_groups_frac < 1 or rl.oversample is not None


def check(rl: RLConfig) -> None:
    """Raises ConfigError for combinations that cannot work, before any device work; it names the fields."""
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
    if rl.phases is not None and (rl.curriculum is not None or rl.staleness):
        raise ConfigError(
            "rl.phases makes a phase's tasks of what the one before it has shown: it needs rl.staleness=0 and "
            "rl.curriculum=none."
        )
    if rl.replay is not None and rl.replay.use == "policy":
        _check_replayed_policy(rl)
    if rl.replay is not None and rl.replay.use == "reference" and not rl.kl_in("objective"):
        raise ConfigError(
            "rl.replay.use='reference' needs an rl.objective that compares with the reference and with nothing else, "
            "such as 'webrl': use 'nll' or 'policy'."
        )


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


def episode_metrics(groups: Sequence[Group]) -> dict[str, float | None]:
    """Means over the episodes of one rollout batch but forks, with counts of stop reasons as fractions of these."""
    every = [episode for group in groups for episode in group.roots.episodes]
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


def fork_metrics(groups: Sequence[Group]) -> dict[str, float | None]:
    """How many forks there are, how they fared, what they copied, and what of it was prefilled again."""
    forks = [e for group in groups for e in group.episodes if e.fork_of is not None]
    valid = [e for e in forks if not e.stop_reason.is_failure]
    late = [e for e in valid if e.forked_at]
    return {
        "forks/count": float(len(forks)),
        "forks/failed": float(len(forks) - len(valid)),
        "forks/from_start": float(len(valid) - len(late)),
        "forks/reward": mean(e.total_reward for e in valid),
        **{f"forks/{name}": mean(e.metrics[name] for e in late) for name in ("copied_tokens", "prefilled_tokens")},
    }


def by_kind(episodes: Iterable[Episode], score: str) -> dict[str, float | None]:
    """Means of a component of the verdict, such as "em" or "solved": over all, per family of kinds and per kind.

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
    """The component of a verdict that is the environment's score. Raises ConfigError where it has none such."""
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
    attempts: int
    reason: str = ""  # "env_error: ConnectionError: ...", the most frequent, of equally frequent ones the first

    @classmethod
    def of(cls, episodes: Iterable[Episode]) -> Self:
        """Counts the failures among episodes."""
        attempts = [e for e in episodes if not (e.stop_reason is StopReason.CANCELLED and e.error == ENOUGH)]
        reasons = collections.Counter(f"{e.stop_reason}: {e.error}" for e in attempts if e.stop_reason.is_failure)
        return cls(reasons.total(), len(attempts), next((reason for reason, _ in reasons.most_common(1)), ""))

    @property
    def all(self) -> bool:
        """Whether every episode failed, so that nothing was measured."""
        return 0 < self.attempts == self.failed

    def __str__(self) -> str:
        return f"{self.failed} of {self.attempts} episodes failed: {self.reason}"


class FailedEpisodes:
    """One run's, which is over after `max_steps` of nothing else (`env.max_failed_steps`); `note` prints a line.

    `results` are of the run, for the summary: "failed_episodes" gets counts by place, "first_failure" place and reason.
    """

    def __init__(self, max_steps: int, results: MutableMapping[str, Any], note: Callable[[str], None]):
        self.stuck = ""  # why the run is to save and end; "" while it is not
        self._max_steps = max_steps
        self._results = results
        self._note = note
        self._told: set[tuple[str, str]] = set()
        self._in_a_row = 0  # steps of this process: who has mended the cause begins anew

    def tell(self, where: str, step: int, failures: Failures) -> None:
        """Counts failed episodes, and prints a line for every kind of failure that has none yet.

        `where`: "rl", "rl.eval", "warm_start.gate", ...
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
        if failures.attempts:
            self._in_a_row = self._in_a_row + 1 if failures.all else 0
        if 0 < self._max_steps <= self._in_a_row:
            steps = "1 step" if self._in_a_row == 1 else f"{self._in_a_row} steps in a row"
            self.stuck = f"stopped and saved after {steps} without an episode that counts ({where}, step {step}): "
            self.stuck += str(failures)


def end(reason: str) -> NoReturn:
    """Ends the process with exit code 1 and one line on stderr."""
    raise SystemExit(f"error: {reason.rstrip('.')}. Mend this and run the same command to continue.")


def largest(before: float | None, now: float | None) -> float | None:
    """The larger one of two numbers that may be missing; what is not a number wins, and stays."""
    given_values = [value for value in (before, now) if value is not None]
    return next((value for value in given_values if math.isnan(value)), max(given_values, default=None))
