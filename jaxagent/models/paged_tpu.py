"""Attention of rows over pages of keys, as one TPU kernel (Pallas, through Mosaic).

The arithmetic of `attention.attend_pages`, page after page with a running softmax: a step of the grid is one page of
one sequence, for all its key heads and for the rows that share it. The tables lie in scalar memory, so the next page is
on its way while this one is computed; past a sequence's last page the index stays where it is and nothing is read.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
_LEAST = 16  # rows of the smallest product: the sublanes of a register of bfloat16
_MASKED = -1e30


def supports(head_dim: int, page_tokens: int) -> bool:
    """Whether a page fills whole registers either way round."""
    return head_dim % LANES == 0 and page_tokens % LANES == 0


def attend_pages(
    q: jax.Array,
    positions: jax.Array,
    page_tokens: int,
    keys: jax.Array,
    values: jax.Array,
    blocks: jax.Array,
    starts: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """See `attention.attend_pages`, whose arguments these are. `interpret`: without a TPU, for tests.

    Pages that begin anywhere (`starts`, exact scoring) are first copied into a pool of their own: registers cannot be
    cut at any lane. Every row then costs a copy of its sequence.
    """
    if starts is not None:
        keys, values, blocks = _lay_out(keys, values, blocks[:, 0], starts, page_tokens)
    n, h, d = q.shape
    m, most_pages = blocks.shape
    kv_heads, share = keys.shape[1], n // m
    group = h // kv_heads
    used = share * group
    rows = -(-used // _LEAST) * _LEAST
    folded = (q * jnp.asarray(d**-0.5, q.dtype)).reshape(m, share, kv_heads, group, d).swapaxes(1, 2)
    folded = jnp.pad(folded.reshape(m, kv_heads, used, d), ((0, 0), (0, 0), (0, rows - used), (0, 0)))
    last = jnp.pad(jnp.repeat(positions.reshape(m, share), group, axis=1), ((0, 0), (0, rows - used)))[..., None]
    pages = jnp.max(positions.reshape(m, share), axis=1) // page_tokens + 1  # of each sequence

    def page_at(i: jax.Array, j: jax.Array, pages: jax.Array, blocks: jax.Array) -> tuple:
        return blocks[i * most_pages + jnp.minimum(j, jnp.minimum(pages[i], most_pages) - 1)], 0, 0, 0

    own = lambda *shape: pl.BlockSpec((None, *shape), lambda i, j, *_: (i, *(0,) * len(shape)))  # noqa: E731
    out = pl.pallas_call(
        functools.partial(_kernel, page_tokens=page_tokens),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(m, most_pages),
            in_specs=[
                own(rows, 1),
                own(kv_heads, rows, d),
                pl.BlockSpec((None, *keys.shape[1:]), page_at),
                pl.BlockSpec((None, *values.shape[1:]), page_at),
            ],
            out_specs=own(kv_heads, rows, d),
            scratch_shapes=[
                pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
                pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
                pltpu.VMEM((kv_heads, rows, d), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(folded.shape, q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_attention",
    )(pages, blocks.reshape(-1), last, folded, keys, values)
    return out[:, :, :used].reshape(m, kv_heads, share, group, d).swapaxes(1, 2).reshape(n, h, d)


def _kernel(
    pages_ref, blocks_ref, last_ref, q_ref, keys_ref, values_ref, out_ref, peak_ref, total_ref, acc_ref, *, page_tokens
) -> None:
    del blocks_ref  # read by the index maps
    sequence, j = pl.program_id(0), pl.program_id(1)
    kv_heads, rows, _ = q_ref.shape
    precision = jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    dot = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)

    @pl.when(j == 0)
    def _() -> None:
        peak_ref[...] = jnp.full(peak_ref.shape, _MASKED, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    @pl.when(j < pages_ref[sequence])
    def _() -> None:
        column = j * page_tokens + jax.lax.broadcasted_iota(jnp.int32, (rows, page_tokens), 1)
        visible = column <= last_ref[...]
        for head in range(kv_heads):
            q = q_ref[head]
            scores = jnp.where(visible, dot(q, keys_ref[head].astype(q.dtype)), _MASKED)
            peak = peak_ref[head]
            new_peak = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
            weights = jnp.where(visible, jnp.exp(scores - new_peak), 0.0)
            keep = jnp.exp(peak - new_peak)
            peak_ref[head] = new_peak
            total_ref[head] = total_ref[head] * keep + weights.sum(axis=1, keepdims=True)
            acc_ref[head] = acc_ref[head] * keep + dot(weights.astype(q.dtype), values_ref[head].astype(q.dtype))

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        out_ref[...] = (acc_ref[...] / total_ref[...]).astype(out_ref.dtype)


def _lay_out(
    keys: jax.Array, values: jax.Array, block: jax.Array, starts: jax.Array, page_tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pages of their own for sequences that begin anywhere in a block: (keys, values, blocks) of `attend_pages`."""
    _, kv_heads, head_dim, depth = keys.shape
    count = depth // page_tokens
    at = starts[:, None] + jnp.arange(count) * page_tokens  # past the end it is clamped, and masked by the position

    def one(block: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        page = jax.lax.dynamic_slice(keys, (block, 0, 0, start), (1, kv_heads, head_dim, page_tokens))
        value = jax.lax.dynamic_slice(values, (block, 0, start, 0), (1, kv_heads, page_tokens, head_dim))
        return page[0], value[0]

    own_keys, own_values = jax.vmap(jax.vmap(one, (None, 0)))(block, at)
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    return flat(own_keys), flat(own_values), jnp.arange(len(block) * count, dtype=jnp.int32).reshape(-1, count)
