"""The RL stage's compiled programs, made once from the config: packing, update, critic values, reference log-probs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxagent.algorithms import presets
from jaxagent.config import Config
from jaxagent.learner import forward, loss, score
from jaxagent.learner.batching import Packer
from jaxagent.learner.optimizer import make_optimizer
from jaxagent.learner.state import TrainState, init_state
from jaxagent.learner.update import Update, make_update
from jaxagent.models import critic as critics
from jaxagent.models.exact import Tiling
from jaxagent.models.spec import ModelSpec

Tree = Any  # a pytree of arrays


@dataclasses.dataclass(frozen=True)
class Programs:
    """What an RL step calls. Holds compiled programs, no arrays."""

    packer: Packer
    update: Update
    values: score.Scorer | None  # PPO's critic
    reference: score.Scorer | None  # log-probs under the frozen reference
    old: score.Scorer | None  # log-probs under the policy as it stands before a step's first update
    replay: score.Scorer | None  # the same of past successes, where they are replayed


def make_programs(cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, policy: Tree) -> tuple[Programs, TrainState]:
    """Compiles everything an RL step runs on the device.

    Args:
      cfg: the run's config.
      spec, mesh: of the policy.
      policy: its parameters, in training shardings; critic and reference start as copies of it.

    Returns:
      The programs, and the stage's state before its first update.
    """
    rl = cfg.rl
    packer = Packer(rl.batch, longest_targets(cfg), cfg.mesh.data * cfg.mesh.fsdp)
    updates = rl.steps * rl.updates_per_step * rl.epochs
    critic_updates = updates + rl.critic.warmup_updates * (rl.critic.warmup_epochs - 1)
    optimizer = make_optimizer(rl.optimizer, updates)
    score_policy, score_value = forward.policy_forward(spec, tiling(cfg)), None
    critic = critic_optimizer = values = reference = old = replay = None
    presets.warm_up(rl)
    with jax.set_mesh(mesh):
        if presets.needs_critic(rl):
            critic, score_value = critics.from_policy(policy), forward.value_forward(spec)
            critic_optimizer = make_optimizer(rl.critic.optimizer, critic_updates)
            values = score.value_scorer(score_value, packer, mesh)
            values.warm_up(critic)
        if presets.needs_reference(rl) or presets.needs_old(rl) or rl.replay.per_step:
            scorer = score.policy_scorer(score_policy, rl.sampling.temperature, packer, mesh)
            scorer.warm_up(policy)
            reference = scorer if presets.needs_reference(rl) else None
            old = scorer if presets.needs_old(rl) else None
            replay = scorer if rl.replay.per_step else None
        state = init_state(policy, optimizer, critic, critic_optimizer, presets.needs_reference(rl))
        update = make_update(
            score_policy, loss.Objective.of(rl), optimizer, mesh, score_value, critic_optimizer, rl.critic.warmup_epochs
        )
        state = update.warm_up(state, packer.empty())
    return Programs(packer, update, values, reference, old, replay), state


def tiling(cfg: Config) -> Tiling | None:
    """What the trainer must know of the engine to score exactly as it samples; None for fast numerics."""
    if cfg.numerics == "fast":
        return None
    return Tiling(cfg.engine.tile_rows, cfg.engine.page_tokens, cfg.engine.cache_dtype)


def longest_targets(cfg: Config) -> int:
    """Targets of the longest trajectory that the environment's limits allow."""
    turns = cfg.env.max_turns + int(cfg.env.final_turn)
    return presets.most_targets(cfg.rl, turns * cfg.env.turn_tokens, cfg.env.context_tokens)
