"""Which experts of a mixture a row goes to, and what they weigh.

Everything is float32, sums have one order, and of equal experts the lower number goes first, so that trainer and engine
choose alike to the bit.

Axis letters: N rows, X experts, k experts per row, E embed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxagent.models.layers import contract


@dataclasses.dataclass(frozen=True)
class Routing:
    """The settings of a router: the `active` of `count` experts with the highest scores are chosen."""

    count: int = 8
    active: int = 2  # experts per token
    renormalise: bool = True  # the chosen experts' scores to a sum of 1
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of h router, over the experts or of each


@jax.named_scope("route")
def route(routing: Routing, h: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores f32[N, X] of all experts for rows h[N, E], and the numbers i32[N, k] of the chosen; router [E, X]."""
    scores = scores_of(routing, h, router)
    return lax.optimization_barrier((scores, choose(routing, scores)))


def scores_of(routing: Routing, h: jax.Array, router: jax.Array) -> jax.Array:
    """What the router thinks of each expert, f32[N, X]."""
    wide = contract("ne,ex->nx", h.astype(jnp.float32), router.astype(jnp.float32))
    wide = lax.optimization_barrier(wide)  # a sum over it must not be compiled with what is near
    return jax.nn.sigmoid(wide) if routing.scores == "sigmoid" else jax.nn.softmax(wide)


def choose(routing: Routing, scores: jax.Array) -> jax.Array:
    """The numbers i32[N, k], ascending, of the experts with the highest scores f32[N, X]."""
    _, chosen = lax.top_k(lax.stop_gradient(scores), routing.active)  # of equal ones the lower number
    return jnp.sort(chosen, axis=1)


@jax.named_scope("route")
def weigh(routing: Routing, scores: jax.Array, chosen: jax.Array) -> jax.Array:
    """What each of the chosen experts weighs, f32[N, k]."""
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if routing.renormalise:
        weights = weights / sum(weights[:, i : i + 1] for i in range(routing.active))  # one order of additions
    return lax.optimization_barrier(weights)
