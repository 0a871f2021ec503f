"""The GPU's kernels of exact numerics, interpreted: what they compute, and that a row's bits are its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxagent.config import MeshConfig
from jaxagent.engine.lm import LanguageModel
from jaxagent.models import gpu_calls, gpu_products, kernels, layers, logprobs
from jaxagent.models.exact import Tiling, packed_logprobs
from jaxagent.models.sharding import FLAT, ROWS, make_mesh
from tests.models import tiny


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(gpu_calls, "call", functools.partial(gpu_calls.call, interpret=True))


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_any_size(monkeypatch, dtype, transposed):
    monkeypatch.setattr(gpu_products, "_PART", 128)  # two parts, the second one shorter
    x, w = normal(70, 200, dtype=dtype), normal(*((45, 200) if transposed else (200, 45)), dtype=dtype, seed=1)
    actual = jax.jit(gpu_products.product, static_argnums=(2, 3))(x, [w], transposed, jnp.float32)
    expected = np.float32(x) @ (np.float32(w).T if transposed else np.float32(w))
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_a_rows_bits_do_not_depend_on_other_rows(monkeypatch):
    monkeypatch.setattr(gpu_products, "_PART", 128)
    x, w, scale = normal(80, 200), normal(200, 40, seed=1), normal(200, seed=2)
    scores, targets, temperature = normal(80, 5000, seed=3), jnp.arange(80), jnp.linspace(0.1, 2, 80)

    @jax.jit
    def run(x, scores, targets, temperature):
        return (
            gpu_products.product(x, [w], False, jnp.float32),
            gpu_products.rms_norm(x, scale, 1e-6),
            gpu_products.row_logprobs(scores, targets, temperature),
        )

    whole = run(x, scores, targets, temperature)
    rows = np.array([79, 3, 64, 0])
    some = run(x[rows], scores[rows], targets[rows], temperature[rows])
    for few, all_rows in zip(some, whole, strict=True):
        np.testing.assert_array_equal(few, all_rows[rows])
    np.testing.assert_allclose(whole[1], layers.rms_norm(x, scale, 1e-6), atol=1e-5)
    np.testing.assert_allclose(whole[2], logprobs.row_logprobs(scores, targets, temperature), rtol=1e-5)


def test_an_excluded_token_has_no_probability():
    scores = jnp.asarray([[1.0, -jnp.inf, 2.0, -1e30]])
    actual = gpu_products.row_logprobs(scores, jnp.asarray([2]), jnp.asarray([0.5]))
    np.testing.assert_allclose(actual, -np.log1p(np.exp(-2.0)), rtol=1e-6)


EQUATIONS = {
    "ne,ehd->nhd": ((6, 24), (24, 4, 8), P(ROWS, None), P(None, "tensor", None)),
    "nhd,hde->ne": ((6, 4, 8), (4, 8, 24), P(ROWS, "tensor", None), P("tensor", None, None)),
    "nf,fe->ne": ((6, 32), (32, 24), P(ROWS, "tensor"), P("tensor", None)),
    "...e,ve->...v": ((2, 3, 24), (64, 24), P(ROWS, None, None), P("tensor", None)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_every_product_of_a_model_on_a_mesh(equation):
    x, w, of_x, of_w = EQUATIONS[equation]
    x, w = normal(*x), normal(*w, seed=1)
    expected = jnp.einsum(equation, x, w)
    with jax.set_mesh(make_mesh(MeshConfig(1, 2, 1, 2))), gpu_products.pinned(True):
        x, w = jax.device_put(x, of_x), jax.device_put(w, of_w)
        actual = jax.jit(lambda x, w: layers.contract(equation, x, w))(x, w)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_several_products_by_one_kernel_on_a_mesh():
    x, weights = normal(6, 24), [normal(24, heads, 6, seed=i) for i, heads in enumerate((8, 2, 2))]
    with jax.set_mesh(make_mesh(MeshConfig(1, 2, 1, 2))):
        placed = [jax.device_put(w, P(None, "tensor", None)) for w in weights]
        run = jax.jit(lambda x, placed: gpu_products.contract("ne,ehd->nhd", x, placed, x.dtype))
        actual = run(jax.device_put(x, P(ROWS, None)), placed)
    for y, w in zip(actual, weights, strict=True):
        np.testing.assert_allclose(y, jnp.tensordot(x, w, 1), atol=1e-5)


def test_other_equations_than_matrix_products_stay_with_xla():
    assert all(map(gpu_products.is_matrix_product, [*EQUATIONS, "ne,er->nr", "nr,rhd->nhd"]))
    x, w = normal(3, 4, 5), normal(3, 5, 6, seed=1)
    with gpu_products.pinned(True):
        np.testing.assert_allclose(layers.contract("bcd,bde->bce", x, w), x @ w, atol=1e-5)


@pytest.mark.slow
def test_exact_scoring_runs_these_kernels_and_computes_what_plain_code_does(monkeypatch):
    """Sequences in two packings, and one as the engine prefills it: equal bits, and those of plain code to rounding."""
    spec = dataclasses.replace(tiny.spec(), head_dim=16, embed_dim=24)
    weights, tiling, rng = tiny.random_params(spec), Tiling(16, 16, "float32"), np.random.default_rng(0)
    sequences = [rng.integers(1, 61, n).astype(np.int32) for n in (23, 9, 30)]

    def score(rows, t):
        b = len(rows)
        tokens, positions, head, targets = (np.zeros((b, t), np.int32) for _ in range(4))
        at = {}
        for row, members in enumerate(rows):
            column = 0
            for i in members:
                own = slice(column, column + len(sequences[i]))
                tokens[row, own], positions[row, own] = sequences[i], np.arange(len(sequences[i]))
                head[row, own], targets[row, own] = np.arange(t)[own], np.roll(sequences[i], -1)
                at[i], column = (row, own), own.stop
        with jax.set_mesh(make_mesh(MeshConfig(1, 1, 1, 1))):
            arrays = [jax.device_put(a, P(ROWS, None)) for a in (tokens, positions, head, targets)]
            warmth = jax.device_put(np.full((b, t), 0.7, np.float32), P(ROWS, None))
            scored = np.asarray(jax.jit(lambda w, *a: packed_logprobs(w, spec, tiling, *a))(weights, *arrays, warmth))
        return np.concatenate([scored[at[i]] for i in range(len(sequences))])

    plain = score([[0, 1], [2]], 34)
    monkeypatch.setattr(kernels, "platform", lambda: "gpu")
    # Interpreted, a kernel's own arrays have no type that says over which devices they vary.
    monkeypatch.setattr(jax, "shard_map", functools.partial(jax.shard_map, check_vma=False))
    calls = []
    monkeypatch.setattr(gpu_products, "product", lambda *a, p=gpu_products.product: calls.append(a) or p(*a))
    pinned = score([[0, 1], [2]], 34)
    assert len(calls) == 4 * spec.num_layers + 1
    np.testing.assert_allclose(pinned, plain, atol=2e-5)
    np.testing.assert_array_equal(score([[2, 1, 0]], 63), pinned)

    model, tokens = LanguageModel(spec, "float32").pinned(), sequences[2]

    @jax.jit
    def prefilled(weights, tokens, positions, tables, targets, temperature):
        hidden, _ = model.extend(weights, model.init_cache(5, 16), tokens, positions, tables)
        of_rows = jax.shard_map(logprobs.row_logprobs, in_specs=(P(FLAT, None), P(FLAT), P(FLAT)), out_specs=P(FLAT))
        return of_rows(model.logits(weights, hidden), targets, temperature)

    n = len(tokens)
    rows = (tokens, np.arange(n, dtype=np.int32), np.full((n, 2), [4, 2], np.int32), np.roll(tokens, -1))
    with jax.set_mesh(make_mesh(MeshConfig(1, 1, 1, 1))):
        placed = [jax.device_put(a, P(FLAT)) for a in (*rows, np.full(n, 0.7, np.float32))]
        by_engine = prefilled(model.place(weights), *placed)
    np.testing.assert_array_equal(by_engine, pinned[-n:])
