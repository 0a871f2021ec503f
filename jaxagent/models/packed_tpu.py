"""Attention of packed training rows on TPUs: jax's Splash attention, the only file that imports it.

It skips the blocks that causality hides and masks by segment inside the others. Heads are padded to the 128 lanes of a
TPU's registers; what the padding adds is zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

LANES = 128
_BLOCK = 512  # queries and keys of one step of the kernel, where the row is long enough


def supports(row_tokens: int) -> bool:
    """Whether rows can be cut into blocks of whole registers."""
    return row_tokens % LANES == 0


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
    one = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((t, t))] * heads),
        block_sizes=_blocks(t),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    ids = splash_attention_kernel.SegmentIds(q=segments, kv=segments)
    return jax.vmap(one)(q, k, v, segment_ids=ids)[..., :d].swapaxes(1, 2)


def _blocks(row_tokens: int) -> splash_attention_kernel.BlockSizes:
    size = max(n for n in (_BLOCK, _BLOCK // 2, LANES) if row_tokens % n == 0)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    return splash_attention_kernel.BlockSizes(**dict.fromkeys(names, size))
