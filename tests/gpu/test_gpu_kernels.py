"""On an NVIDIA GPU: the kernels meant for it are the ones that run, and compute what the plain code does.

JAX_PLATFORMS=cuda python -m pytest tests/gpu
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models import attention, gpu_kernels, kernels

if jax.default_backend() != "gpu":
    pytest.skip("needs an NVIDIA GPU and JAX_PLATFORMS=cuda", allow_module_level=True)

PAGE, D = 64, 128


def pages(dtype, rows=96, kv_heads=2, heads=16):
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.normal(size=(50, kv_heads, D, PAGE)), dtype)
    values = jnp.asarray(rng.normal(size=(50, kv_heads, PAGE, D)), dtype)
    q = jnp.asarray(rng.normal(size=(rows, heads, D)), dtype)
    positions = jnp.asarray(rng.integers(0, 9 * PAGE, rows), jnp.int32)
    return q, positions, PAGE, keys, values, jnp.asarray(rng.integers(0, 50, (rows, 9)), jnp.int32)


def packed(dtype, b=2, t=1024, heads=16, kv_heads=2):
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(b, t, heads, D)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(b, t, kv_heads, D)), dtype) for _ in range(2))
    segments = jnp.asarray(np.sort(rng.integers(0, 5, (b, t)), axis=1), jnp.int32)
    return segments, q, k, v


def dense(segments, q, k, v):
    mask = (segments[:, :, None] == segments[:, None]) & jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
    return attention.attend_dense(*(x.astype(jnp.float32) for x in (q, k, v)), mask)


def test_pages_run_the_kernel_and_not_its_fallback():
    assert kernels.paged(kernels.platform(), D, PAGE).name == "triton"
    program = jax.jit(lambda *a: attention.attend_pages(*a[:2], PAGE, *a[2:]))
    q, positions, _, *rest = pages(jnp.bfloat16)
    assert "paged_attention" in program.lower(q, positions, *rest).as_text()


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_pages_against_plain_code(dtype, tolerance):
    arguments = pages(dtype)
    actual = jax.jit(gpu_kernels.attend_pages, static_argnums=2)(*arguments, None)
    q, positions, _, keys, values, tables = arguments
    wide = [x.astype(jnp.float32) for x in (q, keys, values)]
    k = wide[1][tables].transpose(0, 1, 4, 2, 3).reshape(len(q), -1, 2, D)
    v = wide[2][tables].transpose(0, 1, 3, 2, 4).reshape(len(q), -1, 2, D)
    mask = (jnp.arange(k.shape[1]) <= positions[:, None])[:, None]
    expected = attention.attend_dense(wide[0][:, None], k, v, mask)[:, 0]
    np.testing.assert_allclose(np.float32(actual), np.float32(expected), atol=tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_of_pages_does_not_depend_on_its_neighbours(dtype):
    q, positions, _, keys, values, tables = pages(dtype)
    run = jax.jit(gpu_kernels.attend_pages, static_argnums=2)
    whole = np.float32(run(q, positions, PAGE, keys, values, tables, None))
    order = np.random.default_rng(2).permutation(len(q))
    some = np.float32(run(q[order[:7]], positions[order[:7]], PAGE, keys, values, tables[order[:7]], None))
    assert np.array_equal(some, whole[order[:7]])
    # The same sequence lying in a row of packed tokens, from an odd column on.
    for row in order[:4]:
        k = jnp.concatenate([keys[page] for page in tables[row]], axis=-1)
        v = jnp.concatenate([values[page] for page in tables[row]], axis=-2)
        k = jnp.pad(k, ((0, 0), (0, 0), (13, PAGE)))[None]
        v = jnp.pad(v, ((0, 0), (13, PAGE), (0, 0)))[None]
        at, start = jnp.zeros((1, 1), jnp.int32), jnp.asarray([13], jnp.int32)
        alone = np.float32(run(q[row][None], positions[row][None], PAGE, k, v, at, start))
        assert np.array_equal(alone[0], whole[row])


def test_packed_rows_run_the_kernel_and_not_its_fallback():
    assert kernels.packed(kernels.platform(), "bfloat16", 1024).name == "tokamax"
    assert kernels.packed(kernels.platform(), "float32", 1024).because


def test_packed_rows_against_plain_code():
    segments, *qkv = packed(jnp.bfloat16)
    weigh = jnp.asarray(np.random.default_rng(3).normal(size=qkv[0].shape), jnp.float32)

    def loss(function):
        return lambda q, k, v: (function(segments, q, k, v).astype(jnp.float32) * weigh).sum()

    actual = jax.jit(gpu_kernels.attend)(segments, *qkv)
    np.testing.assert_allclose(np.float32(actual), np.float32(jax.jit(dense)(segments, *qkv)), atol=3e-2)
    gradients = jax.jit(jax.grad(loss(gpu_kernels.attend), (0, 1, 2)))
    again = gradients(*qkv)
    for a, b, c in zip(gradients(*qkv), again, jax.jit(jax.grad(loss(dense), (0, 1, 2)))(*qkv), strict=True):
        assert np.array_equal(np.float32(a), np.float32(b))  # no atomics: the same twice
        scale = np.abs(np.float32(c)).max()
        np.testing.assert_allclose(np.float32(a) / scale, np.float32(c) / scale, atol=1e-2)
