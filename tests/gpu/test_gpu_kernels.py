"""On an NVIDIA GPU: the kernels meant for it are the ones that run, and compute what the plain code does.

JAX_PLATFORMS=cuda python -m pytest tests/gpu
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models import attention, gpu_kernels, gpu_products, kernels, layers

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


def test_rows_that_share_a_sequence_read_its_pages_together():
    q, positions, _, keys, values, tables = pages(jnp.bfloat16)
    run = jax.jit(gpu_kernels.attend_pages, static_argnums=2)
    shared = run(q, positions, PAGE, keys, values, tables[::16], None)
    alone = run(q, positions, PAGE, keys, values, jnp.repeat(tables[::16], 16, axis=0), None)
    np.testing.assert_allclose(np.float32(shared), np.float32(alone), atol=2e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tokens_are_written_into_their_pages(dtype):
    _, _, _, keys, values, _ = pages(dtype)
    rng = np.random.default_rng(4)
    k, v = (jnp.asarray(rng.normal(size=(9, 2, D)), dtype) for _ in range(2))
    page, offset = jnp.arange(9) * 6 + 2, jnp.asarray(rng.integers(0, PAGE, 9))  # the last one is past the end
    actual = jax.jit(gpu_kernels.write)(keys, values, k, v, page, offset)
    expected = keys.at[page, :, :, offset].set(k), values.at[page, :, offset].set(v)
    for new, of_scatter in zip(actual, expected, strict=True):
        assert np.array_equal(np.float32(new), np.float32(of_scatter))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_exact_numerics_round_a_row_alike_among_any_others(dtype):
    rng = np.random.default_rng(5)
    x, w, head = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((512, 896), (896, 4864), (4096, 896)))
    scale, temperature = jnp.asarray(rng.normal(size=896), dtype), jnp.linspace(0.1, 2, 512)

    @jax.jit
    def run(x, temperature):
        scores = gpu_products.product(x, [head], True, jnp.float32)
        logprobs = gpu_products.row_logprobs(scores, jnp.zeros(len(x), jnp.int32), temperature)
        return gpu_products.product(x, [w], False, dtype), gpu_products.rms_norm(x, scale, 1e-6), scores, logprobs

    whole = run(x, temperature)
    for rows in (1, 2, 7, 64, 65, 200):
        chosen = rng.permutation(512)[:rows]
        for few, many in zip(run(x[chosen], temperature[chosen]), whole, strict=True):
            assert np.array_equal(np.float32(few), np.float32(many)[chosen])
    wide = np.float64(x), np.float64(w), np.float64(head)
    tolerance = {"atol": 2e-3} if dtype == jnp.float32 else {"rtol": 1e-2, "atol": 0.2}
    np.testing.assert_allclose(np.float64(whole[0]), wide[0] @ wide[1], **tolerance)
    np.testing.assert_allclose(whole[2], wide[0] @ wide[2].T, atol=2e-3)
    norm = layers.rms_norm(x, scale, 1e-6)
    np.testing.assert_allclose(np.float32(whole[1]), np.float32(norm), rtol=1e-2, atol=1e-5)
    expected = jax.nn.log_softmax(whole[2] / temperature[:, None])[:, 0]
    np.testing.assert_allclose(whole[3], expected, rtol=1e-5, atol=1e-4)


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
