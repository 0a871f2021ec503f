"""The RL stage's compiled programs, made once from the config: packing, update, critic values, reference, teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxagent.algorithms import presets
from jaxagent.algorithms.streams import Streams
from jaxagent.config import Config
from jaxagent.learner import forward, loss, score
from jaxagent.learner.batch import Batch
from jaxagent.learner.batching import Packer
from jaxagent.learner.optimizer import make_optimizer
from jaxagent.learner.state import TrainState, init_state
from jaxagent.learner.teacher import Distiller, Weights, distiller
from jaxagent.learner.teacher_http import HttpTeacher
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
    distiller: Distiller | None = None  # what asks the teacher

    def pack(self, streams: Sequence[Streams]) -> list[Batch]:
        """The micro-batches of one update."""
        batches = self.packer.pack(streams)
        return batches if self.distiller is None else self.distiller.batches(batches, streams)

    @property
    def frozen(self) -> tuple[Tree, ...]:
        """Parameters that the update reads and does not train."""
        return () if self.distiller is None else self.distiller.frozen


def make_programs(
    cfg: Config,
    spec: ModelSpec,
    mesh: jax.sharding.Mesh,
    policy: Tree,
    teacher: Weights | HttpTeacher | None = None,
) -> tuple[Programs, TrainState]:
    """Compiles everything an RL step runs on the device.

    Args:
      cfg: the run's config.
      spec, mesh: of the policy.
      policy: its parameters, in training shardings; critic and reference start as copies of it.
      teacher: opened, with rl.distill.

    Returns:
      The programs, and the stage's state before its first update.
    """
    rl = cfg.rl
    packer = Packer(rl.batch, longest_targets(cfg), cfg.mesh.data * cfg.mesh.fsdp)
    updates = rl.steps * rl.updates_per_step * rl.epochs
    critic_updates = updates + rl.critic.warmup_updates * (rl.critic.warmup_epochs - 1)
    optimizer = make_optimizer(rl.optimizer, updates)
    score_policy, score_value = forward.policy_forward(spec, tiling(cfg)), None
    critic = critic_optimizer = values = reference = old = None
    presets.warm_up(rl)
    with jax.set_mesh(mesh):
        if presets.needs_critic(rl):
            critic, score_value = critics.from_policy(policy), forward.value_forward(spec)
            critic_optimizer = make_optimizer(rl.critic.optimizer, critic_updates)
            values = score.value_scorer(score_value, packer, mesh)
            values.warm_up(critic)
        if presets.needs_reference(rl) or presets.needs_old(rl):
            scorer = score.policy_scorer(score_policy, rl.sampling.temperature, packer, mesh)
            scorer.warm_up(policy)
            reference = scorer if presets.needs_reference(rl) else None
            old = scorer if presets.needs_old(rl) else None
        judge = None if teacher is None else distiller(rl, spec, tiling(cfg), mesh, packer, policy, teacher)
        if judge is not None and judge.forward is not None:
            score_policy = judge.forward
        state = init_state(policy, optimizer, critic, critic_optimizer, presets.needs_reference(rl))
        update = make_update(
            score_policy, loss.Objective.of(rl), optimizer, mesh, score_value, critic_optimizer, rl.critic.warmup_epochs
        )
        programs = Programs(packer, update, values, reference, old, judge)
        (empty,) = [packer.empty()] if judge is None else judge.batches([packer.empty()], [])
        state = update.warm_up(state, empty, programs.frozen)
    return programs, state


def tiling(cfg: Config) -> Tiling | None:
    """What the trainer must know of the engine to score exactly as it samples; None for fast numerics."""
    if cfg.numerics == "fast":
        return None
    return Tiling(cfg.engine.tile_rows, cfg.engine.page_tokens, cfg.engine.cache_dtype)


def longest_targets(cfg: Config) -> int:
    """Targets of the longest trajectory that the environment's limits allow."""
    turns = cfg.env.max_turns + int(cfg.env.final_turn)
    return presets.most_targets(cfg.rl, turns * cfg.env.turn_tokens, cfg.env.context_tokens)
