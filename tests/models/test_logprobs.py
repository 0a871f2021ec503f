"""Log-probs and entropies against NumPy in float64, chunked or not, padded or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models import logprobs
from tests.models import tiny


def reference(weights, spec, x, targets, temperature):
    """softmax over the real vocabulary rows, in float64."""
    table = np.asarray(weights.embed if spec.tie_embeddings else weights.head, np.float64)[: spec.vocab_size]
    scores = np.asarray(x, np.float64) @ table.T / temperature
    scores -= scores.max(-1, keepdims=True)
    logp = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return logp[np.arange(len(targets)), targets], -(np.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 5, 16, 23, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("changes", [dict(), dict(vocab_size=64, tie_embeddings=False)], ids=["padded", "untied"])
def test_against_numpy(chunk, temperature, changes):
    spec = tiny.spec(logprob_chunk_tokens=chunk, **changes)
    weights = tiny.init(spec)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(23, spec.embed_dim)).astype(np.float32)
    targets = rng.integers(0, spec.vocab_size, 23).astype(np.int32)
    actual = jax.jit(logprobs.token_scores, static_argnames="spec")(weights, spec, x, targets, temperature)[:2]
    for ours, theirs in zip(actual, reference(weights, spec, x, targets, temperature), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=1e-5)


def test_hand_numbers():
    """Two tokens with logits (0, ln 3): probabilities 1/4 and 3/4."""
    spec = tiny.spec(vocab_size=2, padded_vocab_size=64, embed_dim=1)
    weights = tiny.init(spec).replace(embed=jnp.zeros((64, 1)).at[1, 0].set(1.0))
    x = jnp.full((2, 1), np.log(3.0), jnp.float32)
    scores, entropy, _ = logprobs.token_scores(weights, spec, x, jnp.array([0, 1]), 1.0)
    np.testing.assert_allclose(scores, [np.log(0.25), np.log(0.75)], rtol=1e-6)
    np.testing.assert_allclose(entropy, [-(0.25 * np.log(0.25) + 0.75 * np.log(0.75))] * 2, rtol=1e-6)


def test_chunks_do_not_change_gradients():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(23, 16)).astype(np.float32)
    targets = rng.integers(0, 61, 23).astype(np.int32)

    def loss(weights, x, spec):
        scores, entropy, _ = logprobs.token_scores(weights, spec, x, targets, 0.9)
        return (scores * jnp.arange(23)).sum() + entropy.sum()

    weights = tiny.init(tiny.spec())
    grads = [
        jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(weights, x, tiny.spec(logprob_chunk_tokens=c))
        for c in (1000, 7)
    ]
    assert tiny.worst_relative(*grads) < 1e-5


@pytest.mark.parametrize("chunk", [7, 1000])
def test_log_z_and_the_gradient_of_its_square(chunk):
    """d (log Z)^2 / dx = 2 log Z / temperature * sum over v of p_v * row v, beside the gradients of the other two."""
    spec, temperature = tiny.spec(logprob_chunk_tokens=chunk), 0.7
    weights = tiny.init(spec)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(23, spec.embed_dim)).astype(np.float32)
    targets = rng.integers(0, 61, 23).astype(np.int32)

    def loss(x):
        scores, entropy, log_z = logprobs.token_scores(weights, spec, x, targets, temperature)
        return jnp.sum(log_z**2 + 0.5 * scores - 0.25 * entropy), log_z

    gradient, log_z = jax.jit(jax.grad(loss, has_aux=True))(x)
    table = np.asarray(weights.embed, np.float64)[:61]
    scores = x.astype(np.float64) @ table.T / temperature
    expected = np.log(np.exp(scores).sum(-1))
    logp = scores - expected[:, None]
    p, entropy = np.exp(logp), -(np.exp(logp) * logp).sum(-1)
    to_scores = 2 * expected[:, None] * p + 0.5 * (np.eye(61)[targets] - p) + 0.25 * p * (logp + entropy[:, None])
    np.testing.assert_allclose(log_z, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, to_scores @ table / temperature, rtol=1e-4, atol=1e-5)


def test_padded_rows_are_never_predicted_and_get_no_gradient():
    spec = tiny.spec()
    weights = tiny.init(spec)
    x = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    scores = logprobs.logits(weights, spec, x)
    assert scores.shape == (4, 64) and (np.asarray(jax.nn.softmax(scores))[:, 61:] == 0).all()
    grad = jax.grad(lambda w: sum(a.sum() for a in logprobs.token_scores(w, spec, x, jnp.arange(4), 1e-3)[:2]))(weights)
    assert np.isfinite(grad.embed).all() and (np.asarray(grad.embed)[61:] == 0).all()


def test_backward_holds_one_chunk():
    """The largest temporary of the gradient is far below the [N, V] logits it never makes."""
    spec = tiny.spec(vocab_size=4096, padded_vocab_size=4096, logprob_chunk_tokens=32)
    weights = tiny.shapes(spec)
    n = 2048
    x, targets = jax.ShapeDtypeStruct((n, 16), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
    grad = jax.jit(jax.grad(lambda w, x, t: logprobs.token_scores(w, spec, x, t, 1.0)[0].sum()))
    compiled = grad.lower(weights, x, targets).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * n * 4096 * 4


def test_chunks_in_which_no_target_counts_are_not_computed():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(23, 16)).astype(np.float32)
    targets, live = rng.integers(0, 61, 23).astype(np.int32), rng.random(23) < 0.4
    spec = tiny.spec(logprob_chunk_tokens=5)
    weights = tiny.init(spec)

    def loss(weights, x, live):
        scores = logprobs.token_scores(weights, spec, x, targets, 0.9, live)
        return sum((jnp.where(known, s, 0.0) * (1 + jnp.arange(23))).sum() for s in scores), scores

    known = live  # the weights of the loss, whether or not the head is told
    graded = [jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(weights, x, told) for told in (None, live)]
    ((_, whole), whole_grads), ((_, parts), parts_grads) = graded
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(np.where(live, b, 0), np.where(live, a, 0), rtol=1e-5, atol=1e-6)
    computed = np.count_nonzero(parts[2])
    assert live.sum() <= computed <= live.sum() + 4 < 23 == np.count_nonzero(whole[2])
    assert tiny.worst_relative(whole_grads, parts_grads) < 1e-5
