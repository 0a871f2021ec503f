"""Attention against a NumPy loop; packing equals running each sequence alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.config import MeshConfig
from jaxagent.models import attention, params, sharding, transformer
from tests.models import tiny

attend_dense = jax.jit(attention.attend_dense)
packed = jax.jit(lambda segments, q, k, v: attention.packed(segments)(None, q, k, v))
forward_packed = jax.jit(transformer.forward_packed, static_argnames="spec")


def reference(q, k, v, mask):
    """One head and one query at a time, float64."""
    b, c, h, d = q.shape
    out = np.zeros_like(q, np.float64)
    for i, j, head in np.ndindex(b, c, h):
        kv = head // (h // k.shape[2])
        scores = k[i, :, kv].astype(np.float64) @ q[i, j, head].astype(np.float64) / np.sqrt(d)
        weights = np.exp(scores - scores[mask[i, j]].max()) * mask[i, j]
        out[i, j, head] = weights / weights.sum() @ v[i, :, kv]
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_dense_against_numpy(heads, kv_heads):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 5, heads, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 7, kv_heads, 8)).astype(np.float32)
    mask = rng.random((2, 5, 7)) < 0.5
    mask[..., 0] = True
    actual = attend_dense(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(mask))
    np.testing.assert_allclose(actual, reference(q, k, v, mask), atol=1e-5)


@pytest.mark.parametrize("t", [1, 63, 64, 65, 130, 600])
def test_packed_against_dense(t):
    """Blocks of queries, whole or cut, see what one big mask would show them."""
    rng = np.random.default_rng(t)
    q = jnp.asarray(rng.normal(size=(2, t, 4, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, t, 2, 8)), jnp.float32) for _ in range(2))
    segments = np.sort(rng.integers(0, 4, (2, t)), axis=1).astype(np.int32)
    mask = (segments[:, :, None] == segments[:, None]) & np.tril(np.ones((t, t), bool))
    flat = (x.reshape(2 * t, *x.shape[2:]) for x in (q, k, v))
    out, cache = packed(segments, *flat)
    expected = attend_dense(q, k, v, jnp.asarray(mask))
    np.testing.assert_allclose(out.reshape(2, t, 4, 8), expected, atol=1e-5)
    assert cache is None


def test_packed_row_equals_sequences_alone():
    """Sequences of a row do not see each other, and padding changes nothing."""
    spec = tiny.spec()
    weights = tiny.init(spec)
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 61, 9), rng.integers(0, 61, 6)

    def states(sequences, t):
        tokens, positions, segments = np.zeros((3, 1, t), np.int32)
        start = 0
        for i, sequence in enumerate(sequences):
            span = slice(start, start + len(sequence))
            tokens[0, span], positions[0, span], segments[0, span] = sequence, np.arange(len(sequence)), i + 1
            start = span.stop
        everywhere = np.arange(t, dtype=np.int32)[None]
        return np.asarray(forward_packed(weights, spec, tokens, positions, segments, everywhere)[0])[0]

    row = states([first, second], 20)
    np.testing.assert_allclose(row[:9], states([first], 9), atol=1e-5)
    np.testing.assert_allclose(row[9:15], states([second], 6), atol=1e-5)
    assert np.isfinite(row).all()


def test_row_that_may_see_nothing_is_finite():
    q = jnp.ones((1, 1, 2, 4))
    out = attend_dense(q, q, q, jnp.zeros((1, 1, 1), bool))
    assert np.isfinite(out).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (4, 4), (4, 2)])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 8), (2, 1), (2, 8)])
def test_axes_of_length_one_keep_their_layout_in_a_mesh(heads, kv_heads, rows, tokens):
    """What JAX infers for an axis of length one differs by its version: the trainer's pass states it. Traced only."""
    spec = tiny.spec(num_heads=heads, num_kv_heads=kv_heads)
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, context=1, tensor=1))
    weights = params.abstract(spec, mesh, sharding.TRAIN)
    row = jax.ShapeDtypeStruct((rows, tokens), jnp.int32, sharding=sharding.rows(mesh, 2))

    def loss(weights, row):
        return transformer.forward_packed(weights, spec, row, row, row, row)[0].sum()

    with jax.set_mesh(mesh):
        grads = jax.eval_shape(jax.grad(loss), weights, row)
    assert grads.layers.wq.sharding.spec == weights.layers.wq.sharding.spec
