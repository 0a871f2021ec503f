"""One optimiser update from any number of micro-batches, for the policy and for the critic.

In: `TrainState` and the `Batch`es of one update (see batching.py). Out: the next state and scalar metrics.
Weights are normalised over the whole update, so adding up micro-batch gradients IS the full-batch gradient; two
programs run, "accumulate" once per micro-batch and "apply" once per update, and neither is compiled anew for another
number of micro-batches. An update without any weighted target, or with a gradient that is not finite, leaves the state
as it was. The optimiser is AdamW with warm-up, schedule and clipping of the global norm, from the config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxagent.algorithms.value_losses import Categorical, Squared
from jaxagent.config import OptimizerConfig
from jaxagent.learner import loss as losses
from jaxagent.learner import peers
from jaxagent.learner.loss import PolicyLoss, Tally, policy_metrics, value_metrics
from jaxagent.learner.state import Batch, TrainState
from jaxagent.models import global_arrays, sharding

Tree = Any  # a pytree of arrays
PolicyForward = Callable[[Tree, Batch, jax.Array, Tree | None, Tree | None], tuple[Any, ...]]
ValueForward = Callable[[Tree, Batch], jax.Array]


@dataclasses.dataclass(frozen=True)
class Update:
    """`update(state, batches) -> (state, metrics)`. Holds compiled programs, no arrays."""

    mesh: jax.sharding.Mesh
    policy: Trainable
    critic: Trainable | None
    critic_warmup_epochs: int
    temperature: float  # that of an update which names none
    merge: Callable[[Tree, Tree], Tree] | None = None  # LoRA: base, adapters -> the weights to serve

    def __call__(
        self,
        state: TrainState,
        batches: Sequence[Batch],
        train_policy: bool = True,
        temperature: float | None = None,
        teacher: Tree | None = None,
        logprobs: list[np.ndarray] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Applies one update.

        Args:
          state: consumed: its optimiser states are donated; `params`, `critic` and `frozen` stay valid (an engine may
            hold them).
          batches: all micro-batches of the update, at least one.
          train_policy: False for the critic's warm-up.
          temperature: at which the update's policy targets were sampled. It is a run-time argument, so changing it
            compiles nothing. None = the objective's temperature, for runs in which it never changes.
          teacher: the weights of another model that the policy's loss runs.
          logprobs: gets the policy's, f32[B, R] of every batch, where its loss keeps them.
        """
        same_plan("an update", batches)
        with jax.set_mesh(self.mesh), jax.transfer_guard("disallow"):
            batches = [shard(batch, self.mesh) for batch in batches]
            metrics: dict[str, float] = {}
            at = scalar(self.temperature if temperature is None else temperature, self.mesh)
            if train_policy:
                params, opt_state, step, pending = self.policy.step(
                    state.params, state.opt_state, state.step, batches, at, state.frozen, teacher
                )
                state = self.merged(state.replace(params=params, opt_state=opt_state, step=step))
                metrics |= self.policy.metrics(pending, "policy")
                if logprobs is not None and None not in pending[2]:
                    logprobs += jax.device_get(pending[2])
            if self.critic is not None:
                critic, opt_state, first = state.critic, state.critic_opt_state, None
                for _ in range(1 if train_policy else self.critic_warmup_epochs):
                    critic, opt_state, _, pending = self.critic.step(critic, opt_state, state.step, batches, at)
                    first = first or pending  # metrics of data the critic has not seen
                state = state.replace(critic=critic, critic_opt_state=opt_state)
                metrics |= self.critic.metrics(first, "critic")
            return state, metrics

    def merged(self, state: TrainState) -> TrainState:
        """The state, with LoRA with its adapters merged into the weights to serve; without LoRA unchanged."""
        if self.merge is None:
            return state
        with jax.set_mesh(self.mesh):
            merged = self.merge(state.frozen.base, state.params)
        return state.replace(frozen=state.frozen.replace(merged=merged))

    def warm_up(self, state: TrainState, empty: Batch, teacher: Tree | None = None) -> TrainState:
        """Compiles every program by an update on padding alone, which changes no number of the state."""
        return self(state, [empty], teacher=teacher)[0]


