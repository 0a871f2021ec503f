"""The gated delta rule: chunks against NumPy's recurrence in float64, tiles of any rows against whole sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models import delta_rule, params, recurrence, sharding
from jaxagent.models.delta_rule import Inputs
from tests.engine.test_lm import mesh_of
from tests.models import tiny
from tests.models.forward import every_logit

GATES = {  # log decays and betas: of tokens that keep all and tokens that keep nothing, side by side, and each alone
    "any": lambda rng, shape: (
        -np.where(rng.random(shape) < 0.5, rng.exponential(1e-4, shape), 10.0 ** rng.uniform(-2, 4, shape)),
        np.where(rng.random(shape) < 0.5, 1 - 1e-6, 1e-6),
    ),
    "near 1": lambda rng, shape: (np.full(shape, -1e-7), np.full(shape, 1 - 1e-6)),
    "near 0": lambda rng, shape: (np.full(shape, -2e2), np.full(shape, 1e-6)),
}


def random_inputs(gates: str, b: int, t: int, h: int, k: int, v: int) -> Inputs:
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    queries, keys = (unit(rng.normal(size=(b, t, h, k))) for _ in range(2))
    values = queries * k**-0.5, keys, rng.normal(size=(b, t, h, v)), *GATES[gates](rng, (b, t, h))
    return Inputs(*(x.astype(np.float32) for x in values))


def reference(inputs: Inputs, segments: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, Inputs]:
    """Outputs, and the gradients of their sum weighed by `weights`: forward and backward token by token, in float64."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in inputs)
    b, t, h, _ = q.shape
    begins = np.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)[..., None, None, None]
    decay, out = np.exp(g)[..., None, None], np.zeros(v.shape)
    state, before = np.zeros((b, h, k.shape[-1], v.shape[-1])), []
    for i in range(t):
        before.append(np.where(begins[:, i], 0, state))
        state = before[-1] * decay[:, i]
        wrong = (v[:, i] - np.einsum("bhkv,bhk->bhv", state, k[:, i])) * beta[:, i, :, None]
        state = state + k[:, i, ..., None] * wrong[:, :, None]
        out[:, i] = np.einsum("bhkv,bhk->bhv", state, q[:, i])
    grads, to_state = Inputs(*(np.zeros(x.shape) for x in (q, k, v, g, beta))), np.zeros_like(state)
    for i in reversed(range(t)):
        faded = before[i] * decay[:, i]
        rest = v[:, i] - np.einsum("bhkv,bhk->bhv", faded, k[:, i])
        wrong = rest * beta[:, i, :, None]
        grads.q[:, i] = np.einsum("bhkv,bhv->bhk", faded + k[:, i, ..., None] * wrong[:, :, None], weights[:, i])
        to_state = to_state + q[:, i, ..., None] * weights[:, i, :, None]
        to_wrong = np.einsum("bhkv,bhk->bhv", to_state, k[:, i])
        grads.v[:, i] = to_wrong * beta[:, i, :, None]
        grads.beta[:, i] = (to_wrong * rest).sum(-1)
        grads.k[:, i] = np.einsum("bhkv,bhv->bhk", to_state, wrong) - np.einsum("bhkv,bhv->bhk", faded, grads.v[:, i])
        to_state = to_state - k[:, i, ..., None] * grads.v[:, i, :, None]
        grads.log_decay[:, i] = (to_state * faded).sum((-1, -2))
        to_state = np.where(begins[:, i], 0, to_state * decay[:, i])
    return out, grads


