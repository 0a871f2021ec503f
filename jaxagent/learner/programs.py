"""The RL stage's programs, described once from the config: packing, update, critic values, log-probs, teacher.

`describe` compiles nothing and allocates nothing: a dry run lowers what it gives from abstract arrays (`first_state`
under `jax.eval_shape`). `make_programs` compiles the same for a run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxagent.algorithms import estimate
from jaxagent.algorithms.policy_loss import reads_of
from jaxagent.algorithms.streams import ModelScores, Streams
from jaxagent.config import BatchConfig, Config, ConfigError, RLConfig
from jaxagent.learner import forward, loss, peers, score
from jaxagent.learner.batching import Packer, Sharing, unpack
from jaxagent.learner.state import Batch, Frozen, TrainState, init_state
from jaxagent.learner.teacher import Distiller, Weights, distiller
from jaxagent.learner.teacher_http import HttpTeacher
from jaxagent.learner.update import Critic, Update, make_optimizer, make_update
from jaxagent.models import balance, choices, kernels, lora, params, peft, sharding
from jaxagent.models import critic as critics
from jaxagent.models.exact import Tiling
from jaxagent.models.spec import ModelSpec
from jaxagent.types import Trajectory, unrecorded

Tree = Any  # a pytree of arrays


@dataclasses.dataclass(frozen=True)
class Programs:
    """What an RL step calls. Holds jitted programs, and no arrays but a teacher's."""

    rl: RLConfig
    packer: Packer
    update: Update
    logprobs: score.Scorer | None = None  # under weights of the policy's shape, where the algorithm reads any
    values: score.Scorer | None = None  # of PPO's critic
    distiller: Distiller | None = None  # what asks the teacher
    keeps_logprobs: bool = False  # of updates: the policy's log-probs, which in exact numerics are the engine's

    def score(self, state: TrainState, trajectories: Sequence[Trajectory], temperature: float) -> ModelScores:
        """What models say of a step's trajectories before its first update, as far as the algorithm reads it."""
        scores: dict[str, Any] = {}
        if self.values is not None:
            (scores["values"],) = self.values(state.critic, trajectories)
        if self.rl.kl is not None:
            scores["reference"] = self.reference_logprobs(state, trajectories, temperature)
        if self.rl.reads_old:
            scores["old"] = self.policy_logprobs(state, trajectories, temperature)
        if self.distiller is not None:
            scores["teacher"], scores["students"] = self.distiller(state.policy, trajectories, temperature)
        return ModelScores(**scores)

    def reference_logprobs(
        self, state: TrainState, trajectories: Sequence[Trajectory], temperature: float
    ) -> list[np.ndarray]:
        """f32[T] of each trajectory under the reference, which routes by its own router."""
        alone = [dataclasses.replace(trajectory, experts=None) for trajectory in trajectories]
        return self.logprobs(self.reference_weights(state), alone, temperature)[0]

    def policy_logprobs(
        self, state: TrainState, trajectories: Sequence[Trajectory], temperature: float
    ) -> list[np.ndarray]:
        """f32[T] of each trajectory under the policy as it is now, 0 outside action tokens."""
        return self.logprobs(state.policy, trajectories, temperature)[0]

    def train(
        self,
        state: TrainState,
        streams: Sequence[Streams],
        temperature: float,
        step: int,
        scored: dict[int, np.ndarray] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimiser update of an RL step; the state as it was and no metrics where nothing has a weight.

        `scored` gets the policy's log-probs before the update, f32[T] by the id of a trajectory that is not there yet,
        where the loss keeps them.
        """
        packed = self.packer.pack(streams, step)
        if not (batches := self.batches(packed, streams)):
            return state, {}
        updates = step * self.rl.updates_per_step * self.rl.epochs
        train_policy = self.rl.critic is None or updates >= self.rl.critic.warmup_updates
        if scored is None or not self.keeps_logprobs:
            return self.update(state, batches, train_policy, temperature, self.teacher)
        logprobs: list[np.ndarray] = []
        state, metrics = self.update(state, batches, train_policy, temperature, self.teacher, logprobs)
        for stream, own in zip(streams, unpack(batches, logprobs, streams) if logprobs else (), strict=False):
            scored.setdefault(id(stream.trajectory), own)
        return state, metrics

    def batches(self, packed: list[Batch], streams: Sequence[Streams]) -> list[Batch]:
        """The packed `streams` with the tokens in which they are compared to the teacher, where they are."""
        return packed if self.distiller is None else self.distiller.batches(packed, streams)

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

    def warm_up(self, state: TrainState) -> TrainState:
        """Compiles everything, on padding; the state it returns takes the place of the one it was given."""
        estimate.warm_up(self.rl)
        if self.values is not None:
            self.values.warm_up(state.critic)
        (empty,) = self.batches([self.packer.empty()], [])
        state = self.update.warm_up(state, empty, self.teacher)
        if self.rl.kl is not None:
            self.logprobs.warm_up(self.reference_weights(state))
        if self.rl.reads_old or self.rl.replay or self.rl.rescores:
            self.logprobs.warm_up(state.policy)
        if self.distiller is not None:
            self.distiller.warm_up(state.policy)
        return state


def make_programs(
    cfg: Config,
    spec: ModelSpec,
    mesh: jax.sharding.Mesh,
    policy: Tree,
    teacher: Weights | HttpTeacher | None = None,
    begins: bool = True,
) -> tuple[Programs, TrainState]:
    """Compiles everything an RL step runs on the device; gives also the stage's state before its first update.

    `policy`: its parameters, in training shardings; `teacher`: opened, with rl.distill; `begins`: the stage does, and
    its state is not about to be replaced, so that adapters are read where the config names a folder of them.
    """
    programs = describe(cfg, spec, mesh, teacher)
    with jax.set_mesh(mesh):
        new = adapters(cfg, spec, mesh, begins) if cfg.model.lora else None
        state = first_state(cfg, policy, new)
    return programs, programs.warm_up(state)


def describe(
    cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, teacher: Weights | HttpTeacher | None = None
) -> Programs:
    """The programs of an RL step, none of them compiled. Args as of `make_programs`."""
    rl, config = cfg.rl, cfg.model.lora
    optimizer, critic_optimizer = optimizers(rl)
    with jax.set_mesh(mesh):
        share = sharing(cfg, rl.batch, spec, cfg.numerics == "exact")
    shards, reads = cfg.mesh.row_shards, reads_of(rl.objective)
    replays = replays_routing(cfg, spec)
    experts = unrecorded(1, choices.width(spec), choices.dtype(spec)) if replays else None
    packer = Packer(rl.batch, longest_targets(cfg), shards, share, cfg.mesh.context, reads, experts)
    logprobs = values = critic = None
    if rl.kl or rl.reads_old or rl.replay or rl.rescores:
        score_policy = forward.policy_forward(spec, tiling(cfg), config)
        logprobs = score.policy_scorer(score_policy, rl.sampling.temperature, packer, mesh)
    if rl.critic is not None:
        of_states = forward.value_forward(spec)
        values = score.value_scorer(of_states, packer, mesh, rl.critic.loss)
        critic = Critic(of_states, critic_optimizer, rl.critic.loss, rl.critic.warmup_epochs)
    judge = None if teacher is None else distiller(rl.distill, spec, mesh, packer, teacher)
    compare = None if judge is None else judge.compare
    policy_loss: Any = loss.policy_loss_of(rl)
    keeps_logprobs = cfg.numerics == "fast" and peers.count() == 1
    update = make_update(
        forward.policy_forward(spec, tiling(cfg), config, rl.z_loss is not None, compare, replays, watches(cfg, spec)),
        optimizer,
        mesh,
        functools.partial(policy_loss, keeps_logprobs=True) if keeps_logprobs else policy_loss,
        rl.sampling.temperature or 1.0,
        critic,
        merger(cfg) if config else None,
        _mover_of_biases(spec, rl.routes.bias_rate) if rl.routes.bias_rate else None,
    )
    return Programs(rl, packer, update, logprobs, values, judge, keeps_logprobs)


def first_state(cfg: Config, policy: Tree, adapters: lora.Adapters | None) -> TrainState:
    """The stage's state before its first update. Call under `jax.set_mesh`; `jax.eval_shape` makes it abstract.

    Critic and reference start as copies of the policy. With LoRA the policy's parameters are the frozen base, and the
    `adapters` are trained.
    """
    rl, critic = cfg.rl, None
    if rl.critic is not None:
        critic = critics.from_policy(policy, rl.critic.loss.heads)
    optimizer, critic_optimizer = optimizers(rl)
    trained, frozen = policy, None
    if adapters is not None:
        trained, frozen = adapters, Frozen(policy, merger(cfg)(policy, adapters))
    return init_state(trained, optimizer, critic, critic_optimizer, keeps_reference(cfg)).replace(frozen=frozen)


def optimizers(rl: RLConfig) -> tuple[optax.GradientTransformation, optax.GradientTransformation | None]:
    """Of the policy, and of its critic where there is one: each for as many updates as the stage makes."""
    updates, critic = rl.steps * rl.updates_per_step * rl.epochs, None
    if rl.critic is not None:
        more = rl.critic.warmup_updates * (rl.critic.warmup_epochs - 1)
        critic = make_optimizer(rl.critic.optimizer, updates + more)
    return make_optimizer(rl.optimizer, updates), critic


def adapters(cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, begins: bool = True) -> lora.Adapters:
    """New LoRA adapters, or those of `lora.path` where a stage `begins`; in training shardings."""
    specs = lora.adapter_specs(spec, cfg.model.lora)
    where = params.shardings_of(specs, mesh, sharding.TRAIN)
    if begins and cfg.model.lora.path:
        return peft.load_adapters(cfg.model.lora.path, spec, where, cfg.model.lora)[0]
    return params.init_of(specs, jax.random.key(cfg.seed), where)


def merger(cfg: Config) -> Callable[[Tree, Tree], Tree]:
    """LoRA's base, adapters -> weights, in compute dtype where adapted."""
    return lambda base, adapters: lora.merge(base, adapters, cfg.model.lora, cfg.model.compute_dtype)


def keeps_reference(cfg: Config) -> bool:
    """Whether the state holds a reference: with LoRA, whose base is one, only where the policy began elsewhere or is
    followed.
    """
    return cfg.rl.kl is not None and (not cfg.model.lora or bool(cfg.model.lora.path) or cfg.rl.kl.refresh_every > 0)


def tiling(cfg: Config) -> Tiling | None:
    """The sizes of the engine that exact scoring has to share with it; None for fast numerics."""
    if cfg.numerics == "fast":
        return None
    return Tiling(cfg.engine.tile_rows, cfg.engine.page_tokens, cfg.engine.cache_dtype)


def replays_routing(cfg: Config, spec: ModelSpec) -> bool:
    """Whether engines record the experts of each token, and updates replay them.

    Raises:
      ConfigError: they shall, and the model has none.
    """
    wanted, width = cfg.rl.routes.replay, choices.width(spec)
    if wanted == "always" and not width:
        raise ConfigError(f"rl.routing.replay=always: {spec.family} has no experts among which tokens choose.")
    return bool(width) and cfg.numerics == "fast" and wanted != "never"


def watches(cfg: Config, spec: ModelSpec) -> bool:
    """Whether updates count how experts are loaded.

    Raises:
      ConfigError: they shall balance the load of experts that the model does not have, or by a bias that is not there.
    """
    routing, mixture = cfg.rl.routes, bool(balance.routers(spec))
    biases = any(vars(stack).get("router_bias") for stack in params.stacks_of(params.param_specs(spec).layers))
    if routing.balance_loss and not mixture:
        loss_of = f"rl.routing.balance_loss={routing.balance_loss}"
        raise ConfigError(f"{loss_of}: {spec.family} has no experts to balance. Set it to 0.")
    if routing.bias_rate and (cfg.model.lora or not mixture or not biases):
        why = "the frozen model's stay as they are" if cfg.model.lora else f"{spec.family} has none that choose experts"
        raise ConfigError(f"rl.routing.bias_rate={routing.bias_rate} moves routers' biases: {why}. Set it to 0.")
    return mixture


def _mover_of_biases(spec: ModelSpec, rate: float) -> Callable[[Tree, loss.Tally], Tree]:
    return lambda policy, tally: balance.with_moved_biases(policy, tally.sums["load"], spec, rate)


def sharing(cfg: Config, batch: BatchConfig, spec: ModelSpec, exact: bool = False) -> Sharing | None:
    """How a stage's packer shares the common beginnings of sequences; None if it is off, or attention cannot do it.

    Exact scoring reads sequences page by page, so it shares whole pages. Call under `jax.set_mesh` for another chip.
    """
    pages = cfg.engine.page_tokens
    chosen = kernels.prefixes(kernels.platform(), spec, pages, batch.row_tokens, exact)
    if not batch.share_prefix or chosen.name != "shared" or cfg.mesh.context > 1:
        return None
    # The last token of a trajectory is only a target, never an input.
    return Sharing(pages if exact else 1, max(1, min(cfg.env.context_tokens - 1, batch.row_tokens)))


def longest_targets(cfg: Config) -> int:
    """Most tokens of one trajectory that the loss can need, by the environment's limits: all of its targets.

    It fixes the shape of a batch before the first one exists.
    """
    echo, context, sampled = cfg.rl.echo, cfg.env.context_tokens, action_tokens(cfg)
    if echo is None:
        return sampled
    return min(sampled + echo.max_tokens, context) if echo.max_tokens else context


def action_tokens(cfg: Config) -> int:
    """Most tokens that the policy can sample in one trajectory."""
    return min(cfg.env.most_turns * cfg.env.turn_tokens, cfg.env.context_tokens)
