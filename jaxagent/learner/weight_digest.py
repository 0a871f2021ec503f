"""A digest of weights, computed where they lie: 128 bits of every bit of every array, its name, dtype, shape and order.

Each element's bits are mixed with its position into four words of 32 bits, and the words are summed: a sum of integers
is the same in any order, so that equal weights have equal digests on every mesh. A change of one element always changes
the digest; of several it is as good as random. It finds accidents, at every step, since nothing leaves the device but
the four words. It is no signature: who can choose weights makes two trees with one digest in a second. Where somebody
may have chosen them, replay compares SHA-256 of all bytes (`runs/again/stored.py`).
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LANES = (0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834)
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by an element's bytes; 8: as two of 4


def digest(tree: Any) -> str:
    """32 hex digits of a tree of arrays. Call under `jax.set_mesh` of their mesh; compiled once per tree of shapes."""
    return "".join(f"{int(word):08x}" for word in np.asarray(_words(tree)))


@jax.jit
def _words(tree: Any) -> jax.Array:
    """u32[4]."""
    total = jnp.zeros(len(_LANES), jnp.uint32)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = f"{jax.tree_util.keystr(path, simple=True, separator='.')} {leaf.dtype} {leaf.shape}"
        total += _of_leaf(leaf, zlib.crc32(name.encode()))
    return total


def _of_leaf(leaf: jax.Array, name: int) -> jax.Array:
    """u32[4] of one array."""
    if leaf.dtype == jnp.bool:
        leaf = leaf.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize]).astype(jnp.uint32)
    position, stride = jnp.full((), name, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        place = jax.lax.iota(jnp.uint32, bits.shape[axis]) * jnp.uint32(stride % 2**32)
        position = position + jnp.expand_dims(place, [other for other in range(bits.ndim) if other != axis])
        stride *= bits.shape[axis]
    mixed = _mixed(bits ^ _mixed(position))  # for one position another value of the bits is another value of this
    lanes = [jnp.sum(_mixed(mixed ^ jnp.uint32(lane)), dtype=jnp.uint32) for lane in _LANES]
    return _mixed(jnp.stack(lanes) + jnp.uint32(name))


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every bit of the result depends on every bit given: MurmurHash3's finaliser."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
