"""A family whose layers are of two kinds comes in by its path: forward, gradients, folders, engine and plan."""

import asyncio
import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.models import hf, params
from jaxagent.models.spec import ModelSpec
from jaxagent.plan import costs
from tests.engine import test_lm
from tests.models import tiny
from tests.models.forward import all_logits
from tests.models.own_family import Parallel

NAME = "tests.models.own_family:FAMILY"
CONFIG = tiny.model_config(
    family=NAME, num_layers=4, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32,
    rope_theta=1e4, embed_init_std=0.5,
)  # fmt: skip
SPEC = ModelSpec.from_config(CONFIG, 61)


def by_hand(spec, weights, tokens) -> np.ndarray:
    """f64[T, V]: the logits of one sequence, in NumPy."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)
    t, d, scale = len(tokens), spec.head_dim, spec.pattern[1][0].scale

    def norm(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps) * gain

    def turned(x):  # [T, H, D]
        turns = np.arange(t)[:, None] / spec.rope_theta ** (np.arange(0, d, 2) / d)
        z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * np.exp(1j * turns)[:, None]
        return np.concatenate([z.real, z.imag], -1)

    def attention(x, layer, i):
        h = norm(x, layer.attn_norm[i])
        q, k, v = (np.einsum("te,ehd->thd", h, m[i]) for m in (layer.wq, layer.wk, layer.wv))
        if layer.bq is not None:
            q, k, v = q + layer.bq[i], k + layer.bk[i], v + layer.bv[i]
        if layer.q_norm is not None:
            q, k = norm(q, layer.q_norm[i]), norm(k, layer.k_norm[i])
        k, v = (np.repeat(m, 2, axis=1) for m in (turned(k), v))
        scores = np.where(np.tri(t, dtype=bool), np.einsum("qhd,khd->hqk", turned(q), k) / d**0.5, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        seen = np.einsum("hqk,khd->qhd", share / share.sum(-1, keepdims=True), v)
        return np.einsum("thd,hde->te", seen, layer.wo[i])

    def mlp(x, layer, i):
        h = norm(x, layer.mlp_norm[i])
        gate = h @ layer.w_gate[i]
        return (gate / (1 + np.exp(-gate)) * (h @ layer.w_up[i])) @ layer.w_down[i]

    x = w.embed[tokens]
    for i in range(2):
        for block in (attention, mlp):
            x = x + block(x, w.layers[0], i)
        x = x + scale * (attention(x, w.layers[1], i) + mlp(x, w.layers[1], i))
    return norm(x, w.final_norm) @ w.head[: spec.vocab_size].T


def test_layers_of_two_kinds_take_turns(tmp_path):
    weights, tokens = tiny.init(SPEC), np.random.default_rng(0).integers(0, 61, 20)
    expected = by_hand(SPEC, weights, tokens)
    np.testing.assert_allclose(all_logits(weights, SPEC, tokens[None])[0], expected, atol=1e-4)  # scanned
    one_by_one = weights.replace(layers=params.unstack(weights.layers))
    np.testing.assert_allclose(all_logits(one_by_one, SPEC, tokens[None])[0], expected, atol=1e-4)

    other = dataclasses.replace(SPEC, pattern=(SPEC.pattern[0], (Parallel(0.25),)), partial_rotary_factor=0.5)
    hf.save(tmp_path, weights, other, "float32")
    assert json.loads((tmp_path / "config.json").read_text())["residual_scale"] == 0.25
    read = hf.read_spec(tmp_path, CONFIG)
    assert (read.pattern, read.rotary_dim) == (other.pattern, 4)
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path, read, None).layers, weights.layers)
    names = {name for array in jax.tree.leaves(params.param_specs(read).layers[1]) for name in array.hf_names}
    assert "model.layers.3.mlp.up_proj.weight" in names and "model.layers.2.mlp.up_proj.weight" not in names


@pytest.mark.slow
def test_the_engine_and_the_plan_ask_its_blocks():
    with test_lm.driver_for(test_lm.mesh_of(), SPEC) as driver:
        driver.start(120)
        results = asyncio.run(test_lm.episodes(driver, 4))
    test_lm.assert_trainer_agrees(SPEC, results, 0.7)
    plain = tiny.spec(num_layers=4, tie_embeddings=False)
    assert costs.forward_flops(SPEC, 10, 5, 3) == costs.forward_flops(plain, 10, 5, 3)


def test_what_it_is_not_is_said(tmp_path):
    hf.save(tmp_path, tiny.init(SPEC), SPEC, "float32")
    with pytest.raises(ConfigError, match=r"model_type 'every_other' is not supported. Valid: qwen2, qwen3, llama"):
        hf.read_spec(tmp_path, tiny.model_config())
    with pytest.raises(ConfigError, match=r"num_layers=3 is not a multiple of the 2 kinds of layers of tests.models"):
        dataclasses.replace(SPEC, num_layers=3)
    with pytest.raises(ConfigError, match=r"config.model.family must be one of .* It is 'jaxagent.models.hf:DTYPES'"):
        ModelSpec.from_config(dataclasses.replace(CONFIG, family="jaxagent.models.hf:DTYPES"), 61)
