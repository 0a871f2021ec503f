"""Do engine and trainer choose the same experts? What both sides' own programs choose is compared, row for row.

A token is known by the bits of its router's input, which hold its whole beginning. For every token that the engine has
read, in every layer, the trainer's exact scoring must have met those bits and chosen the same experts; a token whose
bits differ counts as a difference, too.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxagent.models.blocks import experts
from jaxagent.models.blocks.routing import Routing
from jaxagent.models.spec import ModelSpec

Choices = dict[bytes, set[bytes]]  # of a router's input, by its digest: every set of experts that was chosen for it


def layers(spec: ModelSpec) -> int:
    """How many have a router."""
    routers = sum(isinstance(block, experts.Experts) for blocks in spec.pattern for block in blocks)
    return routers * spec.num_layers // len(spec.pattern)


@contextlib.contextmanager
def recorded() -> Iterator[Choices]:
    """Within it programs are compiled anew, with a call of the host wherever they choose experts."""
    choices: Choices = {}

    def keep(h: np.ndarray, chosen: np.ndarray) -> None:
        rows = np.ascontiguousarray(h).view(np.uint8).reshape(len(h), -1)
        for row, ids in zip(rows, np.asarray(chosen), strict=True):
            choices.setdefault(hashlib.blake2b(row.tobytes(), digest_size=16).digest(), set()).add(ids.tobytes())

    def route(routing: Routing, h: jax.Array, *router: Any) -> Any:
        weights, chosen = plain(routing, h, *router)
        jax.debug.callback(keep, h, chosen)
        return weights, chosen

    plain, experts.route = experts.route, route
    jax.clear_caches()
    try:
        yield choices
        jax.effects_barrier()
    finally:
        experts.route = plain
        jax.clear_caches()


def differences(engine: Choices, trainer: Choices) -> int:
    """Of the trainer's rows, those that the engine has not met, or for which any two choices differ."""
    return sum(len(ids | engine.get(key, set())) != 1 or key not in engine for key, ids in trainer.items())
