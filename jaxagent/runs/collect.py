"""The rollouts of one RL step: tasks -> rollout workers <-> engine -> groups, under the configured strategies.

Which groups are trained on may differ from which were played (dynamic sampling, filters, early stop); metrics and
success statistics are of all that were played.
"""

from __future__ import annotations

import dataclasses

from jaxagent.algorithms.group_rewards import shaped
from jaxagent.config import RLConfig
from jaxagent.engine.driver import Driver
from jaxagent.rollout import early_stop, schedule, selection, strategies
from jaxagent.rollout.experience import Experience
from jaxagent.rollout.failures import Failures
from jaxagent.rollout.statistics import action_tokens, episode_metrics
from jaxagent.rollout.workers import STOP_TIMEOUT_S
from jaxagent.runs.evaluation.held_out import deadline_s
from jaxagent.runs.parts import Parts
from jaxagent.types import Episode, Group, Task


def collect(
    parts: Parts, driver: Driver, experience: Experience, step: int, steps_before: int = 0
) -> tuple[selection.Selection, dict[str, float], Failures]:
    """The rollouts of one step, their metrics, and what failed of all that was begun, also in groups that are dropped.

    Attempts are numbered over the run, in which an earlier stage took `steps_before` steps: no two share randomness.
    """
    rl = parts.cfg.rl
    over, refill = rl.oversample, rl.refill
    attempts = rl.group_size + (over.extra_attempts if over else 0)
    sampling = dataclasses.replace(rl.sampling, temperature=temperature(rl, step))
    rollout = parts.rollout(driver, sampling, attempts, rl.tool_epsilon)
    before, more = driver.stats(), {}
    begun: list[Group] = []

    def play(number: int, wanted: int) -> list[Group]:
        """Round `number` of the step; more than one with dynamic sampling."""
        tasks = experience.take(wanted + (over.extra_tasks if over else 0), step, number)
        first = ((steps_before + step) * (refill.max_rounds if refill else 1) + number) * attempts

        async def attempt(task: Task, sample: int) -> Episode:
            return await rollout(task, first + sample)

        deadline = deadline_s(parts, len(tasks) * attempts)
        if over is None:
            groups = parts.workers.collect(tasks, attempts, attempt, deadline)
            begun.extend(groups)
            return [shaped(group, rl) for group in groups]
        groups = early_stop.run_until_enough(
            tasks, attempts, rl.group_size, wanted, attempt, parts.cfg.concurrent_episodes, deadline
        )
        groups = parts.workers.run(groups, deadline + STOP_TIMEOUT_S)
        begun.extend(groups)
        kept = early_stop.usable(groups, over.min_group, wanted)
        for name, count in early_stop.oversample_metrics(groups, rl.group_size, kept).items():
            more[name] = more.get(name, 0.0) + count
        return [shaped(group, rl) for group in kept]

    chosen = selection.refill(play, rl.tasks_per_step, refill)
    chosen = dataclasses.replace(chosen, groups=selection.most_varied(chosen.groups, rl.keep_groups_frac))
    metrics = episode_metrics(chosen.played) | more
    if strategies.selects(rl):
        metrics |= selection.selection_metrics(chosen)
    if rl.temperature is not None:
        metrics["sampling/temperature"] = sampling.temperature
    metrics |= {f"engine/{k}": v - before.get(k, 0.0) for k, v in driver.stats().items()}
    metrics["rollout/action_tokens"] = float(action_tokens(chosen.played))
    return chosen, metrics, Failures.of(episode for group in begun for episode in group.episodes)


def temperature(rl: RLConfig, step: int) -> float:
    """What a step's attempts are sampled at, and scored with."""
    return schedule.temperature(rl.temperature, rl.sampling.temperature, step, rl.steps)
