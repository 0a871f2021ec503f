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
    """The settings of a router: the `active` of `count` experts with the highest scores are chosen.

    With a bias those of the highest scores + bias are, and weigh their scores: so that experts get equal loads without
    a loss for it, see Wang et al. (https://arxiv.org/abs/2408.15664). Of groups of experts, neighbours by number, only
    the best `active_groups` are chosen from, see DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 2.1.2.
    A softmax over the chosen experts alone is the one over all, renormalised.
    """

    count: int = 8
    active: int = 2  # experts per token
    renormalise: bool = True  # the chosen experts' scores to a sum of 1
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of h router, over the experts or of each
    bias: bool = False
    groups: int = 1
    active_groups: int = 1
    scale: float = 1.0  # of the chosen experts' weights
    epsilon: float = 0.0  # added to the sum that renormalises


@jax.named_scope("route")
def route(
    routing: Routing, h: jax.Array, router: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Scores f32[N, X] of rows h[N, E], and the numbers i32[N, k] of the chosen; router [E, X], bias f32[X]."""
    scores = scores_of(routing, h, router)
    return lax.optimization_barrier((scores, choose(routing, scores, bias)))


def scores_of(routing: Routing, h: jax.Array, router: jax.Array) -> jax.Array:
    """What the router thinks of each expert, f32[N, X]."""
    wide = contract("ne,ex->nx", h.astype(jnp.float32), router.astype(jnp.float32))
    wide = lax.optimization_barrier(wide)  # a sum over it must not be compiled with what is near
    return jax.nn.sigmoid(wide) if routing.scores == "sigmoid" else jax.nn.softmax(wide)


def choose(routing: Routing, scores: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """The numbers i32[N, k], ascending, of the experts with the highest scores f32[N, X]."""
    wanted = lax.stop_gradient(scores if bias is None else scores + bias)
    if routing.groups > 1:
        grouped = wanted.reshape(len(wanted), routing.groups, -1)
        best, _ = lax.top_k(grouped, 2)  # as published: a group is as good as its best two together
        _, groups = lax.top_k(best[..., 0] + best[..., 1], routing.active_groups)
        allowed = jnp.any(groups[:, :, None] == jnp.arange(routing.groups), axis=1)
        wanted = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(wanted.shape)
    _, chosen = lax.top_k(wanted, routing.active)  # of equal ones the lower number
    return jnp.sort(chosen, axis=1)


@jax.named_scope("route")
def weigh(routing: Routing, scores: jax.Array, chosen: jax.Array) -> jax.Array:
    """What each of the chosen experts weighs, f32[N, k]."""
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if routing.renormalise:
        total = sum(weights[:, i : i + 1] for i in range(routing.active))  # one order of additions
        weights = weights / (total + routing.epsilon if routing.epsilon else total)
    return lax.optimization_barrier(weights * routing.scale if routing.scale != 1 else weights)
