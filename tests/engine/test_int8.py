"""Int8 weights: rounding by hand, a quarter of the memory at rest and while decoding, and how far log-probs are off."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.engine import functions, int8
from jaxagent.engine.lm import LanguageModel
from jaxagent.models import logprobs, params, sharding, transformer
from jaxagent.models.layers import Int8Array, quantise
from tests.engine import test_lm
from tests.engine.test_lm import SPEC
from tests.models import tiny

WIDE = dataclasses.replace(SPEC, num_layers=4, embed_dim=64, mlp_dim=256, tie_embeddings=False, embed_init_std=0.1)
BOTH = [dataclasses.replace(WIDE, tie_embeddings=True), WIDE]


@functools.cache
def placed(spec, rounded):
    """The weights as they are served, with int8 matrices or without."""
    with jax.set_mesh(test_lm.mesh_of()):
        return jax.jit(LanguageModel(spec, "float32", rounded).place)(tiny.init(spec))


def test_rounding_by_hand() -> None:
    # Two outputs: the largest weight is 127 steps, so the steps are 0.01 and 2; all are within half a step.
    weights = jnp.array([[1.27, -254.0], [0.004, 3.0], [-0.006, 0.9], [0.0, -1.1]])
    got = quantise(weights, 0)
    assert got.qvalue.dtype == jnp.int8 and got.scale.shape == (1, 2)
    np.testing.assert_allclose(got.scale[0], [0.01, 2.0], rtol=1e-6)
    assert got.qvalue.tolist() == [[127, -127], [0, 2], [-1, 0], [0, -1]]
    np.testing.assert_allclose(got.astype(jnp.float32)[:, 1], [-254, 4, 0, -2], rtol=1e-6)
    assert (jnp.abs(got.astype(jnp.float32) - weights) <= got.scale / 2 * 1.0001).all()
    nothing = quantise(jnp.zeros((3, 2)), 0)
    assert not nothing.astype(jnp.float32).any()


def test_a_scale_per_output_channel() -> None:
    layer = placed(WIDE, True).layers[1]
    e, h, k, d, f = 64, 4, 2, 8, 256
    shapes = {"wq": (1, h, d), "wk": (1, k, d), "wv": (1, k, d), "wo": (1, 1, e)}
    shapes |= {"w_gate": (1, f), "w_up": (1, f), "w_down": (1, e)}
    assert {name: getattr(layer, name).scale.shape for name in shapes} == shapes
    # Every channel uses the whole range.
    for name, shape in shapes.items():
        summed = tuple(i for i, size in enumerate(shape) if size == 1)
        assert (jnp.abs(getattr(layer, name).qvalue.astype(int)).max(axis=summed) == 127).all(), name


@pytest.mark.parametrize("spec", BOTH, ids=["tied", "untied"])
def test_a_quarter_of_the_memory(spec) -> None:
    def size(tree) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(tree))

    model = LanguageModel(spec, "float32", int8=True)
    whole, quantised = placed(spec, False), placed(spec, True)
    looked_up = 0 if spec.tie_embeddings else whole.embed.nbytes
    assert 0.25 < (size(quantised) - looked_up) / (size(whole) - looked_up) < 0.29
    assert model.place(quantised) is quantised  # what is served already is taken as it is

    # While decoding, at most a few matrices are multiplied out: not all of them, before the loop.
    with jax.set_mesh(test_lm.mesh_of()):
        state = jax.jit(functions.init_state, static_argnums=(0, 1, 2, 3))(model, 8, 3, 16)
        stops = functions.StopTables(jnp.zeros((1, 64), jnp.int16), jnp.zeros(64, bool))
        generate = jax.jit(functions.generate, static_argnums=(0, 7, 8), donate_argnums=3)
        args = stops, state, np.zeros((8, 2), np.int32), np.arange(8)[None], np.int32(1), 4, False
        used = generate.lower(model, quantised, *args).compile().memory_analysis().temp_size_in_bytes
    assert used < size(whole) / 2


@pytest.mark.parametrize("spec", BOTH, ids=["tied", "untied"])
def test_the_mismatch_is_measured(spec) -> None:
    plain = LanguageModel(spec, "float32")
    whole, quantised = placed(spec, False), placed(spec, True)
    texts = [np.random.default_rng(i).integers(0, test_lm.VOCAB, n) for i, n in enumerate((2, 30, 200))]
    with jax.set_mesh(test_lm.mesh_of()):
        gaps = int8.logprob_gaps(plain, whole, quantised, texts)
        assert gaps.shape == (1 + 29 + 63,)
        assert 1e-4 < gaps.mean() < gaps.max() < 0.3
        # By hand: the trainer's forward with the weights multiplied out, on the longest text.
        by_hand = jax.tree.map(lambda w: w.astype(jnp.float32), quantised, is_leaf=lambda w: isinstance(w, Int8Array))
        expected = np.abs(scored(spec, whole, texts[2]) - scored(spec, by_hand, texts[2]))
        np.testing.assert_allclose(gaps[-63:].mean(), expected.mean(), rtol=0.02)
        np.testing.assert_allclose(gaps[-63:].max(), expected.max(), rtol=0.02)


def scored(spec, weights, text) -> np.ndarray:
    """Log-probs of text[1:], up to 64 tokens, without the engine."""
    tokens = jnp.asarray(text[:64])[None]
    at = jnp.arange(tokens.shape[1])[None]

    @jax.jit
    def forward(weights) -> jax.Array:
        x, *_ = transformer.forward_packed(weights, spec, tokens, at, jnp.ones_like(tokens), at)
        return jax.nn.log_softmax(logprobs.logits(weights, spec, x[0]))

    return np.take_along_axis(np.asarray(forward(weights))[:-1], np.asarray(tokens).T[1:], axis=1)[:, 0]


@pytest.mark.slow
def test_the_driver_serves_it() -> None:
    async def ask(driver):
        session = await driver.open("t", 0)
        return await driver.generate(session, [5, 6, 7], 9, test_lm.COOL, 0, 60)

    mesh = test_lm.mesh_of()
    base = test_lm.driver_for(mesh, WIDE)
    base.model = LanguageModel(WIDE, "float32", int8=True)
    with base as driver:
        driver.start(120)
        g = asyncio.run(ask(driver))
        assert driver.stats()["compiles"] > 4
        compiled = driver.stats()["compiles"]
        with jax.set_mesh(mesh):
            other = tiny.init(WIDE, 1, params.shardings(WIDE, mesh, sharding.TRAIN))
        driver.update_params(other, 1)
        again = asyncio.run(ask(driver))
        assert driver.stats()["compiles"] == compiled
    assert len(g.tokens) == 9 and ((g.tokens >= 0) & (g.tokens < test_lm.VOCAB)).all()
    assert again.policy_versions.tolist() == [1] * 9 and again.tokens.tolist() != g.tokens.tolist()
