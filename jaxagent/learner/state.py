"""The trees that the learner maps and keeps: the `Batch` of packed rows that an update reads, and the `TrainState`.

A batch holds rows of tokens and the per-target streams of the blind learner. The state is everything the learner owns
on the mesh: what an update maps to its successor and a checkpoint keeps.
Axis letters: B packed rows, T tokens per row, R target positions per row.
"""

from __future__ import annotations

from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxagent.algorithms.policy_loss import READABLE

Array = Any  # numpy.ndarray on the host, jax.Array on the mesh (B sharded over data and fsdp)

STREAMS = (
    "old_logprobs", "reference_logprobs", "advantages", "returns", "old_values",
    "policy_weights", "kl_weights", "entropy_weights", "z_weights", "ce_weights", "nll_weights", "distill_weights",
    "value_weights",
)  # fmt: skip
FLOATS = ("behaviour_logprobs", *STREAMS)
PER_TARGET = ("head_positions", "targets", "sequence", "offset", *FLOATS)


@flax.struct.dataclass
class Batch:
    """One micro-batch. Padding: segment 0, weight 0, sequence -1."""

    tokens: Array  # i32[B, T]
    positions: Array  # i32[B, T]  position inside the token's own sequence
    segments: Array  # i32[B, T]  1, 2, ... per sequence of the row, or per tree of them; 0 = padding
    head_positions: Array  # i32[B, R]  row index of the token BEFORE the target: where it is predicted
    targets: Array  # i32[B, R]  the token to score
    behaviour_logprobs: Array  # f32[B, R] as recorded when sampled
    old_logprobs: Array  # f32[B, R] of the policy that the objective's ratio is taken to; mostly the same
    reference_logprobs: Array  # f32[B, R]
    advantages: Array  # f32[B, R]
    returns: Array  # f32[B, R]
    old_values: Array  # f32[B, R]
    policy_weights: Array  # f32[B, R]
    kl_weights: Array  # f32[B, R]
    entropy_weights: Array  # f32[B, R]
    z_weights: Array  # f32[B, R]
    ce_weights: Array  # f32[B, R]
    nll_weights: Array  # f32[B, R]
    distill_weights: Array  # f32[B, R]
    value_weights: Array  # f32[B, R]
    sequence: Array  # i32[B, R]  which sequence of the update the target belongs to; -1 = padding
    offset: Array  # i32[B, R]  the target's index in that sequence
    support: Array | None = None  # i32[B, R, K]  tokens in which a teacher is compared, where it is in top-k's
    teacher_logprobs: Array | None = None  # f32[B, R, K]  -inf: an entry that does not count
    rewards: Array | None = None  # f32[B, R]  the episode's, where the objective reads it
    ages: Array | None = None  # f32[B, R]  versions behind the step's policy, where the objective reads it
    turns: Array | None = None  # f32[B, R]  whole numbers, of the sequence's turns, where the objective reads them
    # u8|u16[B, T, W]  the experts that the engine chose for a token, where an update replays them (models/choices.py)
    experts: Array | None = None
    ends: Array | None = None  # i32[B, T]  where beginnings are shared: the column behind the last that may see a token
    # With `ends`: no sequence has more tokens in its row.
    longest: int = flax.struct.field(pytree_node=False, default=0)


def check_batch(batch: Batch) -> None:
    """Refuses with an AssertionError a batch of other shapes or types than above: some would broadcast."""
    per_token = [a for a in (batch.tokens, batch.positions, batch.segments, batch.ends) if a is not None]
    read = [name for name in READABLE if getattr(batch, name) is not None]
    names = [*PER_TARGET, *read]
    per_target = [getattr(batch, name) for name in names]
    chex.assert_rank([batch.tokens, batch.targets], 2)
    chex.assert_equal_shape(per_token)
    chex.assert_equal_shape(per_target)
    chex.assert_equal_shape_prefix([batch.tokens, batch.targets], 1)
    if batch.experts is not None:
        chex.assert_equal_shape_prefix([batch.tokens, batch.experts], 2)
    chex.assert_type(per_token, int)
    chex.assert_type(per_target, [float if name in (*FLOATS, *read) else int for name in names])


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

    Moments are float32 whatever the weights are, as gradients are: the first update would make them so, and the second
    would compile again. The reference is a copy, so that neither tree's buffers can disappear under the other.
    """

    def wide(params: Tree) -> Tree:
        return jax.tree.map(lambda p: p.astype(jnp.float32), params)

    @jax.jit
    def init(params: Tree, critic: Tree | None) -> TrainState:
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=None,
            opt_state=optimizer.init(wide(params)),
            critic_opt_state=None if critic is None else critic_optimizer.init(wide(critic)),
            reference=jax.tree.map(jnp.copy, params) if keep_reference else None,
        )

    return init(params, critic).replace(params=params, critic=critic)
