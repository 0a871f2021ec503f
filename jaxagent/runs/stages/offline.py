"""What the stages that learn from data share: their episodes, and the loop over updates of the blind learner.

In: examples (episodes, demonstrations, pairs) and a function that makes them the streams of one update. Out: the
trained policy. Evaluated before and after, and every `eval.every` updates, as RL is.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
import optax

from jaxagent.algorithms.streams import Streams
from jaxagent.config import BatchConfig, ConfigError, OfflineConfig, RLConfig, Stage
from jaxagent.engine.driver import Driver
from jaxagent.learner import forward, programs
from jaxagent.learner.batching import Packer
from jaxagent.learner.state import TrainState, init_state
from jaxagent.learner.update import Update, make_optimizer, make_update
from jaxagent.models.params import Params
from jaxagent.observe import episode_store
from jaxagent.observe.files import EPISODES_FOLDER
from jaxagent.runs.evaluation.held_out import record_evaluation
from jaxagent.runs.parts import Parts
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Episode

Example = TypeVar("Example")
ToStreams = Callable[[TrainState, Sequence[Example]], tuple[list[Streams], dict[str, float]]]


def train(
    parts: Parts,
    workdir: Workdir,
    driver: Driver,
    params: Params,
    stage: Stage,
    cfg: OfflineConfig,
    examples: Sequence[Example],
    prepare: Callable[[Packer, TrainState], ToStreams],
    keep_reference: bool = False,
) -> Params:
    """Runs a stage of `cfg.updates` updates on examples shuffled anew in every epoch.

    Args:
      parts, workdir, driver, params: as every stage gets them.
      stage: its name.
      cfg: its section.
      examples: what it learns from, in a fixed order.
      prepare: packer, state as the stage (re)starts -> the function that makes examples the streams of one update,
        and metrics. Compiles what it needs.
      keep_reference: whether the state keeps the policy that the stage began with.
    """
    packer = packer_of(parts, parts.cfg.rl.batch, programs.action_tokens(parts.cfg))
    gradient_step = optimizer(parts.cfg.rl, cfg)
    with workdir.compiles.warm_up(), jax.set_mesh(parts.mesh):
        update = make_update(forward.policy_forward(parts.spec), gradient_step, parts.mesh)
        state = update.warm_up(init_state(params, gradient_step, keep_reference=keep_reference), packer.empty())
        state = workdir.restored(stage, state)
        driver.update_params(state.params, int(state.step))
        to_streams = prepare(packer, state)
    first = functools.partial(record_evaluation, parts, workdir, driver, stage, 0, {"examples": float(len(examples))})

    def bundle() -> tuple[TrainState, dict]:
        return state, {}

    for step in workdir.steps(stage, cfg.updates, bundle, first=first):
        started = time.monotonic()
        chosen = [examples[i] for i in order(len(examples), cfg.examples, (parts.cfg.seed, step))]
        state, metrics = _step(update, packer, state, *to_streams(state, chosen))
        metrics["time/step_s"] = time.monotonic() - started
        if workdir.evaluates(step + 1, cfg.updates):
            driver.update_params(state.params, int(state.step))
            record_evaluation(parts, workdir, driver, stage, step + 1, metrics)
        else:
            workdir.record(stage, step + 1, metrics)
    return state.params


def _step(
    update: Update, packer: Packer, state: TrainState, streams: list[Streams], metrics: dict[str, float]
) -> tuple[TrainState, dict[str, float]]:
    batches = packer.pack(streams)
    if not batches:  # every weight has underflowed: there is no gradient
        return state, metrics
    state, of_update = update(state, batches)
    names = ("loss/total", "policy/grad_norm")
    return state, metrics | {name: of_update[name] for name in names}


def packer_of(parts: Parts, batch: BatchConfig, targets: int) -> Packer:
    """Packs sequences with at most so many targets each, by the sizes of `batch`."""
    share = programs.sharing(parts.cfg, batch, parts.spec)
    return Packer(batch, targets, parts.row_shards, share, parts.cfg.mesh.context)


def optimizer(rl: RLConfig, cfg: OfflineConfig) -> optax.GradientTransformation:
    """RL's optimiser with the stage's learning rate and number of updates."""
    return make_optimizer(dataclasses.replace(rl.optimizer, learning_rate=cfg.learning_rate), cfg.updates)


def order(count: int, size: int, at: tuple[int, int]) -> list[int]:
    """Which examples the update number `at[1]` takes: `size` of an endless sequence of permutations of `count`."""
    seed, step = at
    positions = range(step * size, (step + 1) * size)
    epochs = {p // count for p in positions}
    permutations = {epoch: np.random.default_rng([seed, epoch]).permutation(count) for epoch in epochs}
    return [int(permutations[p // count][p % count]) for p in positions]


def read_episodes(parts: Parts, workdir: Workdir, path: str) -> list[Episode]:
    """The logged episodes that a config names, or this run's own; says how many lines were dropped."""
    episodes, dropped = episode_store.read(Path(path) if path else Path(parts.cfg.workdir) / EPISODES_FOLDER)
    vocab = parts.tokenizer.vocab_size
    largest = max((int(t.tokens.max(initial=0)) for e in episodes for t in e.trajectories), default=0)
    if largest >= vocab:
        raise ConfigError(f"Logged episodes hold token {largest}, the tokenizer has {vocab}: they are of another one.")
    if dropped:
        workdir.progress.note(f"logged episodes: {dropped} unfinished last line(s) left out")
    return episodes


def check(parts: Parts, stage: Stage) -> None:
    """What can be known of a stage that learns from logged episodes before it begins.

    Raises:
      ConfigError: no logged episodes, and no stage before this one that logs some.
    """
    stages, episodes = parts.cfg.stages, getattr(parts.cfg, stage).episodes
    before = stages[: stages.index(stage)]
    logs = "sample" in before or (parts.cfg.kept_episodes.learn and ("rl" in before or "opd" in before))
    if episodes or not logs:
        episode_store.read(Path(episodes) if episodes else Path(parts.cfg.workdir) / EPISODES_FOLDER)
