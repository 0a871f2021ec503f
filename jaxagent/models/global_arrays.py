"""Arrays between the hosts' memory and a mesh, whose devices may be those of several processes.

Every process runs the same program on the same host values: all have the same batch. So a batch is placed without a
word between processes, each giving its own devices their rows. What devices of other processes hold is gathered
before it is read, and *every* process has to ask for it. In one process all of this is `device_put` and `device_get`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

Tree = Any  # a pytree of arrays
EXCHANGED_BYTES = 4 << 20  # of each process at once: so many, times the processes, are on a device


def put(tree: Tree, where: NamedSharding) -> Tree:
    """Places host arrays; every process gives the same ones.

    Args:
      tree: of NumPy arrays, whole.
      where: the layout of every leaf.
    """
    if where.is_fully_addressable:
        return jax.device_put(tree, where)

    def place(x: Any) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    # `device_put` would have all processes compare the values first, by a collective that has no time limit.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(place, tree)


def get(tree: Tree) -> Tree:
    """Copies arrays to the host, whole. Where other processes hold parts of them, each has to call this.

    What is gathered lies on every device for a moment, one array after another.
    """

    def readable(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return jax.device_get(_gather(x.sharding.mesh)(x))

    return jax.device_get(jax.tree.map(readable, tree))


def pieces(x: jax.Array, size: int, turn: int = 0, group: int = 256 << 20) -> dict[int, memoryview]:
    """The pieces of an array's bytes that this process is to copy: each is one process's, about as many for each.

    The devices lay the array out anew, group by group, so that whole pieces lie on one of them. For that every device
    has a group, with up to two rows of the array's first axis, for a moment; an array whose first axis is split is
    gathered along it. Where other processes hold parts of the array, each has to call this.

    Args:
      x: of at least one axis, on a mesh.
      size: of a piece, in bytes; the last one may be smaller.
      turn: of the array among others: with it the device changes that begins, since the last one may have fewer.
      group: most bytes that are laid out at once; at least a piece for each device.

    Returns:
      By number, the bytes of pieces in C order.
    """
    width, row, length = size // x.dtype.itemsize, math.prod(x.shape[1:]), x.shape[0]
    count, devices = -(-x.size // width), x.sharding.mesh.size
    per_group = devices * max(1, min(group // (devices * size), -(-count // devices)))  # pieces of a group
    rows = min(length, -(-per_group * width // row) + 1)
    firsts = range(0, count, per_group)
    padding = max(0, firsts[-1] * width + per_group * width - x.size)
    views: dict[int, memoryview] = {}
    shift = turn % devices * (per_group // devices)
    for first in firsts:
        begin = min(first * width // row, length - rows)
        with jax.set_mesh(x.sharding.mesh):
            laid_out = _laid_out(x, begin, first * width - begin * row, shift, rows, padding, per_group, width)
        for part in laid_out.addressable_shards:
            start = first + ((part.index[0].start or 0) - shift) % per_group
            for number, piece in enumerate(np.asarray(part.data)[: max(0, count - start)], start):
                views[number] = piece[: x.size - number * width].view(np.uint8).data
    return views


@functools.partial(jax.jit, static_argnames=("rows", "padding", "count", "width"))
def _laid_out(
    x: jax.Array, begin: int, offset: int, shift: int, rows: int, padding: int, count: int, width: int
) -> jax.Array:
    """The bits of [count, width] elements from `offset` behind row `begin` on, `shift` rows on, over all devices."""
    where = jax.typeof(x).sharding
    bits = jax.lax.bitcast_convert_type(
        x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    )  # a CPU gathers bfloat16 as float32
    part = jax.lax.dynamic_slice_in_dim(jax.reshard(bits, jax.P(None, *where.spec[1:])), begin, rows)
    padded = jnp.pad(jax.reshard(part, jax.P()).reshape(-1), (0, padding))
    elements = jax.lax.dynamic_slice_in_dim(padded, offset, count * width).reshape(count, width)
    return jax.reshard(jnp.roll(elements, shift, axis=0), jax.P(where.mesh.axis_names, None))


def everyones(own: bytes, sizes: Sequence[int]) -> list[bytes]:
    """What each process has, in their order, over the network between their devices; every process calls it.

    Args:
      own: of this process.
      sizes: bytes of each.
    """
    buffers, block = [bytearray() for _ in sizes], np.zeros(EXCHANGED_BYTES, np.uint8)
    for start in range(0, max(sizes), EXCHANGED_BYTES):
        part = own[start : start + EXCHANGED_BYTES]
        block[: len(part)] = np.frombuffer(part, np.uint8)
        for theirs, row in zip(buffers, multihost_utils.process_allgather(block), strict=True):
            theirs += row.data
    return [bytes(theirs[:size]) for theirs, size in zip(buffers, sizes, strict=True)]


def writes() -> bool:
    """Whether this process writes the files that all processes have in common."""
    return jax.process_index() == 0


@functools.cache
def _gather(mesh: Mesh) -> Any:
    """A program that gives every device the whole of an array."""
    everywhere = NamedSharding(mesh, jax.P())
    return jax.jit(lambda x: jax.reshard(x, everywhere))
