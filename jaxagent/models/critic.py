"""PPO's value function: the policy's own model code with a small head instead of the vocabulary."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxagent.models.params import Params


@flax.struct.dataclass
class Critic:
    """A model without vocabulary head, and a head of one number, or of N logits for a value in bins."""

    backbone: Params  # head is None
    value_head: Any  # f32[E], or f32[E, N]


def from_policy(params: Params, bins: int = 0) -> Critic:
    """A critic that starts at the policy's weights (copied: both may be donated) and predicts 0, or every bin alike."""
    backbone = jax.tree.map(jnp.copy, params.replace(head=None))
    head = jnp.zeros_like(backbone.final_norm, dtype=jnp.float32)
    return Critic(backbone=backbone, value_head=jnp.repeat(head[:, None], bins, axis=1) if bins else head)


@jax.named_scope("value_head")
def values(critic: Critic, x: jax.Array) -> jax.Array:
    """Values f32[...] of hidden states x[..., E], or logits f32[..., N]."""
    head = critic.value_head.astype(jnp.float32)
    return jnp.einsum("...e,e->..." if head.ndim == 1 else "...e,en->...n", x.astype(jnp.float32), head)
