"""Attention of rows that are split over the context axis of the mesh, and in blocks: what whole rows give."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.config import MeshConfig
from jaxagent.models import attention, blockwise, context, sharding
from jaxagent.models.gpu_kernels import first_of_segment
from tests.models import tiny
from tests.models.test_attention import reference


@pytest.mark.slow
@pytest.mark.parametrize("t", [16, 208, 1040], ids=str)
def test_attention_against_whole_rows(t):
    """Stripes of less than a block, of blocks and a rest, and segments that end anywhere."""
    rng = np.random.default_rng(t)
    q = rng.normal(size=(2, t, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, t, 2, 8)).astype(np.float32)
    segments = np.sort(rng.integers(0, 4, (2, t)), axis=1).astype(np.int32)
    mask = (segments[:, :, None] == segments[:, None]) & np.tril(np.ones((t, t), bool))

    def split(segments, q, k, v):
        flat = [_flat_heads(x) for x in (q, k, v)]
        out, _ = context.packed(segments)(None, *flat)
        out = jax.reshard(out, jax.P(sharding.FLAT, None, None)).reshape(len(out), -1)
        return context.at(out, t, jnp.broadcast_to(jnp.arange(t), segments.shape))

    mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 8))
    with jax.set_mesh(mesh):
        out = jax.jit(split)(*jax.device_put((segments, q, k, v), jax.NamedSharding(mesh, jax.P())))
    np.testing.assert_allclose(np.asarray(out).reshape(q.shape), reference(q, k, v, mask), atol=1e-5)


def _flat_heads(x):
    """[B, T, H, D] -> [N, H, D] in the order of `context.flat`."""
    places = context.flat(jnp.arange(x.shape[0] * x.shape[1], dtype=jnp.int32).reshape(x.shape[:2]))
    rows = x.reshape(-1, *x.shape[2:])
    return rows.at[places].get(out_sharding=jax.P(sharding.FLAT, "tensor", None))


@pytest.mark.parametrize("t", [7, 64, 1100], ids=str)
def test_blocks_equal_one_product(t):
    """Values and gradients of attention in blocks, rows of several blocks and ragged ones, against one [T, T] mask."""
    rng = np.random.default_rng(t)
    q, up = (jnp.asarray(rng.normal(size=(2, t, 4, 8)), jnp.float32) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(2, t, 2, 8)), jnp.float32) for _ in range(2))
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (2, t)), axis=1), jnp.int32)
    last = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), segments.shape)
    mask = (segments[:, :, None] == segments[:, None]) & (last[:, :, None] >= last[:, None])
    blocks = lambda *x: (blockwise.attend(*x, first_of_segment(segments), last) * up).sum()  # noqa: E731
    dense = lambda *x: (attention.attend_dense(*x, mask) * up).sum()  # noqa: E731
    got, expected = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(q, k, v) for f in (blocks, dense))
    assert tiny.worst_relative(expected, got) < 1e-5


def test_a_query_that_sees_nothing_is_zero_and_has_no_gradient():
    q = jnp.ones((1, 4, 2, 8))
    nothing = jnp.full((1, 4), -1, jnp.int32)
    value, grads = jax.value_and_grad(
        lambda *x: blockwise.attend(*x, jnp.zeros((1, 4), jnp.int32), nothing).sum(), argnums=(0, 1, 2)
    )(q, q, q)
    assert value == 0 and all((g == 0).all() for g in grads)


@pytest.mark.slow
def test_every_device_has_an_early_and_a_late_stripe():
    """What makes causal attention the same work on each: the columns of a device add up to the same."""
    with jax.set_mesh(sharding.make_mesh(MeshConfig(1, 1, 1, 8))):
        flat = np.asarray(context.flat(jnp.arange(32, dtype=jnp.int32)[None])).reshape(8, 4)
    assert flat[0].tolist() == [0, 1, 30, 31] and flat[7].tolist() == [14, 15, 16, 17]
    assert (flat.sum(axis=1) == 62).all() and sorted(flat.ravel()) == list(range(32))
