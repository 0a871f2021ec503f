"""The RL stage's compiled programs, made once from the config: packing, update, critic values, reference, teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxagent.algorithms import presets
from jaxagent.algorithms.streams import Streams
from jaxagent.config import BatchConfig, Config
from jaxagent.learner import forward, loss, score
from jaxagent.learner.batch import Batch
from jaxagent.learner.batching import Packer
from jaxagent.learner.optimizer import make_optimizer
from jaxagent.learner.prefixes import Sharing
from jaxagent.learner.state import Frozen, TrainState, init_state
from jaxagent.learner.teacher import Distiller, Weights, distiller
from jaxagent.learner.teacher_http import HttpTeacher
from jaxagent.learner.update import Update, make_update
from jaxagent.models import critic as critics
from jaxagent.models import kernels, lora, params, sharding
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
    replay: score.Scorer | None  # log-probs of past successes under that policy, where they are replayed
    distiller: Distiller | None = None  # what asks the teacher

    def pack(self, streams: Sequence[Streams]) -> list[Batch]:
        """The micro-batches of one update."""
        batches = self.packer.pack(streams)
        return batches if self.distiller is None else self.distiller.batches(batches, streams)

    @property
    def teacher(self) -> Tree | None:
        """The weights that the update's loss runs beside the policy's."""
        return None if self.distiller is None else self.distiller.weights

    def reference_weights(self, state: TrainState) -> Tree:
        """The weights that KL is measured to: with LoRA the base, alone or with the adapters of the last refresh."""
        if state.frozen is None:
            return state.reference
        if state.reference is None:
            return state.frozen.base
        return self.update.merged(state.replace(params=state.reference)).policy


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
      policy: its parameters, in training shardings; critic and reference start as copies of it. With LoRA they are
        the frozen base, and new adapters are trained.
      teacher: opened, with rl.distill.

    Returns:
      The programs, and the stage's state before its first update.
    """
    rl = cfg.rl
    with jax.set_mesh(mesh):
        share = sharing(cfg, rl.batch, spec, cfg.numerics == "exact")
    packer = Packer(rl.batch, longest_targets(cfg), cfg.mesh.data * cfg.mesh.fsdp, share)
    updates = rl.steps * rl.updates_per_step * rl.epochs
    critic_updates = updates + rl.critic.warmup_updates * (rl.critic.warmup_epochs - 1)
    optimizer = make_optimizer(rl.optimizer, updates)
    score_policy, score_value = forward.policy_forward(spec, tiling(cfg), cfg.model.lora), None
    critic = critic_optimizer = values = reference = old = replay = None
    presets.warm_up(rl)
    with jax.set_mesh(mesh):
        if presets.needs_critic(rl):
            bins = loss.value_bins(rl)
            critic, score_value = critics.from_policy(policy, bins.bins if bins else 0), forward.value_forward(spec)
            critic_optimizer = make_optimizer(rl.critic.optimizer, critic_updates)
            values = score.value_scorer(score_value, packer, mesh, bins)
            values.warm_up(critic)
        if presets.needs_reference(rl) or presets.needs_old(rl) or rl.replay.per_step:
            scorer = score.policy_scorer(score_policy, rl.sampling.temperature, packer, mesh)
            reference = scorer if presets.needs_reference(rl) else None
            old = scorer if presets.needs_old(rl) else None
            replay = scorer if rl.replay.per_step else None
        judge = None if teacher is None else distiller(rl, spec, mesh, packer, teacher)
        trained, merge = trained_and_merge(cfg, spec, mesh, policy)
        state = init_state(trained, optimizer, critic, critic_optimizer, keeps_reference(cfg))
        train_policy = forward.policy_forward(
            spec, tiling(cfg), cfg.model.lora, rl.z_coefficient != 0, None if judge is None else judge.compare
        )
        update = make_update(
            train_policy,
            loss.Objective.of(rl),
            optimizer,
            mesh,
            score_value,
            critic_optimizer,
            rl.critic.warmup_epochs,
            merge,
        )
        if merge is not None:
            state = update.merged(state.replace(frozen=Frozen(policy, None)))
        programs = Programs(packer, update, values, reference, old, replay, judge)
        (empty,) = [packer.empty()] if judge is None else judge.batches([packer.empty()], [])
        state = update.warm_up(state, empty, programs.teacher)
    if reference is not None:
        reference.warm_up(programs.reference_weights(state))
    if old is not None or replay is not None:
        (old or replay).warm_up(state.policy)
    if judge is not None:
        judge.warm_up(state.policy)
    return programs, state


def trained_and_merge(
    cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, policy: Tree
) -> tuple[Tree, Callable[[Tree, Tree], Tree] | None]:
    """The tree that RL trains and how it is merged into weights to serve: (policy, None); LoRA: (adapters, merge)."""
    config = cfg.model.lora
    if not config.rank:
        return policy, None
    specs = lora.adapter_specs(spec, config)
    where = params.shardings_of(specs, mesh, sharding.TRAIN)
    return params.init_of(specs, jax.random.key(cfg.seed), where), merger(cfg)


def merger(cfg: Config) -> Callable[[Tree, Tree], Tree]:
    """LoRA's base, adapters -> weights, in compute dtype where adapted."""
    return lambda base, adapters: lora.merge(base, adapters, cfg.model.lora, cfg.model.compute_dtype)


def keeps_reference(cfg: Config) -> bool:
    """Whether the state holds a reference of its own. With LoRA the frozen base is one until it is refreshed."""
    return presets.needs_reference(cfg.rl) and (not cfg.model.lora.rank or cfg.rl.kl.refresh_every > 0)


def tiling(cfg: Config) -> Tiling | None:
    """The sizes of the engine that exact scoring has to share with it; None for fast numerics."""
    if cfg.numerics == "fast":
        return None
    return Tiling(cfg.engine.tile_rows, cfg.engine.page_tokens, cfg.engine.cache_dtype)


def sharing(cfg: Config, batch: BatchConfig, spec: ModelSpec, exact: bool = False) -> Sharing | None:
    """How a stage's packer shares the common beginnings of sequences; None if it is off, or attention cannot do it.

    Exact scoring reads sequences page by page, so it shares whole pages. Call under `jax.set_mesh` for another chip.
    """
    pages = cfg.engine.page_tokens
    chosen = kernels.prefixes(kernels.platform(), spec, pages, batch.row_tokens, exact)
    if not batch.share_prefix or chosen.name != "shared":
        return None
    # The last token of a trajectory is only a target, never an input.
    return Sharing(pages if exact else 1, max(1, min(cfg.env.context_tokens - 1, batch.row_tokens)))


def longest_targets(cfg: Config) -> int:
    """Targets of the longest trajectory that the environment's limits allow."""
    return presets.most_targets(cfg.rl, action_tokens(cfg), cfg.env.context_tokens)


def action_tokens(cfg: Config) -> int:
    """Most tokens that the policy can sample in one trajectory."""
    turns = cfg.env.max_turns + int(cfg.env.final_turn)
    return min(turns * cfg.env.turn_tokens, cfg.env.context_tokens)
