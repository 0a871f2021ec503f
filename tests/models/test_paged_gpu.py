"""The GPU's and the TPU's kernels of paged attention, interpreted: against the loop of every other platform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models import attention, gpu_calls, gpu_kernels, tpu_kernels

PAGE, D = 16, 32
KERNELS = pytest.mark.parametrize("kernels", [gpu_kernels, tpu_kernels], ids=lambda kernels: kernels.__name__[-11:])


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu_calls, "call", functools.partial(gpu_calls.call, interpret=True))


def interpreted(kernels):
    how = {"interpret": True} if kernels is tpu_kernels else {}

    def run(q, positions, keys, values, tables, starts=None):
        return kernels.attend_pages(q, positions, PAGE, keys, values, tables, starts, **how)

    return run


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
    actual = jax.jit(interpreted(kernels))(*arguments[:2], *arguments[3:])
    expected = attention.attend_pages(*arguments)
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
    actual = jax.jit(interpreted(gpu_kernels))(*arguments[:2], *arguments[3:])
    np.testing.assert_allclose(actual, attention.attend_pages(*arguments), atol=2e-6)
    np.testing.assert_allclose(actual[0], jnp.broadcast_to(values[0, :, 79], (3, D)), atol=1e-6)  # it sees itself only


def test_which_sizes_it_takes():
    taken = [gpu_kernels.supports_pages(*sizes) for sizes in ((128, 64), (16, 16), (96, 64), (8, 16), (64, 24))]
    assert taken == [True, True, False, False, False]


@KERNELS
def test_rows_that_share_a_sequence(monkeypatch, kernels):
    monkeypatch.setattr(gpu_kernels, "_MOST", {4: 4})  # so that two programs of a GPU share a sequence, too
    rng = np.random.default_rng(2)
    keys = jnp.asarray(rng.normal(size=(5, 2, D, PAGE)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(5, 2, PAGE, D)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(8, 4, D)), jnp.float32)
    positions = jnp.asarray([3, 4, 20, 21, 30, 31, 8, 9], jnp.int32)
    tables = jnp.asarray([[1, 2], [4, 3]], jnp.int32)
    run = jax.jit(interpreted(kernels))
    alone, shared = (
        run(q, positions, keys, values, np.repeat(tables, 4, axis=0)),
        run(q, positions, keys, values, tables),
    )
    np.testing.assert_allclose(shared, alone, atol=2e-6)
    np.testing.assert_allclose(attention.attend_pages(q, positions, PAGE, keys, values, tables), alone, atol=2e-6)


def test_a_row_gets_the_same_bits_whoever_else_is_there(monkeypatch):
    """Other rows, fewer of them, a wider table, other programs per sequence, and the same tokens in a packed row."""
    monkeypatch.setattr(gpu_kernels, "PART", 2 * PAGE)
    rng = np.random.default_rng(3)
    keys, values = rng.normal(size=(30, 2, D, PAGE)), rng.normal(size=(30, 2, PAGE, D))
    q = rng.normal(size=(6, 6, D))
    positions = np.array([0, 31, 32, 40, 95, 79], np.int32)
    tables = rng.permutation(36).reshape(6, 6).astype(np.int32) % 30

    def bits(q, positions, keys, values, tables, *starts):
        arrays = [np.float32(q), positions, np.float32(keys), np.float32(values), tables, *starts]
        return np.asarray(jax.jit(interpreted(gpu_kernels))(*arrays))

    whole = bits(q, positions, keys, values, tables)
    expected = attention.attend_pages(
        *(jnp.asarray(x) for x in (np.float32(q), positions)),
        PAGE,
        *map(jnp.float32, (keys, values)),
        jnp.asarray(tables),
    )
    np.testing.assert_allclose(whole, expected, atol=2e-6)
    some = np.array([4, 1])
    wider = np.pad(tables[some], ((0, 0), (0, 3)), constant_values=7)
    np.testing.assert_array_equal(bits(q[some], positions[some], keys, values, wider), whole[some])
    monkeypatch.setattr(gpu_kernels, "_PROGRAMS", 1)  # every program takes a whole sequence
    np.testing.assert_array_equal(bits(q, positions, keys, values, tables), whole)
    k = np.stack([np.concatenate(keys[tables[row]], axis=-1) for row in (4, 3)])
    v = np.stack([np.concatenate(values[tables[row]], axis=-2) for row in (4, 3)])
    k, v = np.pad(k, ((0, 0),) * 3 + ((13, PAGE),)), np.pad(v, ((0, 0),) * 2 + ((13, PAGE), (0, 0)))
    at, starts = np.array([[0], [1]], np.int32), np.array([13, 13], np.int32)
    np.testing.assert_array_equal(bits(q[[4, 3]], positions[[4, 3]], k, v, at, starts), whole[[4, 3]])


def test_tokens_are_written_into_their_pages():
    rng = np.random.default_rng(4)
    keys, values = rng.normal(size=(5, 3, D, PAGE)), rng.normal(size=(5, 3, PAGE, D))
    k, v = rng.normal(size=(4, 3, D)), rng.normal(size=(4, 3, D))
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (keys, values, k, v)]
    page, offset = jnp.asarray([4, 0, 2, 5]), jnp.asarray([3, 15, 0, 1])  # the last one is past the end
    actual = gpu_kernels.write(*arrays, page, offset)
    for new, expected in zip(actual, attention.write_pages(*arrays, page, offset, PAGE), strict=True):
        np.testing.assert_array_equal(np.float32(new), np.float32(expected))
    np.testing.assert_array_equal(np.float32(actual[0][2, :, :, 0]), np.float32(arrays[2][2]))
    assert np.array_equal(np.float32(actual[1][1]), np.float32(arrays[1][1]))
