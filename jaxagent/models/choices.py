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


def states(spec: ModelSpec, choices: jax.Array | None, scanned: bool) -> Cache:
    """Choices [N, W] as `transformer.hidden` hands them to the blocks: [N, k] for each that chooses; or nothing."""
    if choices is None:
        layers = [stack[0] for stack in spec.stacks] if scanned else range(spec.num_layers)
        return tuple((None,) * len(spec.pattern[layer % len(spec.pattern)]) for layer in layers)
    if not scanned:
        return tuple(tuple(c if c is None else choices[:, c] for c in blocks) for blocks in _columns(spec))
    columns = _columns(spec)

    def of_stack(layers: range, block: int) -> jax.Array | None:
        if columns[layers[0]][block] is None:
            return None
        return jnp.moveaxis(choices[:, np.stack([columns[layer][block] for layer in layers])], 1, 0)

    return tuple(tuple(of_stack(layers, i) for i in range(len(columns[layers[0]]))) for layers in spec.stacks)


def _columns(spec: ModelSpec) -> list[list[np.ndarray | None]]:
    """Which of the W are whose, i64[k], of each block of each layer; None: it chooses nothing."""
    at, columns = 0, []
    for layer in range(spec.num_layers):
        columns.append([])
        for block in spec.pattern[layer % len(spec.pattern)]:
            k, _ = block.choices
            columns[-1].append(np.arange(at, at + k) if k else None)
            at += k
    return columns


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
