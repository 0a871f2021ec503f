"""Long rows of a delta net are computed span after span, and on many devices: the same numbers and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.config import MeshConfig
from jaxagent.models import context, delta_rule, recurrence, sharding

T, HEADS, DIM = 3 * 128 + 40, 2, 8


def rows(rng) -> tuple[delta_rule.Inputs, np.ndarray]:
    """Two packed rows, with segments that end at a span's end, cross it, and lie inside a chunk."""
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    q, k = (unit(rng.normal(size=(2, T, HEADS, DIM))) for _ in range(2))
    v, g = rng.normal(size=(2, T, HEADS, DIM)), -rng.exponential(0.1, (2, T, HEADS))
    tokens = delta_rule.Inputs(*(x.astype(np.float32) for x in (q, k, v, g, rng.uniform(0, 1, (2, T, HEADS)))))
    ends = np.array([[128, 300, 310, 500], [40, 127, 129, 500]])
    return tokens, (np.arange(T)[None, :, None] >= ends[:, None]).sum(-1).astype(np.int32)


@pytest.fixture
def spans(monkeypatch):
    monkeypatch.setattr(delta_rule, "SPAN", 128)


def token_by_token(tokens, segments):
    """By `step`, from zeros at every segment's start."""

    def one(carry, xs):
        state, last = carry
        token, segment = xs
        state, out = delta_rule.step(jnp.where(segment == last, state, 0), token)
        return (state, segment), out

    start = jnp.zeros((HEADS, DIM, DIM)), jnp.int32(-1)
    return jax.vmap(lambda *xs: jax.lax.scan(one, start, xs)[1])(tokens, segments)


def test_spans_are_the_rule_token_by_token(spans):
    tokens, segments = rows(np.random.default_rng(0))
    weights = np.random.default_rng(1).normal(size=(2, T, HEADS, DIM)).astype(np.float32)

    def outputs_and_gradients(function):
        loss = lambda tokens: (jnp.sum((out := function(tokens, segments)) * weights), out)  # noqa: E731
        (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(tokens)
        return out, gradients

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-4),
        outputs_and_gradients(delta_rule.chunked),
        outputs_and_gradients(token_by_token),
    )


def test_backward_keeps_no_span_s_chunks(spans):
    tokens, segments = rows(np.random.default_rng(0))
    _, pull = jax.eval_shape(lambda tokens: jax.vjp(lambda t: delta_rule.chunked(t, segments), tokens), tokens)
    sizes = [leaf.size for leaf in jax.tree.leaves(pull)]
    whole = 2 * 4 * 128 * HEADS * DIM  # an array of all tokens
    assert sum(sizes) < 5 * whole, "the tokens, and a memory per span"


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(1, 2, 2, 2), (1, 1, 2, 4), (1, 4, 2, 1)], ids=str)
def test_devices_share_out_rows_tokens_and_heads(axes):
    """Heads split over tensor, and exchanged for tokens over context or, where they do not divide, whole there."""
    mesh = sharding.make_mesh(MeshConfig(*axes))
    rng = np.random.default_rng(0)
    b, t, heads = 4, 64 + 32, 4
    one = lambda *shape: rng.normal(size=(b, t, heads, *shape)).astype(np.float32)  # noqa: E731
    q, k, v = one(DIM), one(DIM), one(DIM)
    inputs = delta_rule.Inputs(q, k / np.linalg.norm(k, axis=-1, keepdims=True), v, -np.abs(one()), np.abs(one()) / 9)
    segments = np.sort(rng.integers(0, 4, (b, t)), axis=1).astype(np.int32)
    up = one(DIM)

    def loss(tokens, fold, weights):
        out = fold(tokens)
        return jnp.sum(out * weights), out

    expected = jax.value_and_grad(loss, has_aux=True)(inputs, lambda x: delta_rule.chunked(x, segments), up)
    split = axes[3] > 1
    places = np.arange(b * t, dtype=np.int32).reshape(b, t)

    @jax.jit
    def on_mesh(segments, places, inputs, up):
        flat = context.flat if split else lambda x: sharding.merge_rows(jnp.asarray(x))
        of_context = flat(places)
        rows = jax.P(sharding.FLAT) if split else jax.P(sharding.ROWS)
        tokens, weights = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:]).at[of_context].get(out_sharding=rows), (inputs, up)
        )
        recur = (context.SplitRows if split else recurrence.PackedRows)(segments)
        (value, out), gradients = jax.value_and_grad(loss, has_aux=True)(
            tokens, lambda x: recur.fold(None, x)[0], weights
        )
        shifted = recur.window(None, tokens.v.reshape(len(tokens.v), -1), 3)[0]
        return value, out, gradients, of_context, shifted

    with jax.set_mesh(mesh):
        everywhere = jax.NamedSharding(mesh, jax.P())
        by_rows = jax.device_put((segments, places), jax.NamedSharding(mesh, jax.P(sharding.ROWS, None)))
        value, out, gradients, order, shifted = on_mesh(*by_rows, *jax.device_put((inputs, up), everywhere))
    back = lambda x: np.asarray(x)[np.argsort(np.asarray(order))].reshape(b, t, *x.shape[1:])  # noqa: E731
    np.testing.assert_allclose(value, expected[0][0], rtol=1e-4)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)  # noqa: E731
    close(back(out), expected[0][1])
    jax.tree.map(lambda a, b: close(back(a), b), gradients, expected[1])
    flat_v = jnp.asarray(v.reshape(b, t, -1))
    for by, x in enumerate(shifted):
        np.testing.assert_array_equal(back(x), recurrence.earlier(flat_v, jnp.asarray(segments), by))
