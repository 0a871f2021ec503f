"""Schedules by hand, AdamW's first step by hand, and what decays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.learner.state import init_state
from jaxagent.learner.update import decayed, learning_rate, make_optimizer


@pytest.fixture
def optimizer_config(cfg):
    def make(**changes):
        base = dict(learning_rate=0.1, warmup_steps=4, schedule="constant", weight_decay=0.0, grad_clip=0.0)
        return dataclasses.replace(cfg.rl.optimizer, **(base | changes))

    return make


@pytest.mark.parametrize(
    "schedule, late",
    [("constant", (0.1, 0.1, 0.1)), ("linear", (0.1, 0.05, 0.0)), ("cosine", (0.1, 0.05, 0.0))],
)
def test_warm_up_then_schedule(optimizer_config, schedule, late):
    rate = learning_rate(optimizer_config(schedule=schedule), 12)
    np.testing.assert_allclose([rate(i) for i in range(4)], [0.025, 0.05, 0.075, 0.1], rtol=1e-6)
    np.testing.assert_allclose([rate(i) for i in (4, 8, 12)], late, atol=1e-8)
    np.testing.assert_allclose(learning_rate(optimizer_config(warmup_steps=0), 1)(0), 0.1, rtol=1e-6)


def test_a_rate_that_falls_at_the_end_alone(optimizer_config):
    rate = learning_rate(optimizer_config(schedule="wsd"), 14)  # two of the ten updates after the warm-up
    np.testing.assert_allclose([rate(i) for i in (1, 4, 11, 12, 13, 14)], [0.05, 0.1, 0.1, 0.1, 0.05, 0.0], atol=1e-7)


def test_first_step_moves_by_the_rate_and_decays_only_matrices(optimizer_config):
    optimizer = make_optimizer(optimizer_config(warmup_steps=0, weight_decay=0.5), 10)
    params = {"w_up": jnp.array([2.0]), "attn_norm": jnp.array([2.0])}
    grads = {"w_up": jnp.array([3.0]), "attn_norm": jnp.array([-3.0])}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w_up"], [-0.1 - 0.1 * 0.5 * 2.0], rtol=1e-5)
    np.testing.assert_allclose(updates["attn_norm"], [0.1], rtol=1e-5)


def test_the_global_norm_is_clipped(optimizer_config):
    def second_update(grad_clip, *grads):  # Adam's first does not depend on the gradient's scale
        optimizer, params = make_optimizer(optimizer_config(grad_clip=grad_clip, warmup_steps=0), 10), jnp.zeros(2)
        state = optimizer.init({"a": params})
        for grad in grads:
            updates, state = optimizer.update({"a": jnp.array(grad)}, state, {"a": params})
        return updates["a"]

    small = second_update(1.0, [0.6, 0.8], [0.3, 0.4])
    np.testing.assert_allclose(second_update(1.0, [30.0, 40.0], [0.3, 0.4]), small, rtol=1e-5)
    assert np.abs(second_update(0.0, [30.0, 40.0], [0.3, 0.4]) - small).max() > 1e-3


def test_norms_and_biases_do_not_decay(spec, make_mesh, make_params):
    mask = decayed(make_params(make_mesh()))
    kept = {jax.tree_util.keystr(p, simple=True, separator=".") for p, on in jax.tree_util.tree_leaves_with_path(mask)
            if not on}  # fmt: skip
    assert kept == {"final_norm", "layers.attn_norm", "layers.mlp_norm", "layers.q_norm", "layers.k_norm"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_state_has_the_types_that_an_update_gives_it(dtype, optimizer_config, make_mesh):
    """Else the second update of bfloat16 masters compiles again, after warm-up."""
    optimizer = make_optimizer(optimizer_config(), 10)
    with jax.set_mesh(make_mesh()):
        params = {"w_up": jnp.ones((2, 2), dtype)}
        state = init_state(params, optimizer)
        gradient = {"w_up": jnp.ones((2, 2), jnp.float32)}
        _, after = jax.eval_shape(optimizer.update, gradient, state.opt_state, params)
    assert jax.tree.map(lambda x: x.dtype, state.opt_state) == jax.tree.map(lambda x: x.dtype, after)
