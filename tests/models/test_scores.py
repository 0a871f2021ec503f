"""Functions of whole distributions, chunked or not, of one model or two, on one device or a mesh, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.config import MeshConfig
from jaxagent.models import params, scores, sharding
from tests.models import tiny

N, K = 24, 3


def table(weights, spec, x, temperature):
    """Log-probs float64[N, V] of the real vocabulary rows."""
    z = np.asarray(x, np.float64) @ np.asarray(weights.embed, np.float64)[: spec.vocab_size].T / temperature
    z -= z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def inputs(spec, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, spec.embed_dim)).astype(np.float32)
    return x, rng.integers(0, 61, N).astype(np.int32), rng.integers(0, 61, (N, 2)).astype(np.int32)


@pytest.mark.parametrize("chunk", [5])
@pytest.mark.parametrize("sizes", [None, (2, 2, 2)], ids=["no mesh", "eight devices"])
def test_top_logprobs_against_numpy(chunk, sizes):
    spec = tiny.spec(logprob_chunk_tokens=chunk)
    x, targets, candidates = inputs(spec)
    score = jax.jit(scores.top_logprobs, static_argnames=("spec", "k"))
    if sizes is None:
        weights = tiny.init(spec)
        got = score(weights, spec, x, targets, candidates, k=K, temperature=0.7)
    else:
        mesh = sharding.make_mesh(MeshConfig(*sizes, 1))
        weights = tiny.init(spec, 0, params.shardings(spec, mesh, sharding.TRAIN))
        with jax.set_mesh(mesh):
            rows = [jax.device_put(a, sharding.rows(mesh, a.ndim)) for a in (x, targets, candidates)]
            got = score(weights, spec, *rows, k=K, temperature=0.7)
    expected = table(weights, spec, x, 0.7)
    order = np.argsort(-expected, axis=1)[:, :K]
    at = np.arange(N)
    np.testing.assert_allclose(got.logprobs, expected[at, targets], atol=2e-5)
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top_logprobs, expected[at[:, None], order], atol=2e-5)
    np.testing.assert_allclose(got.candidate_logprobs, expected[at[:, None], candidates], atol=2e-5)


@pytest.mark.parametrize("sizes", [None, (1, 2, 2)], ids=["no mesh", "four devices"])
def test_two_models_of_other_widths_and_their_gradient(sizes):
    """Cross-entropy of the second model under the first: chunks and meshes change neither value nor gradient."""
    one, two = tiny.spec(logprob_chunk_tokens=16), tiny.spec(embed_dim=32, vocab_size=59, padded_vocab_size=64)
    x, y = inputs(one)[0], inputs(two, 1)[0]

    def cross(first, second):
        return -jnp.sum(jax.nn.softmax(second) * jax.nn.log_softmax(first), axis=-1)

    def loss(a, b, x, y):
        return scores.map_scores(cross, [(a, one, x), (b, two, y)]).sum()

    def plain(head_a, head_b, x, y):
        return cross(x @ head_a[:59].T, y @ head_b[:59].T).sum()

    grad = jax.jit(jax.value_and_grad(loss, (0, 2)))
    if sizes is None:
        a, b = tiny.init(one), tiny.init(two, 1)
        value, (to_a, to_x) = grad(a, b, x, y)
    else:
        mesh = sharding.make_mesh(MeshConfig(*sizes, 1))
        a, b = (tiny.init(s, i, params.shardings(s, mesh, sharding.TRAIN)) for i, s in enumerate((one, two)))
        with jax.set_mesh(mesh):
            value, (to_a, to_x) = grad(a, b, *(jax.device_put(z, sharding.rows(mesh, 2)) for z in (x, y)))
    host = [np.asarray(z) for z in (a.embed, b.embed, x, y)]
    expected, (head, hidden) = jax.value_and_grad(plain, (0, 2))(*host)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(to_a.embed, head, atol=1e-4)
    np.testing.assert_allclose(to_x, hidden, atol=1e-5)


def test_only_a_chunk_of_logits_exists():
    spec = tiny.spec(vocab_size=4096, padded_vocab_size=4096, logprob_chunk_tokens=32)
    weights = tiny.shapes(spec)
    n = 2048
    x = jax.ShapeDtypeStruct((n, 16), jnp.float32)

    def loss(weights, x):
        entropy = lambda z: -(jax.nn.softmax(z) * jax.nn.log_softmax(z)).sum(-1)  # noqa: E731
        return scores.map_scores(entropy, [(weights, spec, x)]).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(weights, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * n * 4096 * 4