@dataclasses.dataclass(frozen=True)
class Trainable:
    """The two programs that train one parameter tree."""

    # params, batch, temperature[, frozen, teacher] -> empty accumulators
    zeros: Callable[..., tuple[Tree, Tally]]
    # params, batch, temperature, grads, tally[, frozen, teacher] -> grads, tally, the batch's log-probs or None
    accumulate: Callable[..., tuple[Tree, Tally, jax.Array | None]]
    apply: Callable[..., tuple[Tree, Tree, jax.Array, dict[str, jax.Array]]]
    summarise: Callable[[Tally], dict[str, float]]

    def step(
        self, params: Tree, opt_state: Tree, step: jax.Array, batches: Sequence[Batch], at: jax.Array, *others: Tree
    ) -> tuple:
        """Returns params, opt_state, step, and what is still on the device: the two that `metrics` needs, log-probs."""
        grads, tally = self.zeros(params, batches[0], at, *others)
        logprobs = []
        for batch in batches:
            grads, tally, of_batch = self.accumulate(params, batch, at, grads, tally, *others)
            logprobs.append(of_batch)
        params, opt_state, step, health = self.apply(params, opt_state, step, grads, tally)
        return params, opt_state, step, (tally, health, logprobs)

    def metrics(self, pending: tuple[Tally, dict[str, jax.Array], Any], prefix: str) -> dict[str, float]:
        """Copies an update's numbers to the host, once."""
        tally, health = jax.device_get(pending[:2])
        return self.summarise(tally) | {f"{prefix}/{name}": float(value) for name, value in health.items()}


class Critic(NamedTuple):
    """What trains a critic."""

    forward: ValueForward
    optimizer: optax.GradientTransformation
    loss: Squared | Categorical
    warmup_epochs: int = 1  # optimiser steps on each update's data while the policy is not trained


def make_update(
    forward: PolicyForward,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    policy_loss: PolicyLoss = losses.policy_loss,
    temperature: float = 1.0,
    critic: Critic | None = None,
    merge: Callable[[Tree, Tree], Tree] | None = None,
    adjust: Callable[[Tree, Tally], Tree] | None = None,
) -> Update:
    """Builds the update.

    Args:
      forward: params, batch, temperature, frozen, teacher -> log-probs and entropies f32[B, R] of the targets, and
        `loss.Extras` where the loss reads more (forward.py).
      temperature: of updates that name none.
      merge: given when the policy's params are LoRA adapters: base, adapters -> the weights to serve.
      adjust: what of the policy an update moves beside its gradient: params, the update's tally -> params.
    """

    def loss_of_policy(params: Tree, batch: Batch, *others: Any) -> tuple[jax.Array, Tally]:
        logprobs, entropy, *extras = forward(params, batch, *others)
        return policy_loss(logprobs, entropy, batch, *extras)

    def loss_of_critic(values: Tree, batch: Batch, *_: Any) -> tuple[jax.Array, Tally]:  # of states, and trained whole
        return losses.value_loss(critic.forward(values, batch), batch, critic.loss)

    policy, values = make_trainable(loss_of_policy, optimizer, policy_metrics, adjust), None
    if critic is not None:
        values = make_trainable(loss_of_critic, critic.optimizer, value_metrics)
    return Update(mesh, policy, values, critic.warmup_epochs if critic else 1, temperature, merge)


