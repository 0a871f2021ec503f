"""Attention on TPUs: over pages of keys, and writing those pages, by two kernels (Pallas, through Mosaic); and within
packed training rows by jax's Splash attention.

The arithmetic of `attention.attend_pages`, page after page with a running softmax: a step of the grid is one page of
one sequence, for all its key heads and for the rows that share it. The tables lie in scalar memory, so the next page is
on its way while this one is computed; past a sequence's last page the index stays where it is and nothing is read.

New tokens are written by a kernel of its own: XLA's scatter wants pages in another layout than this one, and would
copy the whole cache into that layout and back in every step of decode.

Splash attention skips the blocks that causality hides and masks by segment inside the others. Heads are padded to the
128 lanes of a TPU's registers; what the padding adds is zeros.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from jaxagent.models.layers import MASKED, cut

LANES = 128
_BLOCK = 512  # queries and keys of one step of Splash attention, where the row is long enough
_LEAST = 16  # rows of the smallest product: the sublanes of a register of bfloat16


def supports_pages(head_dim: int, page_tokens: int) -> bool:
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
    """As `attention.attend_pages`, by a Mosaic kernel. `interpret` runs the kernel without a TPU, for tests.

    Pages that begin anywhere (`starts`, exact scoring) are first copied into a pool of their own: registers cannot be
    cut at any lane. Every row then costs a copy of its sequence.
    """
    if starts is not None:
        keys, values, blocks = _lay_out(keys, values, blocks[:, 0], starts, page_tokens)
    n, h, d = q.shape
    m, most_pages = blocks.shape
    kv_heads, share = keys.shape[1], n // m
    group = h // kv_heads
    queries = share * group
    rows = -(-queries // _LEAST) * _LEAST
    folded = (q * jnp.asarray(d**-0.5, q.dtype)).reshape(m, share, kv_heads, group, d).swapaxes(1, 2)
    folded = jnp.pad(folded.reshape(m, kv_heads, queries, d), ((0, 0), (0, 0), (0, rows - queries), (0, 0)))
    last = jnp.pad(jnp.repeat(positions.reshape(m, share), group, axis=1), ((0, 0), (0, rows - queries)))[..., None]
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
    return out[:, :, :queries].reshape(m, kv_heads, share, group, d).swapaxes(1, 2).reshape(n, h, d)


def write(
    keys: jax.Array,
    values: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    offset: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Puts one token per row into its page, in place.

    Args:
      keys, values: [P, K, D, C] and [P, K, C, D], given away.
      k, v: [N, K, D].
      page, offset: i32[N], where each goes. Rows of one page lie side by side; if rows apart name one page (the
        unused page, which nothing reads), any of them may win.
      interpret: without a TPU, for tests.

    Returns:
      The same arrays with the tokens in them.
    """
    n, kv_heads, d = k.shape
    at = lambda i, page, _: (page[i], 0, 0, 0)  # noqa: E731
    own = lambda *shape: pl.BlockSpec((None, *shape), lambda i, *_: (i, 0, 0, 0))  # noqa: E731
    pages = [pl.BlockSpec((None, *x.shape[1:]), at) for x in (keys, values)]
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type) for x in (keys, values)
    ]
    return pl.pallas_call(
        _write_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(n,),
            in_specs=[own(kv_heads, d, 1), own(kv_heads, 1, d), *pages],
            out_specs=pages,
        ),
        out_shape=shapes,
        input_output_aliases={4: 0, 5: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_write",
    )(page, offset, k.astype(keys.dtype)[..., None], v.astype(values.dtype)[:, :, None], keys, values)


def _write_kernel(page_ref, offset_ref, k_ref, v_ref, keys_ref, values_ref, new_keys_ref, new_values_ref) -> None:
    row = pl.program_id(0)
    page, offset = page_ref[row], offset_ref[row]

    @pl.when((row == 0) | (page_ref[jnp.maximum(row - 1, 0)] != page))
    def _() -> None:  # the page has just arrived; rows of the same page that follow find it in the output
        new_keys_ref[...] = keys_ref[...]
        new_values_ref[...] = values_ref[...]

    lane = jax.lax.broadcasted_iota(jnp.int32, new_keys_ref.shape, 2)
    new_keys_ref[...] = jnp.where(lane == offset, k_ref[...], new_keys_ref[...])
    sublane = jax.lax.broadcasted_iota(jnp.int32, new_values_ref.shape, 1)
    new_values_ref[...] = jnp.where(sublane == offset, v_ref[...], new_values_ref[...])


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
        peak_ref[...] = jnp.full(peak_ref.shape, MASKED, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    @pl.when(j < pages_ref[sequence])
    def _() -> None:
        column = j * page_tokens + jax.lax.broadcasted_iota(jnp.int32, (rows, page_tokens), 1)
        visible = column <= last_ref[...]
        for head in range(kv_heads):
            q = q_ref[head]
            scores = jnp.where(visible, dot(q, keys_ref[head].astype(q.dtype)), MASKED)
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
    count = keys.shape[-1] // page_tokens
    at = starts[:, None] + jnp.arange(count) * page_tokens  # past the end it is moved back, and masked by the position
    blocks = jnp.repeat(block, count)
    own_keys, own_values = cut(keys, values, blocks, at.reshape(-1), page_tokens)
    return own_keys, own_values, jnp.arange(len(blocks), dtype=jnp.int32).reshape(-1, count)


def attend(segments: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, interpret: bool = False) -> jax.Array:
    """Causal attention inside segments, differentiable.

    Args:
      segments: i32[B, T], equal where tokens belong together; T a multiple of 128.
      q: [B, T, H, D]; k, v: [B, T, K, D].
      interpret: without a TPU, for tests.

    Returns:
      [B, T, H, D] in the dtype of `q`.
    """
    t, heads, d = q.shape[1:]
    q = q * jnp.asarray(d**-0.5, q.dtype)  # the kernel itself does not scale
    q, k, v = (jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, 0), (0, -d % LANES))) for x in (q, k, v))
    attend_heads = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((t, t))] * heads),
        block_sizes=_blocks(t),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    ids = splash_attention_kernel.SegmentIds(q=segments, kv=segments)
    return jax.vmap(attend_heads)(q, k, v, segment_ids=ids)[..., :d].swapaxes(1, 2)


def _blocks(row_tokens: int) -> splash_attention_kernel.BlockSizes:
    size = max(n for n in (_BLOCK, _BLOCK // 2, LANES) if row_tokens % n == 0)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    return splash_attention_kernel.BlockSizes(**dict.fromkeys(names, size))
