"""LoRA: adapters beside a projection and multiplied into it are one function, on one device and on eight."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.config import ConfigError, LoraConfig, MeshConfig
from jaxagent.models import layers, logprobs, lora, params, sharding, transformer
from tests.models import tiny
from tests.models.forward import all_logits

CONFIG = LoraConfig(rank=3, alpha=6.0, rank_stabilised=False, targets="all-linear")
FAMILIES = {
    "qwen2": dict(family="qwen2", remat="dots"),
    "qwen3": dict(remat="none"),
    "llama": dict(family="llama", tie_embeddings=False, remat="layer"),
}


def random_adapters(spec, config=CONFIG, seed=1) -> lora.Adapters:
    """Adapters as they are in the middle of training: B is not 0."""
    made, rng = tiny.init_of(lora.adapter_specs(spec, config), seed), np.random.default_rng(seed + 1)

    def moved(adapter: layers.Adapter) -> layers.Adapter:
        return adapter.replace(b=jax.device_put(0.3 * rng.normal(size=adapter.b.shape).astype(np.float32)))

    return jax.tree.map(moved, made, is_leaf=lambda x: isinstance(x, layers.Adapter))


def outputs(weights, spec, batch):
    b, r = batch["targets"].shape
    names = ("tokens", "positions", "segments", "head_positions")
    x, *_ = transformer.forward_packed(weights, spec, *(batch[name] for name in names))
    return logprobs.token_scores(weights, spec, x.reshape(b * r, -1), batch["targets"].reshape(-1), 0.7)[:2]


def loss(adapters, base, spec, batch, merged: bool):
    weights = lora.merge(base, adapters, CONFIG, "float32") if merged else lora.adapt(base, adapters, CONFIG)
    scores, entropy = outputs(weights, spec, batch)
    ramp = jnp.linspace(0.1, 1.0, len(scores))
    return (scores * ramp).sum() + 0.3 * entropy.sum(), (scores, entropy)


step = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnames=("spec", "merged"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "llama", pytest.param("qwen3", marks=pytest.mark.nightly)])
def test_beside_on_eight_devices_equals_merged_on_one(family):
    """The gradient through the sums W + s A B is the witness of the one that never makes them, and the other way."""
    spec = tiny.spec(**FAMILIES[family])
    base, adapters = tiny.init(spec), random_adapters(spec)
    batch = tiny.batch(b=8, t=12, r=7, vocab=spec.vocab_size)
    (total, made), grads = step(adapters, base, spec, batch, merged=True)
    (without, _), _ = step(jax.tree.map(jnp.zeros_like, adapters), base, spec, batch, merged=True)
    assert abs(float(total - without)) > 0.1

    mesh = sharding.make_mesh(MeshConfig(2, 2, 2, 1))
    with jax.set_mesh(mesh):
        where = params.shardings_of(lora.adapter_specs(spec, CONFIG), mesh, sharding.TRAIN)
        split = jax.device_put(adapters, where)
        split_base = jax.device_put(base, params.shardings(spec, mesh, sharding.TRAIN))
        split_batch = jax.device_put(batch, sharding.rows(mesh, 2))
        (split_total, split_made), split_grads = step(split, split_base, spec, split_batch, merged=False)
    np.testing.assert_allclose(split_total, total, rtol=1e-5)
    assert tiny.worst_relative(made, split_made) < 1e-5
    assert tiny.worst_relative(grads, split_grads) < 1e-4
    # Gradients come back as the adapters lie: nothing moves before the optimiser.
    same = lambda x, s: None if x.sharding.is_equivalent_to(s, x.ndim) else pytest.fail(str(x.sharding))  # noqa: E731
    jax.tree.map(same, split_grads, where)


@pytest.mark.parametrize(("stabilised", "scale"), [(True, 6.0 / 2), (False, 6.0 / 4)])  # alpha / sqrt(r), alpha / r
def test_a_merged_projection_by_hand(stabilised, scale):
    """Every head of every layer, in float64: q [E, H, D] and o [H, D, E] are matrices once their heads are joined."""
    spec, config = tiny.spec(), LoraConfig(4, 6.0, stabilised, "q_proj, o_proj")
    base, adapters = tiny.init(spec), random_adapters(spec, config)
    assert set(adapters) == {"wq", "wo"}
    merged = lora.merge(base, adapters, config, "float32")
    for name, inputs in (("wq", 16), ("wo", 32)):
        w, a, b = (np.asarray(x, np.float64) for x in (getattr(base.layers, name), adapters[name].a, adapters[name].b))
        for layer in range(2):
            product = a[layer].reshape(inputs, 4) @ b[layer].reshape(4, -1)
            expected = w[layer].reshape(inputs, -1) + scale * product
            got = getattr(merged.layers, name)[layer].reshape(inputs, -1)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    for name in ("wk", "wv", "w_gate", "w_up", "w_down"):
        assert getattr(merged.layers, name) is getattr(base.layers, name)
    assert merged.embed is base.embed


def test_adapters_start_at_the_base_and_as_published():
    spec = tiny.spec(embed_dim=64, mlp_dim=96)
    config = LoraConfig(32, 64.0, False, "all-linear")
    base, adapters = tiny.init(spec), params.init_of(
        lora.adapter_specs(spec, config), jax.random.key(0)
    )  # fmt: skip
    merged = lora.merge(base, adapters, config, "float32")
    jax.tree.map(np.testing.assert_array_equal, merged, base)
    # Gaussian with variance 1 / (3 inputs): 96 inputs of w_down, 2 x 96 x 32 draws.
    a = np.asarray(adapters["w_down"].a)
    assert a.std() == pytest.approx((3 * 96) ** -0.5, rel=0.05) and abs(a.mean()) < 4e-3
    assert np.mean(np.abs(a) > 2 * a.std()) == pytest.approx(0.0455, abs=0.012)  # not uniform


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        ("ne,ehd->nhd", ("ne,er->nr", "nr,rhd->nhd")),
        ("nhd,hde->ne", ("nhd,hdr->nr", "nr,re->ne")),
        ("nf,fe->ne", ("nf,fr->nr", "nr,re->ne")),
        ("rf,fe->re", ("rf,fq->rq", "rq,qe->re")),
    ],
)
def test_the_two_products_beside_one(equation, expected):
    assert layers.beside(equation) == expected


REFUSED = [  # changes of the adapters, and what is said of them
    (dict(targets="q_proj,v_porj"), "no projection 'v_porj'. Did you mean 'v_proj'?"),
    (dict(targets="all_linear"), "no projection 'all_linear'. Did you mean 'all-linear'?"),
    (dict(targets=""), "no projection ''. Valid: q_proj, "),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_mistakes_are_named(changes, message):
    import dataclasses

    with pytest.raises(ConfigError, match=re.escape(message)):
        lora.targets(dataclasses.replace(CONFIG, **changes), tiny.spec())


@pytest.mark.parametrize("rank", [3, 16])
def test_the_mesh_decides_no_bit_of_what_is_multiplied_out(rank):
    """Matrix products of these shapes differ in their last bits between one device and eight."""
    rng = np.random.default_rng(0)
    w, a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 256, 96), (2, 256, rank), (2, rank, 96)))
    found = []
    for mesh in (sharding.make_mesh(MeshConfig(1, 1, 1, 1)), sharding.make_mesh(MeshConfig(1, 8, 1, 1))):
        where = [jax.NamedSharding(mesh, jax.P(None, *axes)) for axes in (("fsdp", None), ("fsdp", None), (None, None))]
        with jax.set_mesh(mesh):
            array = layers.LoraArray(*map(jax.device_put, (w, a, b), where), scale=0.7)
            (made,) = lora.products({"w": array}, "float32").values()
        assert made.sharding.is_equivalent_to(where[0], 3)
        found.append(np.asarray(made))
    np.testing.assert_array_equal(found[0].view(np.int32), found[1].view(np.int32))
    np.testing.assert_allclose(found[0], w + 0.7 * np.einsum("lir,lro->lio", a, b, dtype=np.float64), atol=1e-4)


@pytest.mark.slow
def test_adapters_of_a_hybrid_of_experts_beside_and_merged():
    """Delta nets, gated attention and experts with one that all share: layers of two kinds."""
    spec = tiny.spec(family="qwen3_5_moe_text", num_layers=4)
    base, adapters = tiny.init(spec), random_adapters(spec)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, (2, 20)).astype(np.int32)
    weights = lora.adapt(base, adapters, CONFIG), lora.merge(base, adapters, CONFIG, "float32"), base
    beside, merged, without = (all_logits(one, spec, tokens) for one in weights)
    np.testing.assert_allclose(beside, merged, atol=3e-4)
    assert np.abs(beside - without).max() > 1
