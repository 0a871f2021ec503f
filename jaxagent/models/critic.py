"""PPO's value function: the policy's own model code with a scalar head instead of the vocabulary."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxagent.models.params import Params


@flax.struct.dataclass
class Critic:
    """A model without vocabulary head, and a head of one number."""

    backbone: Params  # head is None
    value_head: Any  # f32[E]


def from_policy(params: Params) -> Critic:
    """A critic that starts at the policy's weights (copied: both may be donated) and predicts 0 everywhere."""
    backbone = jax.tree.map(jnp.copy, params.replace(head=None))
    return Critic(backbone=backbone, value_head=jnp.zeros_like(backbone.final_norm, dtype=jnp.float32))


def values(critic: Critic, x: jax.Array) -> jax.Array:
    """Values f32[...] of hidden states x[..., E]."""
    return jnp.einsum("...e,e->...", x.astype(jnp.float32), critic.value_head.astype(jnp.float32))
