"""Updates of a mixture: what they tell of its load, and how they even it out."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import numpy as np
import optax
import pytest

from jaxagent.config import BatchConfig, ConfigError, RoutingConfig
from jaxagent.learner.batching import Packer
from jaxagent.learner.forward import policy_forward
from jaxagent.learner.loss import policy_loss
from jaxagent.learner.programs import watches
from jaxagent.learner.state import init_state
from jaxagent.learner.update import make_update
from jaxagent.models import balance, params, sharding
from jaxagent.models.blocks.experts import Experts
from jaxagent.models.blocks.routing import Routing
from tests.models import tiny
from tests.models.test_balance import load_by

DENSE = tiny.spec()
MIXTURE = Experts(Routing(6, 2, True, "sigmoid", bias=True), 12)
SPEC = dataclasses.replace(tiny.spec(family="deepseek_v3"), pattern=((DENSE.pattern[0][0], MIXTURE),))
RATE, COEFFICIENT = 0.125, 0.3


@pytest.mark.slow
def test_an_update_tells_the_load_adds_its_loss_and_moves_biases(make_streams, make_mesh):
    """In two micro-batches, whose loads are summed before a bias moves, as by hand."""
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        weights = tiny.init(SPEC, 0, params.shardings(SPEC, mesh, sharding.TRAIN))
        state = init_state(weights, optax.sgd(0.0))
    batches = Packer(BatchConfig(24, 2, targets_multiple=4, share_prefix=False), 8).pack(make_streams(6))
    assert len(batches) > 1
    loads = [
        jax.device_get(jax.jit(load_by, static_argnums=1)(tiny.init(SPEC), SPEC, vars(batch))[2]) for batch in batches
    ]
    chosen = sum(load.chosen for load in loads)
    update = make_update(
        policy_forward(SPEC, watches=True),
        optax.sgd(0.0),
        mesh,
        functools.partial(policy_loss, balance_coefficient=COEFFICIENT),
        adjust=lambda tree, tally: balance.with_moved_biases(tree, tally.sums["load"], SPEC, RATE),
    )
    new, metrics = update(state, batches)
    mean = chosen.sum(axis=1, keepdims=True) / 6
    np.testing.assert_array_equal(new.params.layers.router_bias, RATE * np.sign(mean - chosen))
    np.testing.assert_array_equal(new.params.layers.router, weights.layers.router)
    assert metrics["routing/max_load"] == pytest.approx(float(np.max(chosen / mean)))
    assert metrics["routing/dead_frac"] == np.mean(chosen == 0)
    tokens = sum(np.sum(batch.segments > 0) for batch in batches)
    entropy = sum(np.sum(load.entropy) for load in loads) / (tokens * SPEC.num_layers)
    assert metrics["routing/entropy"] == pytest.approx(float(entropy), rel=1e-5) and 0.5 < entropy < np.log(6)
    by_hand = 0.0
    for batch, load in zip(batches, loads, strict=True):
        n = np.sum(batch.segments > 0)
        layers = [6 * np.sum(f / n * p / n) for f, p in zip(load.chosen, load.shares, strict=True)]
        by_hand += COEFFICIENT * np.sum(batch.policy_weights) * np.mean(layers)
    assert metrics["loss/balance"] == pytest.approx(float(by_hand), rel=1e-4)


@pytest.mark.parametrize(
    ("spec", "rl", "adapters", "message"),
    [
        (DENSE, dict(balance_loss=0.1), None, "rl.routing.balance_loss=0.1: qwen3 has no experts to balance"),
        (DENSE, dict(bias_rate=0.1), None, "moves routers' biases: qwen3 has none that choose experts"),
        (tiny.spec(family="qwen3_moe"), dict(bias_rate=0.1), None, "biases: qwen3_moe has none that choose"),
        (SPEC, dict(bias_rate=0.1), "all", "biases: the frozen model's stay as they are. Set it to 0."),
    ],
)
def test_what_cannot_be_evened_out_is_refused(spec, rl, adapters, message):
    settings = types.SimpleNamespace(routes=RoutingConfig(**rl))
    with pytest.raises(ConfigError, match=message):
        watches(types.SimpleNamespace(rl=settings, model=types.SimpleNamespace(lora=adapters)), spec)
