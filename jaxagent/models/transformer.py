"""The forward pass over flat rows: (token, position) rows in, hidden states out.

It knows nothing of batches, segments, slots or caches: those live in the `attend` callback, so that one function
serves packed training, reference scoring, prefill and decode. Nor of what a layer computes: that its blocks say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxagent.models import balance, choices, context, recurrence, rope, sharding, trees
from jaxagent.models.attention import Attend, packed
from jaxagent.models.blocks import Cache, Choose, FlatRows, LayerBlock, State
from jaxagent.models.layers import KEPT, Int8Array, LoraArray, gain, rms_norm
from jaxagent.models.params import Layers, Params, in_order, param_specs, stacks_of, unstack
from jaxagent.models.recurrence import Recurrence
from jaxagent.models.spec import ModelSpec

MOST_WRITTEN_OUT = 8  # layers of a packed forward pass that are a program's own lines, and not turns of a loop


def hidden(
    params: Params,
    spec: ModelSpec,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    cache: Any = None,
    unroll: bool = False,
    recur: Recurrence | None = None,
    choose: Choose | None = None,
) -> tuple[jax.Array, Any]:
    """Hidden states of each row after the final norm.

    Args:
      params: the model; stored in any layout, each layer's weights are gathered over fsdp when used.
      spec: its spec.
      tokens: i32[N]; how N is split over the mesh is read from its type and kept throughout.
      positions: i32[N], place of the token in its own sequence.
      attend: one layer's attention, see `attention.Attend`.
      cache: `Cache`, what the blocks get and return, see `init_cache`; None: nothing. Where layers are scanned, that of
        one layer for each of `ModelSpec.stacks`, of arrays with the stack's layers in front.
      unroll: False scans over the stacked layers (training: small programs); True writes them out, as is always done
        where the layers are no stack (the engine: a scan would copy every layer's weights out of it at every step).
      recur: for blocks with a memory of fixed size.
      choose: what becomes of the choices of blocks that make any.

    Returns:
      (x compute_dtype[N, E], the new cache).
    """
    chex.assert_rank([tokens, positions], 1)
    chex.assert_equal_shape([tokens, positions])
    chex.assert_type([tokens, positions], int)
    x = embed(params, spec, tokens)
    rows = FlatRows(rope.table(spec, positions), attend, recur, choose)
    scanned = is_scanned(params, unroll)

    def runner(layers: range, arrays: Layers) -> Callable[..., tuple[jax.Array, tuple[State, ...]]]:
        blocks = spec.pattern[layers[0]]

        def run_layer(x: jax.Array, layer: Layers, states: tuple[State, ...]) -> tuple[jax.Array, tuple[State, ...]]:
            return _layer(blocks, _gather(arrays, layer, spec, x), spec, x, rows, states)

        return _rematerialise(run_layer, spec.remat, scanned and len(layers) > 1)

    kinds = list(map(runner, spec.stacks, stacks_of(param_specs(spec).layers)))
    nothing = [(None,) * len(spec.pattern[layers[0]]) for layers in spec.stacks]
    order = in_order(list(map(len, spec.stacks)))
    if not scanned:
        new = []
        for i, layer in enumerate(unstack(params.layers)):
            kind, _ = order[i]
            x, states = kinds[kind](x, layer, nothing[kind] if cache is None else cache[i])
            new.append(states)
        cache = None if cache is None else tuple(new)
    else:

        def period(x: jax.Array, turn: tuple[list[Layers], Cache]) -> tuple[jax.Array, Cache]:
            new = []
            for run_layer, layer, states in zip(kinds[alone:], *turn, strict=True):
                x, states = run_layer(x, layer, states)
                new.append(states)
            return x, tuple(new)

        stacks, alone = stacks_of(params.layers), sum(len(layers) < len(spec.stacks[-1]) for layers in spec.stacks)
        of_stacks, new = tuple(nothing) if cache is None else cache, []
        for run_layer, *first in zip(kinds[:alone], stacks, of_stacks, strict=False):
            x, states = run_layer(x, *jax.tree.map(lambda w: w[0], first))
            new.append(jax.tree.map(lambda a: a[None], states))
        x, repeated = lax.scan(period, x, (stacks[alone:], of_stacks[alone:]))
        cache = None if cache is None else (*new, *repeated)
    return rms_norm(x, gain(sharding.constrain(params.final_norm, P(None)), spec), spec.norm_eps), cache


def init_cache(
    spec: ModelSpec, pages: int, page_tokens: int, memories: int, dtype: str, records: bool = False
) -> Cache:
    """What all blocks of all layers keep, in pages or in memories (`LayerBlock`); separate arrays, to be donated.

    With `records` pages [P, page_tokens, k] of what it has chosen for each token, for a block that chooses.
    """

    def state_of(block: LayerBlock) -> State:
        if records and block.choices[0]:
            shape = pages, page_tokens, block.choices[0]
            return jnp.zeros(shape, choices.dtype(spec), out_sharding=P(sharding.FLAT, None, None))
        if block.has_memory:
            return block.init_memory(spec, memories, dtype)
        return block.init_state(spec, pages, page_tokens, dtype)

    kinds = spec.pattern
    layers = (kinds[i % len(kinds)] for i in range(spec.num_layers))
    return tuple(tuple(map(state_of, blocks)) for blocks in layers)


def is_scanned(params: Params, unroll: bool) -> bool:
    """Whether the layers are turns of a loop."""
    return not unroll and not isinstance(params.layers, tuple)


def forward_packed(
    params: Params,
    spec: ModelSpec,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    head_positions: jax.Array,
    ends: jax.Array | None = None,
    longest: int = 0,
    recorded: jax.Array | None = None,
    watch: bool = False,
) -> tuple[jax.Array, jax.Array | None, balance.Load | None]:
    """Hidden states at the R places of each packed row whose NEXT token is a target.

    Args:
      params, spec: the model.
      tokens, positions, segments: i32[B, T]; segments 0 is padding; B split over data and fsdp. Where the type of
        `tokens` splits T over context, so does the forward pass.
      head_positions: i32[B, R], indices into T; unused ones may point anywhere inside the row.
      ends, longest: of rows in which sequences share their beginnings, see `trees.shared`; None: they share nothing.
      recorded: [B, T, W] what blocks shall choose for each token, see `choices.replay`; None: nobody says it.
      watch: whether the load of experts is wanted.

    Returns:
      (compute_dtype[B, R, E]; R split as T is, with `recorded` f32[B, R] how many of a token's would be chosen anew,
      with `watch` the load of experts by all tokens).
    """
    chex.assert_rank([tokens, head_positions], 2)
    chex.assert_equal_shape([tokens, positions, segments])
    chex.assert_equal_shape_prefix([tokens, head_positions], 1)
    chex.assert_type([tokens, positions, segments, head_positions], int)
    b, t = tokens.shape
    split = sharding.is_over_context(tokens)
    flat = context.flat if split else lambda x: sharding.merge_rows(jnp.asarray(x))
    if split:
        assert ends is None, "rows split over context hold every sequence whole"
        attend = context.packed(segments)
    else:
        attend = packed(segments) if ends is None else trees.shared(ends, longest)
    assert not spec.has_memory or ends is None, "a memory takes rows of whole sequences"
    # Written out, layers need no stacking of what backward keeps; of a deep model that would take minutes to compile.
    unroll = spec.remat == "none" and spec.num_layers <= MOST_WRITTEN_OUT
    cache = choose = load = None
    scanned = is_scanned(params, unroll)
    if recorded is not None:
        cache, choose = choices.states(spec, flat(recorded), scanned), choices.replay
    if watch:
        cache = choices.states(spec, None, scanned) if cache is None else cache
        choose = balance.watching(flat(segments) > 0, choose)
    recur = context.SplitRows(segments) if split else recurrence.PackedRows(segments)
    x, new = hidden(params, spec, flat(tokens), flat(positions), attend, cache, unroll, recur, choose)

    if watch:
        load, new = balance.load_of(spec, new, scanned), balance.without(new)

    def at_heads(x: jax.Array) -> jax.Array:
        if split:
            return context.at(x, t, head_positions)
        return jnp.take_along_axis(sharding.split_rows(x, b, t), head_positions[:, :, None], axis=1)

    if recorded is None:
        return at_heads(x), None, load
    return at_heads(x), at_heads(choices.differing(new)[:, None].astype(jnp.float32))[:, :, 0], load


@jax.named_scope("embed")
def embed(params: Params, spec: ModelSpec, tokens: jax.Array) -> jax.Array:
    """Rows of the embedding array: compute_dtype[N, E] for tokens i32[N]."""
    chex.assert_rank(tokens, 1)
    chex.assert_type(tokens, int)
    rows = sharding.row_axes(tokens)
    weights = params.embed.after(tokens) if isinstance(params.embed, Int8Array) else params.embed
    table = sharding.constrain(weights.astype(spec.compute_dtype), P("tensor", None))
    return table.at[tokens].get(out_sharding=sharding.out(rows, None))


def _layer(
    blocks: tuple[LayerBlock, ...],
    layer: Layers,
    spec: ModelSpec,
    x: jax.Array,
    rows: FlatRows,
    states: tuple[State, ...],
) -> tuple[jax.Array, tuple[State, ...]]:
    """One decoder layer on x[N, E]: what each block makes of it is added to the residual stream."""
    new = []
    for block, state in zip(blocks, states, strict=True):
        with jax.named_scope(type(block).__name__.lower()):
            added, state = block.apply(layer, spec, x, rows, state)
            x = checkpoint_name(x + added, "stream")
        new.append(state)
    return x, tuple(new)


def _gather(arrays: Layers, layer: Layers, spec: ModelSpec, x: jax.Array) -> Layers:
    """A layer's arrays in compute dtype and in the layout they are used in: whole over fsdp, split over tensor.

    Cast first, so that the all-gather moves compute_dtype bytes. Backward, its transpose scatters gradients back.
    """

    def laid_out(array, w: jax.Array | Int8Array | LoraArray) -> jax.Array | LoraArray:
        where = sharding.COMPUTE.partition(array.axes[1:])  # without the stack's
        if isinstance(w, LoraArray):
            return w.laid_out(spec.compute_dtype, where)
        w = w.after(x) if isinstance(w, Int8Array) else w  # one layer at a time
        return sharding.constrain(w.astype(array.dtype_among(spec.compute_dtype)), where)

    return jax.tree.map(laid_out, arrays, layer)


def _rematerialise(layer, policy: str, scanned: bool):
    """What the backward pass keeps of a layer beside its input, see `ModelConfig.remat`.

    Layers of a loop need no barrier that keeps the compiler from computing forward values once for both passes, as
    jax.checkpoint has it: behind one, everything that was kept would be copied out of its stack before it is read.
    """
    policies, named = jax.checkpoint_policies, jax.checkpoint_policies.save_only_these_names
    products = policies.dots_with_no_batch_dims_saveable
    if policy in ("none", "auto"):  # a run has put a setting in the place of "auto"; elsewhere nothing runs backward
        return layer
    kept = {
        "products": policies.save_from_both_policies(products, named(KEPT)),
        "dots": products,
        "attention": named(KEPT, "stream"),
        "layer": None,
    }
    return jax.checkpoint(layer, policy=kept[policy], prevent_cse=not scanned)
