"""Everything the learner owns on the mesh, as one tree: what an update maps to its successor and a checkpoint keeps."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

Tree = Any  # a pytree of arrays


@flax.struct.dataclass
class Frozen:
    """The frozen weights that LoRA adapters change: not trained, and not in checkpoints."""

    base: Tree
    merged: Tree  # base and adapters multiplied out: the policy


@flax.struct.dataclass
class TrainState:
    """The learner's state. `step` counts applied policy updates; it is the policy version."""

    step: jax.Array  # i32[]
    params: Tree  # what is trained: f32 masters of the policy, or its LoRA adapters
    opt_state: optax.OptState
    critic: Tree | None = None  # PPO: backbone and value head
    critic_opt_state: optax.OptState | None = None
    reference: Tree | None = None  # frozen policy that KL is measured to; with LoRA its adapters, None = none
    frozen: Frozen | None = None  # with LoRA

    @property
    def policy(self) -> Tree:
        """The weights to generate with and to export."""
        return self.params if self.frozen is None else self.frozen.merged


def init_state(
    params: Tree,
    optimizer: optax.GradientTransformation,
    critic: Tree | None = None,
    critic_optimizer: optax.GradientTransformation | None = None,
    keep_reference: bool = False,
) -> TrainState:
    """A state before its first update. Call under `jax.set_mesh`: moments inherit the shardings of `params`.

    The reference is a copy, so that neither tree's buffers can disappear under the other.
    """

    @jax.jit
    def init(params: Tree, critic: Tree | None) -> TrainState:
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=None,
            opt_state=optimizer.init(params),
            critic_opt_state=None if critic is None else critic_optimizer.init(critic),
            reference=jax.tree.map(jnp.copy, params) if keep_reference else None,
        )

    return init(params, critic).replace(params=params, critic=critic)
