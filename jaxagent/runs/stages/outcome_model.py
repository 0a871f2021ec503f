"""Trains a model of episodes' outcomes on logged ones: the policy's weights with the critic's scalar head.

The policy goes on as it came. The model is left in `<workdir>/outcome_model`: a model folder and `value_head.npy`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.algorithms import outcome, supervised
from jaxagent.algorithms.streams import Streams
from jaxagent.algorithms.value_losses import Squared
from jaxagent.config import ConfigError
from jaxagent.engine.driver import Driver
from jaxagent.learner import forward, peers, programs
from jaxagent.learner.loss import Tally
from jaxagent.learner.score import Scorer, value_scorer
from jaxagent.learner.state import Batch, TrainState, init_state
from jaxagent.learner.update import Update, make_trainable
from jaxagent.models import critic as critics
from jaxagent.models import global_arrays
from jaxagent.models.params import Params
from jaxagent.runs.parts import Parts
from jaxagent.runs.stages import offline
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Episode, Group

OUTCOME_MODEL = "outcome_model"


def run(parts: Parts, workdir: Workdir, driver: Driver, params: Params) -> Params:
    """Trains the model, reports held-out accuracy and AUC, and returns the policy as it came."""
    cfg = parts.cfg.outcome_model
    episodes = supervised.distinct(offline.read_episodes(parts, workdir, cfg.episodes))
    training, held_out = outcome.split(episodes, cfg.held_out_frac)
    if not held_out:
        raise ConfigError("outcome_model.held_out_frac leaves no task to measure with.")
    examples = _examples(training, cfg.loss, cfg.min_reward)
    packer = offline.packer_of(parts, parts.cfg.rl.batch, programs.action_tokens(parts.cfg) + 1)
    optimizer = offline.optimizer(parts.cfg.rl, cfg)
    score_value = forward.value_forward(parts.spec)
    with workdir.compiles.warm_up(), jax.set_mesh(parts.mesh):
        trainable = make_trainable(_loss(score_value, cfg.loss), optimizer, _metrics)
        update = Update(parts.mesh, trainable, None, 1, temperature=1.0)
        # The model is what this state trains; the policy stands beside it, for whoever resumes here.
        state = init_state(critics.from_policy(params), optimizer).replace(reference=params)
        state = update.warm_up(state, packer.empty())
        score = value_scorer(score_value, packer, parts.mesh, Squared())
        score.warm_up(state.params)
        state = workdir.restored(OUTCOME_MODEL, state)

    def bundle() -> tuple[TrainState, dict]:
        return state, {}

    for step in workdir.steps(OUTCOME_MODEL, cfg.updates, bundle):
        started = time.monotonic()
        chosen = offline.order(len(examples), cfg.examples, (parts.cfg.seed, step))
        streams = _streams(score, state.params, [examples[i] for i in chosen], cfg.loss, cfg.min_reward)
        state, metrics = update(state, packer.pack(streams))
        metrics["time/step_s"] = time.monotonic() - started
        if step + 1 == cfg.updates:
            measured = _held_out(score, state.params, training, held_out, cfg.loss, cfg.min_reward)
            metrics |= measured
            workdir.results |= measured
        workdir.record(OUTCOME_MODEL, step + 1, metrics)
    folder = Path(parts.cfg.workdir) / OUTCOME_MODEL
    parts.export(state.params.backbone.replace(head=state.reference.head), folder)
    value_head = global_arrays.get(state.params.value_head)
    if peers.is_first():
        np.save(folder / "value_head.npy", value_head)
    return state.reference


def _examples(training: Sequence[Episode], loss: str, min_reward: float) -> Sequence[Any]:
    if loss == "bradley_terry":
        groups: dict[str, list[Episode]] = {}
        for episode in training:
            groups.setdefault(episode.task.id, []).append(episode)
        examples: Sequence[Any] = supervised.pairs([Group(e[0].task, e) for e in groups.values()], len(training), 0.0)
    else:
        examples = training if len({e.total_reward >= min_reward for e in training}) == 2 else ()
    if not examples:
        raise ConfigError("outcome_model: the logged training episodes all have the same outcome.")
    return examples


def _streams(score: Scorer, critic: Any, chosen: Sequence[Any], loss: str, min_reward: float) -> list[Streams]:
    if loss == "binary":
        return outcome.binary(chosen, min_reward)
    z = _scores(score, critic, [e for pair in chosen for e in (pair.chosen, pair.rejected)])
    return outcome.bradley_terry(chosen, list(zip(z[::2], z[1::2], strict=True)))


def _scores(score: Scorer, critic: Any, episodes: Sequence[Episode]) -> np.ndarray:
    """f32[N]: the model's number at the end of each episode."""
    (values,) = score(critic, [outcome.through_end(e) for e in episodes])
    return np.array([v[-1] for v in values], np.float32)


def _held_out(
    score: Scorer, critic: Any, training: Sequence[Episode], held_out: Sequence[Episode], loss: str, min_reward: float
) -> dict[str, float]:
    labels = np.array([e.total_reward >= min_reward for e in held_out])
    threshold = 0.0
    if loss == "bradley_terry":
        labels_in_training = np.array([e.total_reward >= min_reward for e in training])
        threshold = outcome.best_threshold(_scores(score, critic, training), labels_in_training)
    z = _scores(score, critic, held_out)
    return {
        "outcome_model/accuracy": outcome.accuracy(z, labels, threshold),
        "outcome_model/majority": float(max(labels.mean(), 1 - labels.mean())),
        "outcome_model/auc": outcome.auc(z, labels),
        "outcome_model/held_out": float(len(held_out)),
    }


def _loss(values: Any, name: str) -> Any:
    def loss(critic: Any, batch: Batch, temperature: jax.Array, frozen: None, teacher: None) -> tuple[jax.Array, Tally]:
        del temperature, frozen, teacher  # the value of a whole attempt
        live = batch.value_weights != 0
        z = jnp.where(live, values(critic, batch), 0.0)
        total = jnp.sum(batch.value_weights * outcome.LOSSES[name](z, batch.returns))
        return total, Tally({"loss": jax.lax.stop_gradient(total), "targets": jnp.sum(live).astype(jnp.float32)}, {})

    return loss


def _metrics(tally: Tally) -> dict[str, float]:
    return {"loss/outcome": float(tally.sums["loss"])}
