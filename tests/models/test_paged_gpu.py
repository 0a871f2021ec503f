"""The GPU's and the TPU's kernels of paged attention, interpreted: against the loop of every other platform."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models import attention, gpu_kernels, tpu_kernels

PAGE, D = 16, 32
KERNELS = pytest.mark.parametrize("kernels", [gpu_kernels, tpu_kernels], ids=lambda kernels: kernels.__name__[-11:])


@KERNELS
@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(4, 4, "float32"), (6, 2, "bfloat16"), (20, 1, "float32")])
def test_pages_of_a_table(kernels, heads, kv_heads, dtype):
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.normal(size=(9, kv_heads, D, PAGE)), dtype)
    values = jnp.asarray(rng.normal(size=(9, kv_heads, PAGE, D)), dtype)
    q = jnp.asarray(rng.normal(size=(5, heads, D)), dtype)
    positions = jnp.asarray([0, 15, 16, 40, 63], jnp.int32)
    tables = jnp.asarray(rng.integers(0, 9, (5, 4)), jnp.int32)
    arguments = (q, positions, PAGE, keys, values, tables)
    actual, expected = kernels.attend_pages(*arguments, None, interpret=True), attention.attend_pages(*arguments)
    tolerance = 2e-6 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(np.float32(actual), np.float32(expected), atol=tolerance, rtol=tolerance)


def test_pages_that_begin_anywhere():
    """Packed rows: one block per row, pages counted from the first token of each sequence."""
    rng = np.random.default_rng(1)
    keys = jnp.asarray(rng.normal(size=(2, 1, D, 80 + PAGE)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(2, 1, 80 + PAGE, D)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(4, 3, D)), jnp.float32)
    positions, starts = jnp.asarray([0, 30, 79, 17], jnp.int32), jnp.asarray([79, 7, 0, 40], jnp.int32)
    arguments = (q, positions, PAGE, keys, values, jnp.asarray([[0], [1], [1], [0]], jnp.int32), starts)
    actual = gpu_kernels.attend_pages(*arguments, interpret=True)
    np.testing.assert_allclose(actual, attention.attend_pages(*arguments), atol=2e-6)
    np.testing.assert_allclose(actual[0], jnp.broadcast_to(values[0, :, 79], (3, D)), atol=1e-6)  # it sees itself only


def test_which_sizes_it_takes():
    taken = [gpu_kernels.supports_pages(*sizes) for sizes in ((128, 64), (16, 16), (96, 64), (8, 16), (64, 24))]
    assert taken == [True, True, False, False, False]


@KERNELS
def test_rows_that_share_a_sequence(kernels):
    rng = np.random.default_rng(2)
    keys = jnp.asarray(rng.normal(size=(5, 2, D, PAGE)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(5, 2, PAGE, D)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(6, 4, D)), jnp.float32)
    positions, tables = jnp.asarray([3, 4, 20, 30, 31, 8], jnp.int32), jnp.asarray([[1, 2], [4, 3]], jnp.int32)
    alone = kernels.attend_pages(q, positions, PAGE, keys, values, jnp.repeat(tables, 3, axis=0), None, interpret=True)
    shared = kernels.attend_pages(q, positions, PAGE, keys, values, tables, None, interpret=True)
    if kernels is gpu_kernels:  # which takes row by row
        np.testing.assert_array_equal(shared, alone)
    np.testing.assert_allclose(attention.attend_pages(q, positions, PAGE, keys, values, tables), alone, atol=2e-6)
