"""Trees of parameters as the named arrays that versions of the weights consist of."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxagent.fleet.leaves import Path
from jaxagent.models import global_arrays


def paths(tree: Any) -> dict[Path, Any]:
    """The leaves of any tree by their places: ("layers", "wq")."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {tuple(map(_key, path)): leaf for path, leaf in found}


def to_host(tree: Any) -> dict[Path, np.ndarray]:
    """The leaves in this process's memory. Where other processes hold parts of them, each has to call this."""
    return {path: np.asarray(leaf) for path, leaf in paths(global_arrays.get(tree)).items()}


def _key(key: Any) -> str | int:
    for name in ("name", "key", "idx"):
        if hasattr(key, name):
            return getattr(key, name)
    raise TypeError(f"{key!r} is no place in a tree of parameters.")
