"""Attention on NVIDIA GPUs: over pages of keys by a kernel of our own (Pallas, through Triton), and within packed
training rows by tokamax's flash attention.

The arithmetic of `attention.attend_pages`, page after page with a running softmax: a program of the grid is one row and
one key head, also where rows share a sequence. What a row gets therefore depends on its own sequence alone, and the
engine's cache and the trainer's packed rows can share the kernel (docs/design.md, "Exact numerics").

In packed rows a query's keys are those from the first of its own segment to itself, and blocks of keys outside are
skipped. tokamax exports neither the operation's object nor its mask, hence the private import.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxagent.models.layers import MASKED

_LEAST = 16  # rows of the smallest tensor-core product, and its depth
_WARPS, _STAGES = 4, 3  # of one program; three pages of keys and values are on their way at a time


def supports_pages(head_dim: int, page_tokens: int) -> bool:
    """Whether the kernel has tiles for these sizes: powers of two, 16 or more."""
    return all(size >= _LEAST and size & (size - 1) == 0 for size in (head_dim, page_tokens))


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
    """As `attention.attend_pages`, by a Triton kernel. `interpret` runs the kernel without a GPU, for tests."""
    n, h, d = q.shape
    kv_heads = keys.shape[1]
    group = h // kv_heads
    rows = max(_LEAST, 1 << (group - 1).bit_length())
    q = (q * jnp.asarray(d**-0.5, q.dtype)).reshape(n, kv_heads, group, d)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    own = pl.BlockSpec((None, None, rows, d), lambda i, head: (i, head, 0, 0))
    unblocked = pl.BlockSpec(memory_space=pl.ANY)
    index = [positions, blocks, *([] if starts is None else [starts])]
    out = pl.pallas_call(
        functools.partial(_kernel, page_tokens=page_tokens, share=n // len(blocks), moving=starts is not None),
        grid=(n, kv_heads),
        in_specs=[own, *[unblocked] * (len(index) + 2)],
        out_specs=own,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name="paged_attention",
    )(q, *index, keys, values)
    return out[:, :, :group].reshape(n, h, d)


def _kernel(q_ref, positions_ref, blocks_ref, *refs, page_tokens: int, share: int, moving: bool) -> None:
    starts_ref = refs[0] if moving else None
    keys_ref, values_ref, out_ref = refs[-3:]
    row, head = pl.program_id(0), pl.program_id(1)
    q = q_ref[...]
    position, sequence = positions_ref[row], row // share
    last = blocks_ref.shape[1] - 1
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)

    def page(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, acc = carry
        block = blocks_ref[sequence, jnp.minimum(j, last)]
        columns = pl.ds(starts_ref[sequence] + j * page_tokens, page_tokens) if moving else slice(None)
        keys, values = keys_ref[block, head, :, columns], values_ref[block, head, columns, :]
        scores = dot(q, keys.astype(q.dtype))
        visible = (j * page_tokens + jnp.arange(page_tokens) <= position)[None]
        scores = jnp.where(visible, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=1))
        weights = jnp.where(visible, jnp.exp(scores - new_peak[:, None]), 0.0)
        keep = jnp.exp(peak - new_peak)
        out = dot(weights.astype(q.dtype), values.astype(q.dtype))
        return new_peak, total * keep + weights.sum(axis=1), acc * keep[:, None] + out

    rows, d = q.shape
    zeros = jnp.zeros((rows, d), jnp.float32)
    start = (jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32), zeros)
    _, total, acc = jax.lax.fori_loop(0, position // page_tokens + 1, page, start)
    out_ref[...] = (acc / total[:, None]).astype(out_ref.dtype)


def attend(segments: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention inside segments, differentiable.

    Args:
      segments: i32[B, T], equal where tokens belong together, and those lie side by side.
      q: bf16[B, T, H, D]; k, v: bf16[B, T, K, D].

    Returns:
      bf16[B, T, H, D].
    """
    from tokamax._src.ops.attention.base import Mask

    return _flash_attention()(q, k, v, mask=Mask(k_start=first_of_segment(segments)[:, None], is_causal=True))


def attend_between(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """Attention to the keys first..last of each query, differentiable; see `blockwise.attend`, also for the shapes."""
    from tokamax._src.ops.attention.base import Mask

    return _flash_attention()(q, k, v, mask=Mask(k_start=first[:, None], k_end=last[:, None] + 1))


def first_of_segment(segments: jax.Array) -> jax.Array:
    """i32[B, T]: where the segment of each token begins."""
    column = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    begins = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    return jax.lax.cummax(jnp.where(begins, column, 0), axis=1)


def _flash_attention():
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    return PallasMosaicGpuFlashAttention()