@pytest.mark.parametrize("tokens", [150, pytest.param(8192, marks=pytest.mark.slow)])
def test_chunks_are_the_recurrence_at_long_range_and_with_large_gates(tokens):
    """Where the published kernels gave NaN gradients: all are finite, and those of float64's recurrence."""
    b, h, k, v = 2, 1, 8, 6
    cuts = np.array([[0, 7, 8, 64, 127], [0, tokens // 2, tokens, tokens, tokens]])
    segments = (np.arange(tokens)[None, None] >= cuts[:, :, None]).sum(axis=1).astype(np.int32)
    weights = np.random.default_rng(1).normal(size=(b, tokens, h, v)).astype(np.float32)

    def total(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        out = delta_rule.chunked(inputs, segments)
        return (out * weights).sum(), out

    program = jax.jit(jax.grad(total, has_aux=True))
    for gates in GATES:
        inputs = random_inputs(gates, b, tokens, h, k, v)
        expected, of_inputs = reference(inputs, segments, weights)
        gradients, out = program(inputs)
        np.testing.assert_allclose(out, expected, atol=2e-5, err_msg=gates)
        for name, ours, theirs in zip(Inputs._fields, gradients, of_inputs, strict=True):
            assert np.isfinite(ours).all(), (gates, name)
            far = np.linalg.norm(ours - theirs)
            assert far <= 1e-5 * np.linalg.norm(theirs) + 1e-6, (gates, name, far)


def test_rows_in_tiles_follow_one_another_as_whole_sequences_do():
    """Sequences side by side, cut anywhere, rows that fill up between them: a row gets what its sequence gives it."""
    lengths, tile, t, h, k, v, width = [9, 1, 4, 6], 8, 9, 2, 4, 3, 3
    rng = np.random.default_rng(0)
    inputs, x = random_inputs("any", 4, t, h, k, v), rng.normal(size=(4, t, 5)).astype(np.float32)
    segments = (np.arange(t) < np.array(lengths)[:, None]).astype(np.int32)
    whole, flat = recurrence.PackedRows(segments), lambda a: a.reshape(-1, *a.shape[2:])
    expected, _ = jax.jit(whole.fold)(None, jax.tree.map(flat, inputs))
    windows, _ = jax.jit(whole.window, static_argnums=2)(None, flat(x), width)

    rows = [(sequence, place) for sequence in (2, 0, 3, 1) for place in range(lengths[sequence])]
    rows = [row for at in range(0, len(rows), 5) for row in rows[at : at + 5] + [rows[min(at + 4, len(rows) - 1)]] * 2]
    rows = [row for at in range(0, len(rows), tile - 1) for row in [*rows[at : at + tile - 1], None]]
    state = jnp.full((6, h, k, v), 9.0)
    last = jnp.full((6, width - 1, 5), 9.0)

    @jax.jit
    def step(state, last, number, position, rows, x):
        memories = recurrence.Memories(number, position)
        return memories.fold(state, rows), memories.window(last, x, width)

    for at in range(0, len(rows), tile):
        part = [*rows[at : at + tile], *[None] * tile][:tile]
        number = np.array([0 if row is None else row[0] + 2 for row in part], np.int32)
        place = [(0, 0) if row is None else row for row in part]
        position = np.array([p for _, p in place], np.int32)
        pick = lambda a, place=place: np.stack([a[row] for row in place])  # noqa: E731
        (out, state), (found, last) = step(state, last, number, position, jax.tree.map(pick, inputs), pick(x))
        for i, row in enumerate(part):
            if row is not None:
                index = row[0] * t + row[1]
                np.testing.assert_allclose(out[i], expected[index], atol=1e-5)
                for by in range(width):
                    np.testing.assert_array_equal(found[by][i], windows[by][index])


def test_sequences_of_one_token_follow_one_another_in_one_memory():
    """As in exact scoring, where the sequences of a packed row have one: the second is no row that fills up."""
    inputs = jax.tree.map(lambda x: jnp.asarray(x[0]), random_inputs("any", 1, 2, 2, 4, 3))
    expected, _ = recurrence.PackedRows(jnp.array([[1, 2]])).fold(None, inputs)
    memories = recurrence.Memories(jnp.array([1, 1]), jnp.zeros(2, jnp.int32))
    found, _ = memories.fold(jnp.full((2, 2, 4, 3), 9.0), inputs)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not np.allclose(found[0], found[1])


@pytest.mark.slow
def test_packed_sequences_are_those_alone():
    spec = hybrid()
    weights = tiny.init(spec)
    tokens = np.random.default_rng(0).integers(0, 61, (1, 40)).astype(np.int32)
    alone = every_logit(weights, spec, tokens[:, 7:29])
    # Positions of the whole row, which attention only sees as differences.
    packed = every_logit(weights, spec, tokens, np.array([[1] * 7 + [2] * 22 + [3] * 11], np.int32))
    np.testing.assert_allclose(packed[:, 7:29], alone, atol=2e-4)


def test_a_memory_is_not_split_over_tensor():
    spec, mesh = hybrid(), mesh_of(1, 1, 2)
    where = params.shardings(spec, mesh, sharding.COMPUTE).layers[0]
    assert where.w_qkv.spec == jax.P(None, None, None) and where.w_gate.spec == jax.P(None, None, "tensor")


def hybrid():
    return tiny.spec(family="qwen3_5_text", num_layers=4, partial_rotary_factor=0.5)
