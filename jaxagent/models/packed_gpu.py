"""Attention of packed training rows on NVIDIA GPUs: tokamax's flash attention, the only file that imports it.

Packing costs no memory there: a query's keys are those from the first of its own segment to itself, and blocks of keys
outside are skipped. tokamax exports neither the operation's object nor its mask, hence the private import.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attend(segments: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention inside segments, differentiable.

    Args:
      segments: i32[B, T], equal where tokens belong together, and those lie side by side.
      q: bf16[B, T, H, D]; k, v: bf16[B, T, K, D].

    Returns:
      bf16[B, T, H, D].
    """
    from tokamax._src.ops.attention.base import Mask

    return _kernel()(q, k, v, mask=Mask(k_start=first_of_segment(segments)[:, None], is_causal=True))


def attend_between(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """Attention to the keys first..last of each query, differentiable; see `blockwise.attend`, also for the shapes."""
    from tokamax._src.ops.attention.base import Mask

    return _kernel()(q, k, v, mask=Mask(k_start=first[:, None], k_end=last[:, None] + 1))


def first_of_segment(segments: jax.Array) -> jax.Array:
    """i32[B, T]: where the segment of each token begins."""
    column = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    begins = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    return jax.lax.cummax(jnp.where(begins, column, 0), axis=1)


def _kernel():
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    return PallasMosaicGpuFlashAttention()
