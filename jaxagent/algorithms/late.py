"""JAX, imported when something of it is used: a config names classes of this room, and is read without it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax as jax
    import jax.numpy as jnp
else:

    class _Late:
        def __init__(self, load):
            self._load = load

        def __getattr__(self, name):
            return getattr(self._load(), name)

    jax, jnp = _Late(lambda: importlib.import_module("jax")), _Late(lambda: importlib.import_module("jax.numpy"))
