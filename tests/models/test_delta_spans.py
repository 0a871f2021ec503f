"""Long rows of a delta net are computed span after span: the same numbers and gradients, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models import delta_rule

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
