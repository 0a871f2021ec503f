"""Trees of parameters as the named arrays that versions of the weights consist of, and the other way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxagent.fleet import manifest
from jaxagent.fleet.leaves import Leaves, Path
from jaxagent.fleet.manifest import Share
from jaxagent.learner import digests
from jaxagent.models import global_arrays, lora, params, sharding
from jaxagent.models.params import ArraySpec, Params

FLOATS = ("bfloat16", "float32")


def paths(tree: Any) -> dict[Path, Any]:
    """The leaves of any tree by their places: ("layers", "wq")."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {tuple(map(_key, path)): leaf for path, leaf in leaves}


def of_floats(specs: Any) -> dict[Path, ArraySpec]:
    """What a version of full weights consists of, in whichever dtype it was published."""
    return {path: dataclasses.replace(array, dtype=FLOATS) for path, array in paths(specs).items()}


def shares(tree: Any) -> list[Share]:
    """What this process publishes of a tree, in its memory. Where others hold parts, each has to call this.

    Of a large array that processes have in common each copies other chunks; small ones go round.
    """

    def share_of(turn: int, path: Path, leaf: jax.Array) -> Share:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return manifest.full_share(path, np.asarray(leaf))
        if leaf.nbytes > manifest.CHUNK_BYTES:
            return Share(path, leaf.dtype.name, leaf.shape, global_arrays.pieces(leaf, manifest.CHUNK_BYTES, turn))
        share = manifest.full_share(path, np.asarray(global_arrays.get(leaf)))
        return share if turn % jax.process_count() == jax.process_index() else dataclasses.replace(share, pieces={})

    return [share_of(turn, path, leaf) for turn, (path, leaf) in enumerate(paths(tree).items())]


def digest_of_merged(policy: Params, adapters: lora.Adapters) -> str:
    """The digest of the matrices that adapters have changed. Processes that share the arrays must all call this."""
    changed = lora.under(policy, adapters)
    with jax.set_mesh(jax.tree.leaves(changed)[0].sharding.mesh):
        return digests.digest(changed)


def placed(leaves: Leaves, specs: Any, mesh: jax.sharding.Mesh, dtype: Callable[[Path, ArraySpec], str]) -> Any:
    """A tree on the devices of a mesh, as a trainer lays it out.

    Leaves go over one by one, each device gets its own part, and a leaf's original is gone when the next one goes over.

    Args:
      leaves: by path.
      specs: the tree, of `ArraySpec`s.
      mesh: where it goes.
      dtype: of a leaf, on the devices. The cast is the one by which an engine takes weights of another dtype.
    """

    def placed_leaf(path: Path, array: ArraySpec, where: jax.sharding.Sharding) -> jax.Array:
        leaf = leaves[path]
        array_there = jax.make_array_from_callback(array.shape, where, lambda index: np.asarray(leaf[index]))
        return jax.block_until_ready(array_there.astype(dtype(path, array)))

    shardings = paths(params.shardings_of(specs, mesh, sharding.TRAIN))
    with jax.set_mesh(mesh):
        filled = [placed_leaf(path, array, shardings[path]) for path, array in paths(specs).items()]
    return jax.tree.unflatten(jax.tree.structure(specs), filled)


def _key(key: Any) -> str | int:
    for name in ("name", "key", "idx"):
        if hasattr(key, name):
            return getattr(key, name)
    raise TypeError(f"{key!r} is no place in a tree of parameters.")
