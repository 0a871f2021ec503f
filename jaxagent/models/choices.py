"""What the blocks of a model chose for each token, the experts of a mixture: recorded where it samples, replayed where
it trains.

Two programs round differently, and a router's choice can hang on the last bit. So in fast numerics the engine keeps
what it chose beside its keys, and the trainer takes the selection from there; scores, weights and gradients are its
own. See Ma et al., R3 (https://arxiv.org/abs/2510.11370).

Axis letters: N rows, X things to choose from, k of them chosen, W numbers of a token: k of each block that chooses, in
the order of layers and blocks; P pages.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.models.blocks import Cache, State
from jaxagent.models.spec import ModelSpec

Array = Any  # numpy.ndarray or jax.Array


def width(spec: ModelSpec) -> int:
    """W; 0: no block of the model chooses anything."""
    turns = spec.num_layers // len(spec.pattern)
    return turns * sum(block.choices[0] for blocks in spec.pattern for block in blocks)


def dtype(spec: ModelSpec) -> str:
    """The smallest whose largest number cannot be the first of an ascending choice, where it says "not recorded"."""
    last = max((count - k for blocks in spec.pattern for block in blocks for k, count in [block.choices]), default=0)
    return "uint8" if last < np.iinfo(np.uint8).max else "uint16"


def recorded(choices: Array) -> Array:
    """bool[...]: of choices [..., k], which somebody recorded, see `types.unrecorded`."""
    return choices[..., 0] != np.iinfo(choices.dtype).max


def states(spec: ModelSpec, choices: jax.Array, scanned: bool) -> Cache:
    """Choices [N, W] as `transformer.hidden` hands them to the blocks: a state [N, k] for each that chooses."""
    turns = spec.num_layers // len(spec.pattern)
    of_turns = jnp.moveaxis(choices.reshape(len(choices), turns, -1), 1, 0)

    def of_period(part: jax.Array) -> Cache:  # [..., N, W of one period]
        at, layers = 0, []
        for blocks in spec.pattern:
            kept = []
            for block in blocks:
                k, _ = block.choices
                kept.append(part[..., at : at + k] if k else None)
                at += k
            layers.append(tuple(kept))
        return tuple(layers)

    if scanned:
        return of_period(of_turns)
    return tuple(layer for i in range(turns) for layer in of_period(of_turns[i]))


def pages_of(spec: ModelSpec, cache: Cache) -> list[State]:
    """The states of the blocks that choose, in the order of W."""
    layers = [zip(spec.pattern[i % len(spec.pattern)], states, strict=True) for i, states in enumerate(cache)]
    return [state for layer in layers for block, state in layer if block.choices[0]]


def replay(state: State, scores: jax.Array, chosen: jax.Array) -> tuple[jax.Array, State]:
    """Implements `blocks.Choose`: the recorded choices [N, k], and the row's own where there are none.

    The new state is i32[N], how many of the recorded the row would not choose itself.
    """
    del scores
    is_recorded = recorded(state)[:, None]
    taken = jnp.where(is_recorded, state.astype(jnp.int32), chosen)
    same = jnp.any(taken[:, :, None] == chosen[:, None, :], axis=2)
    return taken, jnp.sum(~same, axis=1)


def differing(cache: Cache) -> jax.Array:
    """i32[N]: the sum of the states that `replay` left, of all layers."""
    return sum(state.sum(axis=0) if state.ndim > 1 else state for state in jax.tree.leaves(cache))
