"""The count of routing differences sees a choice that differs, and a token that one side has never met."""

from __future__ import annotations

import jax
import numpy as np

from benchmarks import routing
from jaxagent.models.blocks import experts
from jaxagent.models.blocks.routing import Routing


def test_differences_are_counted_row_for_row():
    rng = np.random.default_rng(0)
    h, router = rng.normal(size=(2, 40, 8)).astype(np.float32)[0], rng.normal(size=(8, 6)).astype(np.float32)

    def chosen(h, router):
        with routing.recorded() as choices:
            jax.block_until_ready(jax.jit(lambda *a: experts.route(Routing(6, 2), *a))(h, router))
        return choices

    engine, other = chosen(h, router), chosen(h, router[:, ::-1])
    assert len(engine) == 40 and routing.differences(engine, chosen(h[::-1], router)) == 0
    expected = [np.argsort(-row)[:2] for row in h @ router]
    mirrored = [np.argsort(-row)[:2] for row in h @ router[:, ::-1]]
    assert routing.differences(engine, other) == sum(set(a) != set(b) for a, b in zip(expected, mirrored, strict=True))
    assert routing.differences(engine, chosen(h + np.float32(1e-3), router)) == 40  # other bits
    assert routing.differences({}, engine) == 40
