"""How evenly the experts of a mixture are loaded: what a forward pass counts, a loss on it, and a router's bias.

Axis letters: N rows, X experts, k experts per row, C routers, one per layer that has any, in order.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxagent.models.blocks import Cache, Choose, State
from jaxagent.models.params import Params, stacks_of
from jaxagent.models.spec import ModelSpec


@flax.struct.dataclass
class Load:
    """Sums over real tokens: of one router, without the C axis, or of all. Those of several batches add up."""

    chosen: jax.Array  # f32[C, X] tokens that went to each expert
    shares: jax.Array  # f32[C, X] of their scores, each token's scaled to a sum of 1
    entropy: jax.Array  # f32[C] of these shares, in nats
    tokens: jax.Array  # f32[C]


@flax.struct.dataclass
class Watched:
    """The state of a block whose choices are watched."""

    state: State
    load: Load


def routers(spec: ModelSpec) -> list[int]:
    """The layers that have a router; [] where two of one layer, or of different sizes, cannot be watched together."""
    kinds = [[block.choices[1] for block in blocks if block.choices[0]] for blocks in spec.pattern]
    if any(len(kind) > 1 for kind in kinds) or len({kind[0] for kind in kinds if kind}) != 1:
        return []
    return [layer for layer in range(spec.num_layers) if kinds[layer % len(kinds)]]


def watching(live: jax.Array, choose: Choose | None) -> Choose:
    """`choose`, or rows' own choices, with the load of rows that are `live` bool[N] beside the new state."""

    def watched(state: State, scores: jax.Array, chosen: jax.Array) -> tuple[jax.Array, Watched]:
        taken, state = (chosen, None) if choose is None else choose(state, scores, chosen)
        return taken, Watched(state, _load(scores, taken, live.astype(jnp.float32)))

    return watched


@jax.named_scope("load")
def _load(scores: jax.Array, chosen: jax.Array, live: jax.Array) -> Load:
    shares = scores / jnp.sum(scores, axis=1, keepdims=True)
    entropy = jnp.sum(jax.scipy.special.entr(lax.stop_gradient(shares)), axis=1)
    at = jnp.any(chosen[:, :, None] == jnp.arange(scores.shape[1]), axis=1)
    return Load(
        jnp.sum(at * live[:, None], axis=0), jnp.sum(shares * live[:, None], axis=0), jnp.sum(entropy * live),
        jnp.sum(live),
    )  # fmt: skip


def without(cache: Cache) -> Cache:
    """The new states as they are where nobody watches."""
    is_watched = lambda leaf: isinstance(leaf, Watched)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.state if is_watched(leaf) else leaf, cache, is_leaf=is_watched)


def load_of(spec: ModelSpec, cache: Cache, scanned: bool) -> Load:
    """That of all routers, from the new states of all layers, or where layers are scanned of all stacks."""
    loads = {}
    for number, states in enumerate(cache):
        for state in states:
            if isinstance(state, Watched) and scanned:
                each = enumerate(spec.stacks[number])
                loads |= {layer: jax.tree.map(lambda a, i=i: a[i], state.load) for i, layer in each}
            elif isinstance(state, Watched):
                loads[number] = state.load
    return jax.tree.map(lambda *each: jnp.stack(each), *(loads[layer] for layer in sorted(loads)))


def loss(load: Load) -> jax.Array:
    """X sum_x f_x P_x, the mean over routers: k where experts are used evenly, more where those with high scores are.

    f is the part of the tokens that went to an expert, P its mean share of the scores. See Fedus et al., Switch
    Transformers (https://arxiv.org/abs/2101.03961), section 2.2; f as in Qwen3-MoE, for k experts per token.
    """
    tokens = jnp.maximum(load.tokens, 1.0)[:, None]
    frequency = lax.stop_gradient(load.chosen) / tokens
    return jnp.mean(load.chosen.shape[1] * jnp.sum(frequency * load.shares / tokens, axis=1))


def with_moved_biases(params: Params, chosen: jax.Array, spec: ModelSpec, rate: float) -> Params:
    """Each router's bias, `rate` higher for an expert with less than the mean load [C, X] of an update, else lower.

    See DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 2.1.2.
    """
    step = rate * jnp.sign(jnp.mean(chosen, axis=1, keepdims=True) - chosen)
    at, stacks = routers(spec), []
    for layers, stack in zip(spec.stacks, stacks_of(params.layers), strict=True):
        if getattr(stack, "router_bias", None) is not None:
            rows = step[np.array([at.index(layer) for layer in layers])]
            stack = stack.replace(router_bias=stack.router_bias + rows)
        stacks.append(stack)
    return params.replace(layers=stacks if isinstance(params.layers, list) else stacks[0])


def metrics(chosen: np.ndarray, entropy: float, tokens: float) -> dict[str, float]:
    """Scalars of an update.

    Args:
      chosen: f32[C, X], see `Load`.
      entropy, tokens: sums over routers and tokens.
    """
    even = np.maximum(chosen.mean(axis=1, keepdims=True), 1e-9)
    return {
        "routing/entropy": entropy / max(tokens, 1.0),
        "routing/max_load": float(np.max(chosen / even)),
        "routing/dead_frac": float(np.mean(chosen == 0)),
    }
