"""The forward pass over flat rows: (token, position) rows in, hidden states out.

It knows nothing of batches, segments, slots or caches: those live in the `attend` callback, so that one function
serves packed training, reference scoring, prefill and decode.
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxagent.models import context, rope, sharding, trees
from jaxagent.models.attention import Attend, packed
from jaxagent.models.layers import Int8Array, LoraArray, contract, rms_norm, swiglu
from jaxagent.models.params import Layers, Params, param_specs
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
) -> tuple[jax.Array, Any]:
    """Hidden states of each row after the final norm.

    Args:
      params: the model; stored in any layout, each layer's weights are gathered over fsdp when used.
      spec: its spec.
      tokens: i32[N]; how N is split over the mesh is read from its type and kept throughout.
      positions: i32[N], place of the token in its own sequence.
      attend: one layer's attention, see `attention.Attend`.
      cache: what `attend` gets and returns per layer. Scanned: one tree with a leading L axis on each leaf.
        Unrolled: a sequence of L trees.
      unroll: False scans over the stacked layers (training: small programs); True writes them out, as is always done
        where the layers are no stack (the engine: a scan would copy every layer's weights out of it at every step).

    Returns:
      (x compute_dtype[N, E], the new cache, in the form it came).
    """
    chex.assert_rank([tokens, positions], 1)
    chex.assert_equal_shape([tokens, positions])
    chex.assert_type([tokens, positions], int)
    x = embed(params, spec, tokens)
    angles = rope.table(spec, positions)

    def run_layer(x: jax.Array, layer: Layers, layer_cache: Any) -> tuple[jax.Array, Any]:
        return _layer(layer, spec, x, angles, attend, layer_cache)

    run_layer = _rematerialise(run_layer, spec.remat)
    if unroll or isinstance(params.layers, tuple):
        new_cache = []
        for i, layer in enumerate(unstack(params.layers)):
            x, layer_cache = run_layer(x, layer, cache[i] if cache is not None else None)
            new_cache.append(layer_cache)
        cache = None if cache is None else type(cache)(new_cache)
    else:
        x, cache = lax.scan(lambda x, layer_and_cache: run_layer(x, *layer_and_cache), x, (params.layers, cache))
    return rms_norm(x, sharding.constrain(params.final_norm, P(None)), spec.norm_eps), cache


def forward_packed(
    params: Params,
    spec: ModelSpec,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    head_positions: jax.Array,
    ends: jax.Array | None = None,
    longest: int = 0,
) -> jax.Array:
    """Hidden states at the R places of each packed row whose NEXT token is a target.

    Args:
      params, spec: the model.
      tokens, positions, segments: i32[B, T]; segments 0 is padding; B split over data and fsdp. Where the type of
        `tokens` splits T over context, so does the forward pass.
      head_positions: i32[B, R], indices into T; unused ones may point anywhere inside the row.
      ends, longest: of rows in which sequences share their beginnings, see `trees.shared`; None: they share nothing.

    Returns:
      compute_dtype[B, R, E]; R split as T is.
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
    # Written out, layers need no stacking of what backward keeps; of a deep model that would take minutes to compile.
    x, _ = hidden(
        params,
        spec,
        flat(tokens),
        flat(positions),
        attend,
        unroll=spec.remat == "none" and spec.num_layers <= MOST_WRITTEN_OUT,
    )
    if split:
        return context.at(x, t, head_positions)
    return jnp.take_along_axis(sharding.split_rows(x, b, t), head_positions[:, :, None], axis=1)


@jax.named_scope("embed")
def embed(params: Params, spec: ModelSpec, tokens: jax.Array) -> jax.Array:
    """Rows of the embedding array: compute_dtype[N, E] for tokens i32[N]."""
    chex.assert_rank(tokens, 1)
    chex.assert_type(tokens, int)
    rows = sharding.row_axes(tokens)
    weights = params.embed.after(tokens) if isinstance(params.embed, Int8Array) else params.embed
    table = sharding.constrain(weights.astype(spec.compute_dtype), P("tensor", None))
    return table.at[tokens].get(out_sharding=sharding.out(rows, None))


def unstack(layers: Layers | tuple[Layers, ...]) -> tuple[Layers, ...]:
    """The stacked layers as a tuple of single layers. `hidden` takes either; a decode loop slices once, outside."""
    if isinstance(layers, tuple):
        return layers

    def layer_at(i: int) -> Layers:
        return jax.tree.map(lambda w: w[i], layers)

    return tuple(layer_at(i) for i in range(layers.attn_norm.shape[0]))


def _layer(
    layer: Layers, spec: ModelSpec, x: jax.Array, angles: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
) -> tuple[jax.Array, Any]:
    """One decoder layer on x[N, E]: attention and MLP, each behind a norm, each added to the residual stream."""
    rows = sharding.row_axes(x)
    layer = _gather(layer, spec, x)
    with jax.named_scope("attention"):
        h = rms_norm(x, layer.attn_norm, spec.norm_eps)
        q = contract("ne,ehd->nhd", h, layer.wq)
        k = contract("ne,ekd->nkd", h, layer.wk)
        v = contract("ne,ekd->nkd", h, layer.wv)
        if spec.qkv_bias:
            q, k, v = q + layer.bq, k + layer.bk, v + layer.bv
        if spec.qk_norm:
            q, k = rms_norm(q, layer.q_norm, spec.norm_eps), rms_norm(k, layer.k_norm, spec.norm_eps)
        attended, cache = attend(cache, rope.rotate(q, *angles), rope.rotate(k, *angles), v)
        x = x + contract("nhd,hde->ne", attended, layer.wo, sharding.out(rows, None))
    with jax.named_scope("mlp"):
        h = rms_norm(x, layer.mlp_norm, spec.norm_eps)
        x = x + swiglu(h, layer.w_gate, layer.w_up, layer.w_down, sharding.out(rows, None))
    return x, cache


def _gather(layer: Layers, spec: ModelSpec, x: jax.Array) -> Layers:
    """A layer's arrays in compute dtype and in the layout they are used in: whole over fsdp, split over tensor.

    Cast first, so that the all-gather moves compute_dtype bytes. Backward, its transpose scatters gradients back.
    """

    def laid_out(array, w: jax.Array | Int8Array | LoraArray) -> jax.Array | LoraArray:
        where = sharding.COMPUTE.partition(array.axes[1:])
        if isinstance(w, LoraArray):
            return w.laid_out(spec.compute_dtype, where)
        w = w.after(x) if isinstance(w, Int8Array) else w  # one layer at a time
        return sharding.constrain(w.astype(spec.compute_dtype), where)

    return jax.tree.map(laid_out, param_specs(spec).layers, layer)


def _rematerialise(layer, policy: str):
    """What the backward pass keeps of a layer: everything, its matrix products, or its input only."""
    if policy == "none":
        return layer
    if policy == "dots":
        return jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return jax.checkpoint(layer)
