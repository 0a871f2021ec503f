"""Arrays between the hosts' memory and a mesh, whose devices may be those of several processes.

Every process runs the same program on the same host values: all read the same batch. So a batch is placed without a
word between processes, each giving its own devices their rows. What devices of other processes hold is gathered
before it is read, and *every* process has to ask for it. In one process all of this is `device_put` and `device_get`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

Tree = Any  # a pytree of arrays


def put(tree: Tree, where: NamedSharding) -> Tree:
    """Places host arrays; every process gives the same ones.

    Args:
      tree: of NumPy arrays, whole.
      where: the layout of every leaf.
    """
    if where.is_fully_addressable:
        return jax.device_put(tree, where)

    def one(x: Any) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    # `device_put` would have all processes compare the values first, by a collective that has no time limit.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(one, tree)


def get(tree: Tree) -> Tree:
    """Copies arrays to the host, whole. Where other processes hold parts of them, each has to call this.

    What is gathered lies on every device for a moment, one array after another.
    """
    leaves, treedef = jax.tree.flatten(tree)
    here = [x if _readable(x) else jax.device_get(_gather(x.sharding.mesh)(x)) for x in leaves]
    return jax.tree.unflatten(treedef, jax.device_get(here))


def writes() -> bool:
    """Whether this process writes the files that all processes have in common."""
    return jax.process_index() == 0


def _readable(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


@functools.cache
def _gather(mesh: Mesh) -> Any:
    """A program that gives every device the whole of an array."""
    everywhere = NamedSharding(mesh, jax.P())
    return jax.jit(lambda x: jax.reshard(x, everywhere))
