"""What every way to attend to pages of keys has in common."""

from __future__ import annotations

import chex
import jax

# A finite stand-in for -inf: a row with nothing to see then gives a mean of values instead of NaN.
MASKED = -1e30


def cut(
    keys: jax.Array, values: jax.Array, block: jax.Array, start: jax.Array, page_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The page of each sequence that begins at any token of a block.

    Args:
      keys, values: [B, K, D, C] and [B, K, C, D].
      block, start: i32[m].
      page_tokens: of a page.

    Returns:
      [m, K, D, page_tokens] and [m, K, page_tokens, D]. A start too near the end of its block is moved back.
    """
    chex.assert_rank([keys, values, block, start], [4, 4, 1, 1])
    chex.assert_equal_shape([block, start])
    chex.assert_type([block, start], int)
    _, kv_heads, head_dim, _ = keys.shape

    def one(block: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        page = jax.lax.dynamic_slice(keys, (block, 0, 0, start), (1, kv_heads, head_dim, page_tokens))
        value = jax.lax.dynamic_slice(values, (block, 0, start, 0), (1, kv_heads, page_tokens, head_dim))
        return page[0], value[0]

    return jax.vmap(one)(block, start)
