"""Which number an attempt has in the run and how it is sampled: functions of settings, step and round, and of no clock.

Whoever plays an attempt, in the training process or in another one, comes to the same tokens by these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxagent.config import RLConfig, SamplingConfig
from jaxagent.engine.driver import Driver
from jaxagent.rollout import schedule
from jaxagent.rollout.workers import Rollout
from jaxagent.runs.parts import Parts
from jaxagent.types import Episode, Task


def of_a_group(rl: RLConfig) -> int:
    """Attempts that are begun at each task."""
    return rl.group_size + (rl.oversample.extra_attempts if rl.oversample else 0)


def first(rl: RLConfig, step: int, number: int, steps_before: int) -> int:
    """The first attempt's number in round `number` of a step: no two steps, stages or rounds share randomness.

    Args:
      rl: the run's.
      step: of the stage.
      number: of the round; more than 0 with dynamic sampling.
      steps_before: steps of an earlier stage that samples in the same way.
    """
    rounds = rl.refill.max_rounds if rl.refill else 1
    return ((steps_before + step) * rounds + number) * of_a_group(rl)


def temperature(rl: RLConfig, step: int) -> float:
    """What a step's attempts are sampled at, and scored with."""
    return schedule.temperature(rl.temperature, rl.sampling.temperature, step, rl.steps)


def sampling(rl: RLConfig, step: int) -> SamplingConfig:
    """The distribution that a step's attempts are sampled from."""
    return dataclasses.replace(rl.sampling, temperature=temperature(rl, step))


def of_step(parts: Parts, driver: Driver, step: int) -> Rollout:
    """Plays a step's attempts, by their numbers in the run."""
    rl = parts.cfg.rl
    return parts.rollout(driver, sampling(rl, step), of_a_group(rl), rl.tool_epsilon)


def ahead(place: int, tasks: int, attempts: int) -> int:
    """How much further the attempts of a round's group are numbered: where a round has more groups than there are
    tasks, each task comes again after `tasks` places, and its attempts are no copies of the earlier ones.

    Args:
      place: of the group in its round.
      tasks: that there are.
      attempts: that a step begins at each.
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
