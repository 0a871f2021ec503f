"""The rollouts of one RL step: which numbers its attempts have, how they are sampled, and how groups are collected.

Numbers and sampling are functions of settings, step and round, and of no clock: whoever plays an attempt, in the
training process or in another one, comes to the same tokens by them. Which groups are trained on may differ from which
were played (dynamic sampling, filters, early stop); metrics and success statistics are of all that were played.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxagent.algorithms.streams import shaped
from jaxagent.config import RLConfig, SamplingConfig
from jaxagent.engine.driver import Driver
from jaxagent.rollout.branching import Branched
from jaxagent.rollout.experience import Experience
from jaxagent.rollout.groups import (
    Failures,
    Selection,
    action_tokens,
    episode_metrics,
    fork_metrics,
    keep_most_varied,
    oversample_metrics,
    refill,
    selection_metrics,
    selects,
    usable,
)
from jaxagent.rollout.workers import STOP_TIMEOUT_S, Rollout, batch_deadline_s, group_deadline_s, run_until_enough
from jaxagent.runs.parts import Parts
from jaxagent.types import Episode, Group, Task

NONE: Mapping[tuple[str, int], Episode] = types.MappingProxyType({})


def of_a_group(rl: RLConfig) -> int:
    """Attempts that are begun at each task."""
    return rl.group_size + (rl.oversample.extra_attempts if rl.oversample else 0)


def first(rl: RLConfig, step: int, number: int, steps_before: int) -> int:
    """The first attempt's number in round `number` of a step: no two steps, stages or rounds share randomness."""
    rounds = rl.refill.max_rounds if rl.refill else 1
    return ((steps_before + step) * rounds + number) * of_a_group(rl)


def temperature(rl: RLConfig, step: int) -> float:
    """What a step's attempts are sampled at, and scored with: `rl.sampling.temperature`, or on a schedule from there.

    On a schedule `rl.temperature.final` in the last step. Rounded to f32: engine and trainer divide by the same number.

      linear  start + (final - start) x,   cosine  final + (start - final) (1 + cos(pi x)) / 2,   x = step / (steps - 1)
    """
    cfg, start = rl.temperature, rl.sampling.temperature
    if cfg is None:
        return start  # as it stands in the config
    x = min(step / max(rl.steps - 1, 1), 1.0)
    if cfg.schedule == "linear":
        value = start + (cfg.final - start) * x
    else:
        value = cfg.final + (start - cfg.final) * 0.5 * (1.0 + math.cos(math.pi * x))
    return float(np.float32(value))


def sampling(rl: RLConfig, step: int) -> SamplingConfig:
    """The distribution that a step's attempts are sampled from."""
    return dataclasses.replace(rl.sampling, temperature=temperature(rl, step))


def of_step(parts: Parts, driver: Driver, step: int, failed: Mapping[tuple[str, int], Episode] = NONE) -> Rollout:
    """Plays a step's attempts, by their numbers in the run; `failed`: those from which no fork may go on."""
    rl = parts.cfg.rl
    rollout = parts.rollout(driver, sampling(rl, step), of_a_group(rl), rl.tool_epsilon)
    return rollout if rl.branching is None else Branched(rollout, rl.branching, parts.cfg.seed, failed)


def ahead(place: int, tasks: int, attempts: int) -> int:
    """How much further the attempts of a round's group are numbered: where a round has more groups than there are
    tasks, each task comes again after `tasks` places, and its attempts are no copies of the earlier ones.
    """
    return place // tasks * attempts * 2**32  # more than any run has


def numbered(play: Rollout, first_attempt: int) -> Rollout:
    """Plays the attempts of a group, numbered from 0 within it."""

    async def attempt(task: Task, sample: int) -> Episode:
        return await play(task, first_attempt + sample)

    return attempt


