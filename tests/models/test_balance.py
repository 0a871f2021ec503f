"""The load of a mixture's experts: by hand and by transformers' loss; and the bias that follows it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models import balance, choices, sharding, transformer
from jaxagent.models.blocks.experts import Experts
from jaxagent.models.blocks.routing import Routing
from tests.engine.test_lm import mesh_of
from tests.models import tiny

DENSE, (ATTENTION, _) = tiny.spec().pattern[0], tiny.spec().pattern[0]
EXPERTS = Experts(Routing(6, 2, True, "sigmoid", True, 3, 2), 12, shared=1)
# A dense layer, then two turns of a layer with experts and a dense one.
SPEC = dataclasses.replace(
    tiny.spec(family="deepseek_v3"), num_layers=5, pattern=(DENSE, *[(ATTENTION, EXPERTS), DENSE] * 2)
)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def watched(scores, chosen, live):
    """Of one router."""
    taken, new = balance.watching(live, None)(None, jnp.asarray(scores), jnp.asarray(chosen))
    np.testing.assert_array_equal(taken, chosen)
    return new.load


def test_real_tokens_are_counted():
    rng = np.random.default_rng(0)
    scores, live = rng.uniform(0.1, 1.0, (40, 6)), rng.uniform(size=40) < 0.7
    chosen = np.sort(np.argsort(-scores, axis=1)[:, :2], axis=1)
    load = watched(scores.astype(np.float32), chosen, live)
    count, shares, entropy = np.zeros(6), np.zeros(6), 0.0
    for row, experts in zip(scores[live], chosen[live], strict=True):
        count[experts] += 1
        share = row / row.sum()
        shares += share
        entropy -= (share * np.log(share)).sum()
    np.testing.assert_array_equal(load.chosen, count)
    np.testing.assert_allclose(load.shares, shares, rtol=1e-5)
    np.testing.assert_allclose([load.entropy, load.tokens], [entropy, live.sum()], rtol=1e-5)
    found = balance.metrics(np.array([[3.0, 1, 0, 0], [1, 1, 1, 1]]), 12.0, 8.0)
    assert found == {"routing/entropy": 1.5, "routing/max_load": 3.0, "routing/dead_frac": 0.25}


def test_the_loss_is_transformers():
    """Of one layer, which it takes; ours is the mean over layers. And its gradient."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    rng = np.random.default_rng(1)
    logits, live = rng.normal(0, 2, (1, 50, 6)).astype(np.float32), np.arange(50) < 41
    leaf = torch.tensor(logits[0], requires_grad=True)
    expected = theirs.load_balancing_loss_func((leaf,), 6, 2, torch.as_tensor(live[None]).long())
    expected.backward()

    def ours(logits):
        scores = jax.nn.softmax(logits)
        load = watched(scores, jnp.sort(jax.lax.top_k(scores, 2)[1], axis=1), live)
        return balance.loss(jax.tree.map(lambda a: a[None], load))

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(logits[0]))
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, leaf.grad, atol=1e-6)
    even = balance.Load(np.full((3, 6), 20.0), np.full((3, 6), 10.0), np.zeros(3), np.full(3, 60.0))
    assert balance.loss(even) == pytest.approx(2.0)


def load_by(weights, spec, batch, recorded=None):
    places = (batch[name] for name in ("tokens", "positions", "segments", "head_positions"))
    return transformer.forward_packed(weights, spec, *places, recorded=recorded, watch=True)


@pytest.mark.slow
def test_layers_of_a_loop_and_those_written_out_are_counted_in_order():
    weights, batch = tiny.init(SPEC), tiny.batch(2, 20, 5, SPEC.vocab_size)
    assert balance.routers(SPEC) == [1, 3] and SPEC.stacks[0] == range(1)
    program = jax.jit(load_by, static_argnums=1)
    _, differing, looped = program(weights, dataclasses.replace(SPEC, remat="layer"), batch)
    _, _, written_out = program(weights, SPEC, batch)
    assert differing is None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), looped, written_out)
    tokens = np.sum(np.asarray(batch["segments"]) > 0)
    assert (
        looped.chosen.shape == (2, 6) and np.all(looped.tokens == tokens) and np.all(looped.chosen.sum(1) == 2 * tokens)
    )
    everything_to_two = np.tile(np.array([0, 1, 4, 5], choices.dtype(SPEC)), (2, 20, 1))
    for remat in ("none", "layer"):
        _, differing, replayed = program(weights, dataclasses.replace(SPEC, remat=remat), batch, everything_to_two)
        assert differing.shape == (2, 5)
        np.testing.assert_array_equal(replayed.chosen, tokens * np.array([[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]))
    with jax.set_mesh(mesh := mesh_of(2, 1, 2)):
        placed = {name: jax.device_put(x, sharding.rows(mesh, 2)) for name, x in batch.items()}
        _, _, split = program(tiny.init(SPEC, 0, tiny_shardings(mesh)), SPEC, placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), split, written_out)


def tiny_shardings(mesh):
    from jaxagent.models import params

    return params.shardings(SPEC, mesh, sharding.TRAIN)


def test_biases_move_towards_even_loads():
    weights = tiny.init(SPEC)
    chosen = np.array([[10.0, 0, 5, 5, 5, 5], [4, 8, 3, 3, 6, 6]], np.float32)  # 5 each would be even
    moved = balance.with_moved_biases(weights, chosen, SPEC, 0.01)
    expected = 0.01 * np.array([[-1, 1, 0, 0, 0, 0], [1, -1, 1, 1, -1, -1]], np.float32)
    np.testing.assert_array_equal(moved.layers[1].router_bias, expected)
    assert moved.layers[1].router_bias.dtype == np.float32
    rest = jax.tree.map(lambda a, b: np.array_equal(a, b), moved, weights)
    assert [path[-1].name for path, same in jax.tree_util.tree_leaves_with_path(rest) if not same] == ["router_bias"]
