"""The rollouts of one RL step: tasks -> rollout workers <-> engine -> groups, under the configured strategies.

Which groups are trained on may differ from which were played (dynamic sampling, filters, early stop); metrics and
success statistics are of all that were played.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxagent.algorithms.streams import shaped
from jaxagent.config import RLConfig
from jaxagent.engine.driver import Driver
from jaxagent.rollout import early_stop, selection, strategies
from jaxagent.rollout.experience import Experience
from jaxagent.rollout.failures import Failures
from jaxagent.rollout.statistics import action_tokens, episode_metrics
from jaxagent.rollout.workers import STOP_TIMEOUT_S, group_deadline_s
from jaxagent.runs.attempts import first, numbered_on, of_a_group, of_step, temperature
from jaxagent.runs.evaluation.held_out import deadline_s
from jaxagent.runs.parts import Parts
from jaxagent.runs.seams import Rollouts
from jaxagent.types import Group, Task

PlayRound = Callable[[int, list[Task]], list[Group]]  # (round, tasks) -> their groups, as they were played


def collect(parts: Parts, driver: Driver, experience: Experience, step: int, steps_before: int = 0) -> Rollouts:
    """The rollouts of one step, played now.

    Attempts are numbered over the run, in which an earlier stage took `steps_before` steps: no two share randomness.
    """
    rl = parts.cfg.rl
    over = rl.oversample
    attempts, rollout = of_a_group(rl), of_step(parts, driver, step)
    before = driver.stats()

    def play(number: int, tasks: list[Task]) -> list[Group]:
        """Round `number` of the step; more than one with dynamic sampling."""
        tasks = [dataclasses.replace(task) for task in tasks]
        begin, each_step = first(rl, step, number, steps_before), first(rl, 1, 0, 0)
        attempt = numbered_on(rollout, begin, tasks, experience.num_tasks, each_step)
        if over is None:
            deadline = group_deadline_s(attempts, parts.cfg.concurrent_episodes, parts.cfg.env.episode_timeout_s)
            return parts.workers.collect(tasks, attempts, attempt, deadline)
        deadline = deadline_s(parts, len(tasks) * attempts)
        enough = len(tasks) - over.extra_tasks
        groups = early_stop.run_until_enough(
            tasks, attempts, rl.group_size, enough, attempt, parts.cfg.concurrent_episodes, deadline
        )
        return parts.workers.run(groups, deadline + STOP_TIMEOUT_S)

    played = assembled(rl, experience, step, play)
    engine = {f"engine/{k}": v - before.get(k, 0.0) for k, v in driver.stats().items()}
    return dataclasses.replace(played, metrics=played.metrics | engine)


def assembled(rl: RLConfig, experience: Experience, step: int, play: PlayRound) -> Rollouts:
    """The rollouts of one step, of groups that `play` plays, or has from where they were kept.

    All that follows from the groups is decided here, the same wherever they come from: rewards that compare a group's
    attempts, dynamic sampling's further rounds, which groups are learnt from, and the metrics.
    """
    over, more = rl.oversample, dict[str, float]()
    rounds: list[list[Group]] = []

    def shaped_round(number: int, wanted: int) -> list[Group]:
        groups = play(number, experience.take(wanted + (over.extra_tasks if over else 0), step, number))
        rounds.append(groups)
        if over is None:
            return [shaped(group, rl) for group in groups]
        kept = early_stop.usable(groups, over.min_group, wanted)
        for name, count in early_stop.oversample_metrics(groups, rl.group_size, kept).items():
            more[name] = more.get(name, 0.0) + count
        return [shaped(group, rl) for group in kept]

    chosen = selection.refill(shaped_round, rl.tasks_per_step, rl.refill)
    return rollouts(rl, step, chosen, rounds, more)


def rollouts(
    rl: RLConfig, step: int, chosen: selection.Selection, rounds: list[list[Group]], more: dict[str, float]
) -> Rollouts:
    """What a step trains on, whoever has played it, with its metrics.

    Args:
      rl: the run's.
      step: of the stage.
      chosen: shaped groups.
      rounds: all groups as they were played, round by round.
      more: metrics of the playing.
    """
    chosen = dataclasses.replace(chosen, groups=selection.most_varied(chosen.groups, rl.keep_groups_frac))
    metrics = episode_metrics(chosen.played) | more
    if strategies.selects(rl):
        metrics |= selection.selection_metrics(chosen)
    if rl.temperature is not None:
        metrics["sampling/temperature"] = temperature(rl, step)
    metrics["rollout/action_tokens"] = float(action_tokens(chosen.played))
    failures = Failures.of(episode for groups in rounds for group in groups for episode in group.episodes)
    return Rollouts(chosen, metrics, failures, rounds)