def numbered_on(play: Rollout, first_attempt: int, groups: Sequence[Task], tasks: int, attempts: int) -> Rollout:
    """The same for all groups of a round. `groups` must be different objects, also where they are equal."""
    begins = {id(task): first_attempt + ahead(place, tasks, attempts) for place, task in enumerate(groups)}

    async def attempt(task: Task, sample: int) -> Episode:
        return await play(task, begins[id(task)] + sample)

    return attempt


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What a step trains on."""

    chosen: Selection
    metrics: dict[str, float | None]
    failures: Failures  # of all that was begun, also in groups that are dropped
    rounds: Sequence[Sequence[Group]]  # all that was begun, as it was played: what the run's record keeps


PlayRound = Callable[[int, list[Task]], list[Group]]  # (round, tasks) -> their groups, as they were played


def collect(parts: Parts, driver: Driver, experience: Experience, step: int, steps_before: int = 0) -> Rollouts:
    """The rollouts of one step, played now.

    Attempts are numbered over the run, in which an earlier stage took `steps_before` steps: no two share randomness.
    """
    rl, at_once, timeout_s = parts.cfg.rl, parts.cfg.concurrent_episodes, parts.cfg.env.episode_timeout_s
    over = rl.oversample
    attempts, rollout = of_a_group(rl), of_step(parts, driver, step)
    deadline_s = group_deadline_s(attempts, at_once, timeout_s, rl.branching.rounds(attempts) if rl.branching else 1)
    before = driver.stats()

    def play(number: int, tasks: list[Task]) -> list[Group]:
        """Round `number` of the step; more than one with dynamic sampling."""
        tasks = [dataclasses.replace(task) for task in tasks]
        begin, each_step = first(rl, step, number, steps_before), first(rl, 1, 0, 0)
        attempt = numbered_on(rollout, begin, tasks, experience.num_tasks, each_step)
        if over is None:
            return parts.workers.collect(tasks, attempts, attempt, deadline_s)
        deadline, enough = batch_deadline_s(len(tasks) * attempts, at_once, timeout_s), len(tasks) - over.extra_tasks
        groups = run_until_enough(tasks, attempts, rl.group_size, enough, attempt, at_once, deadline)
        return parts.workers.run(groups, deadline + STOP_TIMEOUT_S)

    step_rollouts = rollouts_of_step(rl, experience, step, play)
    engine = {f"engine/{k}": v - before.get(k, 0.0) for k, v in driver.stats().items()}
    return dataclasses.replace(step_rollouts, metrics=step_rollouts.metrics | engine)


def rollouts_of_step(rl: RLConfig, experience: Experience, step: int, play: PlayRound) -> Rollouts:
    """The rollouts of one step, of groups that `play` plays, or has from where they were kept.

    All that follows from the groups is decided here, the same wherever they come from: rewards that compare a group's
    attempts, dynamic sampling's further rounds, which groups are learnt from, and the metrics.
    """
    over, more = rl.oversample, dict[str, float]()
    rounds: list[list[Group]] = []

    def shaped_round(number: int, groups_needed: int) -> list[Group]:
        groups = play(number, experience.take(groups_needed + (over.extra_tasks if over else 0), step, number))
        rounds.append(groups)
        if over is None:
            return [shaped(group, rl) for group in groups]
        large_enough = usable(groups, over.min_group, groups_needed)
        for name, count in oversample_metrics(groups, rl.group_size, large_enough).items():
            more[name] = more.get(name, 0.0) + count
        return [shaped(group, rl) for group in large_enough]

    chosen = refill(shaped_round, rl.tasks_per_step, rl.refill)
    return rollouts(rl, step, chosen, rounds, more)


def rollouts(rl: RLConfig, step: int, chosen: Selection, rounds: list[list[Group]], more: dict[str, float]) -> Rollouts:
    """What a step trains on, whoever has played it, with its metrics."""
    chosen = dataclasses.replace(chosen, groups=keep_most_varied(chosen.groups, rl.keep_groups_frac))
    metrics = episode_metrics(chosen.sampled) | more | (fork_metrics(chosen.sampled) if rl.branching else {})
    if selects(rl):
        metrics |= selection_metrics(chosen)
    if rl.temperature is not None:
        metrics["sampling/temperature"] = temperature(rl, step)
    metrics["rollout/action_tokens"] = float(action_tokens(chosen.sampled))
    failures = Failures.of(episode for groups in rounds for group in groups for episode in group.episodes)
    return Rollouts(chosen, metrics, failures, rounds)