def make_trainable(
    loss: Callable[..., tuple[jax.Array, Tally]],
    optimizer: optax.GradientTransformation,
    summarise: Callable[[Tally], dict[str, float]],
    adjust: Callable[[Tree, Tally], Tree] | None = None,
) -> Trainable:
    """Jits the programs that train one tree of parameters. Gradients are f32 and accumulate in donated buffers.

    `loss` is called with params, batch, temperature, frozen and teacher; `adjust` as in `make_update`.
    """

    def zeros(params: Tree, batch: Batch, temperature: jax.Array, *others: Tree | None) -> tuple[Tree, Tally]:
        _, tally = jax.eval_shape(loss, params, batch, temperature, *others)
        grads = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        tally = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tally.replace(logprobs=None))
        return grads, tally.replace(maxima=jax.tree.map(lambda x: x - jnp.inf, tally.maxima))

    def accumulate(
        params: Tree, batch: Batch, temperature: jax.Array, grads: Tree, tally: Tally, *others: Tree | None
    ) -> tuple[Tree, Tally, jax.Array | None]:
        new, part = jax.grad(loss, has_aux=True)(params, batch, temperature, *others)
        return jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grads, new), tally.add(part), part.logprobs

    def apply(params: Tree, opt_state: Tree, step: jax.Array, grads: Tree, tally: Tally) -> tuple:
        norm = optax.tree.norm(grads)
        live = jnp.isfinite(norm) & (tally.sums["targets"] > 0)
        with jax.named_scope("optimizer"):
            updates, new_opt_state = optimizer.update(grads, opt_state, params)
        moved = optax.apply_updates(params, updates)
        new = (moved if adjust is None else adjust(moved, tally), new_opt_state, step + 1)
        params, opt_state, step = jax.tree.map(lambda n, o: jnp.where(live, n, o), new, (params, opt_state, step))
        return params, opt_state, step, {"grad_norm": norm, "update_applied": live.astype(jnp.float32)}

    # Parameters are not donated: the engine may hold the same buffers. The accumulators' become the new parameters.
    return Trainable(
        zeros=jax.jit(zeros),
        accumulate=jax.jit(accumulate, donate_argnums=(3, 4)),
        apply=jax.jit(apply, donate_argnums=(1, 3)),
        summarise=summarise,
    )


def shard(batch: Batch, mesh: jax.sharding.Mesh) -> Batch:
    """Puts a host batch on the mesh, rows split. Of several processes each has the whole batch."""
    return global_arrays.put(batch, jax.NamedSharding(mesh, jax.P(sharding.ROWS)))


def same_plan(what: str, batches: Sequence[Batch]) -> None:
    """Has all processes of a trainer meet before device work, and compares what they have packed.

    One that has another number of micro-batches, or other rows, would hang the others in a collective, or train what
    nobody sampled. Weights are not compared: processors may round them differently.

    Raises:
      PeerError: they differ, or somebody is missing.
    """
    if peers.count() > 1:
        plan = (leaf for leaf in jax.tree.leaves(list(batches)) if np.issubdtype(leaf.dtype, np.integer))
        peers.agree(f"the batches of {what}", peers.digest(plan))


def scalar(value: float, mesh: jax.sharding.Mesh) -> jax.Array:
    """Puts a number on every device of the mesh: f32[]. Explicitly, as all that an update or a scorer transfers."""
    return global_arrays.put(np.float32(value), jax.NamedSharding(mesh, jax.P()))


_B1, _EPS = 0.9, 1e-8  # of every published recipe
_WSD_DECAY = 0.2  # the last part of the updates


def make_optimizer(config: OptimizerConfig, total_updates: int) -> optax.GradientTransformation:
    """Clips the global gradient norm, then AdamW (decoupled decay, not on norms and biases)."""
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip) if config.grad_clip > 0 else optax.identity(),
        optax.adamw(
            learning_rate(config, total_updates),
            b1=_B1,
            b2=config.b2,
            eps=_EPS,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def learning_rate(config: OptimizerConfig, total_updates: int) -> Callable[[jax.Array], jax.Array]:
    """Update index (0-based) -> learning rate.

    Linear warm-up over `warmup_steps` updates (the first one already moves: (i + 1) / warmup_steps), then constant,
    or falling to 0 at `total_updates` along a cosine or a line. "wsd" (warm-up, stable, decay: MiniCPM, arXiv
    2404.06395) is constant until the last fifth of the updates, over which it falls along a line.
    """
    shapes = {
        "constant": lambda progress: jnp.ones_like(progress),
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
        "wsd": lambda progress: jnp.minimum((1.0 - progress) / _WSD_DECAY, 1.0),
    }
    shape = shapes[config.schedule]
    decay_updates = max(total_updates - config.warmup_steps, 1)

    def schedule(count: jax.Array) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        warm = jnp.minimum((count + 1.0) / max(config.warmup_steps, 1), 1.0)
        progress = jnp.clip((count - config.warmup_steps) / decay_updates, 0.0, 1.0)
        return config.learning_rate * warm * shape(progress)

    return schedule


def decayed(params: Any) -> Any:
    """A tree of bools: True where weight decay applies (matrices and embeddings, not norm scales and biases)."""

    def is_decayed(path: tuple, _: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return not ("norm" in name or "bias" in name or name in ("bq", "bk", "bv"))

    return jax.tree_util.tree_map_with_path(is_decayed, params)
