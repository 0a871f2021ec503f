"""JAX, imported when something of it is used: a config names classes of this room, and is read without it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING


def _late(load: Callable[[], ModuleType]) -> ModuleType:
    module = ModuleType("late")
    module.__getattr__ = lambda name: getattr(load(), name)
    return module


if TYPE_CHECKING:
    import jax as jax
    import jax.numpy as jnp
else:
    jax, jnp = _late(lambda: importlib.import_module("jax")), _late(lambda: importlib.import_module("jax.numpy"))
