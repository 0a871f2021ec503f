"""The TPU's kernels, interpreted, against the plain code that every other platform runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models import attention, tpu_kernels

PAGE, D = 16, 32


def pool(rng, blocks, kv_heads, dtype="float32"):
    keys = jnp.asarray(rng.normal(size=(blocks, kv_heads, D, PAGE)), dtype)
    return keys, jnp.asarray(rng.normal(size=(blocks, kv_heads, PAGE, D)), dtype)


def test_a_page_past_the_end_changes_no_bit():
    rng = np.random.default_rng(3)
    keys, values = pool(rng, 9, 2)
    q = jnp.asarray(rng.normal(size=(3, 4, D)), jnp.float32)
    positions, tables = jnp.asarray([5, 20, 40], jnp.int32), jnp.asarray(rng.integers(0, 9, (3, 6)), jnp.int32)
    long = tpu_kernels.attend_pages(q, positions, PAGE, keys, values, tables, None, interpret=True)
    short = tpu_kernels.attend_pages(q, positions, PAGE, keys, values, tables[:, :3], None, interpret=True)
    np.testing.assert_array_equal(long, short)


def test_pages_that_begin_anywhere_and_the_same_in_a_table():
    """Exact scoring: a sequence in a packed row gets the bits it gets from its own pages."""
    rng = np.random.default_rng(1)
    keys = jnp.asarray(rng.normal(size=(2, 1, D, 80 + PAGE)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(2, 1, 80 + PAGE, D)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(4, 3, D)), jnp.float32)
    positions, starts = jnp.asarray([0, 30, 79, 17], jnp.int32), jnp.asarray([79, 7, 0, 40], jnp.int32)
    blocks = jnp.asarray([[0], [1], [1], [0]], jnp.int32)
    arguments = (q, positions, PAGE, keys, values, blocks, starts)
    actual = tpu_kernels.attend_pages(*arguments, interpret=True)
    np.testing.assert_allclose(actual, attention.attend_pages(*arguments), atol=2e-6)
    own = [(x[1, :, 7:55], x[1, 7:55]) for x in (keys[:, 0], values[:, 0])]
    own_keys = own[0][0].reshape(D, 3, PAGE).swapaxes(0, 1)[:, None]
    own_values = own[1][1].reshape(3, 1, PAGE, D)
    table = jnp.asarray([[0, 1, 2]], jnp.int32)
    alone = tpu_kernels.attend_pages(q[1:2], positions[1:2], PAGE, own_keys, own_values, table, None, interpret=True)
    np.testing.assert_array_equal(alone[0], actual[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_written_into_their_pages(dtype):
    """Also several rows into one page (prefill), and from a row that is wider than the cache's dtype."""
    rng = np.random.default_rng(5)
    keys, values = pool(rng, 6, 2, dtype)
    k, v = (jnp.asarray(rng.normal(size=(5, 2, D)), jnp.float32) for _ in range(2))
    page, offset = jnp.asarray([4, 2, 2, 2, 5], jnp.int32), jnp.asarray([0, 13, 14, 15, 7], jnp.int32)
    written = jax.jit(lambda *a: tpu_kernels.write(*a, interpret=True))(keys, values, k, v, page, offset)
    np.testing.assert_array_equal(written[0], keys.at[page, :, :, offset].set(k.astype(dtype)))
    np.testing.assert_array_equal(written[1], values.at[page, :, offset].set(v.astype(dtype)))


def test_packed_rows_with_their_gradients():
    rng = np.random.default_rng(4)
    q = jnp.asarray(rng.normal(size=(2, 256, 4, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 256, 2, 8)), jnp.float32) for _ in range(2))
    weigh = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    segments = jnp.asarray(np.sort(rng.integers(0, 5, (2, 256)), axis=1), jnp.int32)
    mask = (segments[:, :, None] == segments[:, None]) & jnp.tril(jnp.ones((256, 256), bool))

    def graded(function):
        value = lambda q, k, v: (jnp.sum((out := function(q, k, v)) * weigh), out)  # noqa: E731
        return jax.jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))(q, k, v)

    (_, actual), gradients = graded(lambda q, k, v: tpu_kernels.attend(segments, q, k, v, interpret=True))
    (_, expected), wanted = graded(lambda q, k, v: attention.attend_dense(q, k, v, mask))
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for a, b in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
