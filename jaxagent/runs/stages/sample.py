"""Attempts of the current policy at training tasks, logged and not trained on: data for stages that learn from it."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from jaxagent.data.sources import TaskIterator
from jaxagent.engine.driver import Driver
from jaxagent.learner.state import TrainState
from jaxagent.models.params import Params
from jaxagent.rollout.groups import Failures, episode_metrics
from jaxagent.rollout.workers import group_deadline_s
from jaxagent.runs.attempts import numbered_on
from jaxagent.runs.parts import Parts
from jaxagent.runs.workdir import Workdir

SAMPLE = "sample"


def run(parts: Parts, workdir: Workdir, driver: Driver, params: Params) -> Params:
    """Logs `sample.steps` times `tasks_per_step` times `attempts` episodes; returns the policy as it came."""
    cfg = parts.cfg.sample
    tasks = TaskIterator(parts.train, parts.cfg.seed, shuffle=True)
    with workdir.compiles.warm_up(), jax.set_mesh(parts.mesh):
        state = TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=())
    state = workdir.restored(SAMPLE, state)
    if workdir.resumes(SAMPLE):
        tasks.set_state(workdir.host["tasks"])
    driver.update_params(state.params, 0)
    deadline = group_deadline_s(cfg.attempts, parts.cfg.concurrent_episodes, parts.cfg.env.episode_timeout_s)
    play = parts.rollout(driver, parts.cfg.rl.sampling, cfg.attempts)
    for step in workdir.steps(SAMPLE, cfg.steps, lambda: (state, tasks.get_state())):
        started, chosen = time.monotonic(), tasks.take(cfg.tasks_per_step)
        # Numbered over the stage: no two share randomness.
        attempt = numbered_on(play, step * cfg.attempts, chosen, len(parts.train), cfg.attempts)
        groups = parts.workers.collect(chosen, cfg.attempts, attempt, deadline)
        driver.check()  # else every attempt of a dead engine would count as sampled
        episodes = [episode for group in groups for episode in group.episodes]
        workdir.logs.keep(SAMPLE, step, episodes)
        workdir.failed.tell_step(SAMPLE, step + 1, Failures.of(episodes))
        workdir.record(SAMPLE, step + 1, episode_metrics(groups) | {"time/step_s": time.monotonic() - started})
    return state.params
