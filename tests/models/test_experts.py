"""A mixture of experts: what is computed, by hand and by torch; and that a row does not know its company."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxagent.config import ConfigError, LoraConfig, MeshConfig
from jaxagent.engine.lm import LanguageModel
from jaxagent.models import gpu_kernels, hf, logprobs, lora, params, sharding, transformer
from jaxagent.models.blocks import FlatRows, experts
from jaxagent.models.blocks.experts import Experts, tile_rows
from jaxagent.models.blocks.mla import LatentAttention
from jaxagent.models.blocks.routing import Routing, route, weigh
from jaxagent.models.layers import Int8Array
from jaxagent.plan import costs
from tests.engine.test_lm import mesh_of
from tests.models import tiny
from tests.models.test_lora import random_adapters

BLOCK = Experts(Routing(count=5, active=2), mlp_dim=12)
EIGHT = tiny.spec(family="qwen3_moe", pattern=((tiny.spec().pattern[0][0], Experts(Routing(8, 3), mlp_dim=12)),))
SPEC = tiny.spec(family="qwen3_moe", pattern=((tiny.spec().pattern[0][0], BLOCK),))
ADAPTED = LoraConfig(3, 6.0, False, "all-linear")


def arrays(rows: int = 37, embed: int = 16, seed: int = 0) -> list[np.ndarray]:
    """Rows, a router and the three matrices of each expert."""
    rng = np.random.default_rng(seed)
    x, f = BLOCK.routing.count, BLOCK.mlp_dim
    shapes = (rows, embed), (embed, x), (x, embed, f), (x, embed, f), (x, f, embed)
    return [rng.normal(0, 0.5, shape).astype(np.float32) for shape in shapes]


def by_hand(block: Experts, h, router, w_gate, w_up, w_down) -> np.ndarray:
    """f64[N, E], one row and expert after another, in NumPy."""
    h, router, w_gate, w_up, w_down = (np.asarray(a, np.float64) for a in (h, router, w_gate, w_up, w_down))
    out = np.zeros_like(h)
    for n, row in enumerate(h):
        share = np.exp(row @ router) / np.exp(row @ router).sum()
        share = 1 / (1 + np.exp(-row @ router)) if block.routing.scores == "sigmoid" else share
        chosen = np.argsort(-share, kind="stable")[: block.routing.active]
        total = share[chosen].sum() if block.routing.renormalise else 1.0
        for x in chosen:
            gate = row @ w_gate[x]
            out[n] += share[x] / total * (gate / (1 + np.exp(-gate)) * (row @ w_up[x])) @ w_down[x]
    return out


@functools.partial(jax.jit, static_argnums=0)
def mixture(block, h, router, *matrices):
    return block._mixture(h, *route(block.routing, h, router), *matrices)


ROUTINGS = BLOCK.routing, Routing(5, 3, False), Routing(5, 5), Routing(5, 1), Routing(5, 2, scores="sigmoid")


@pytest.mark.parametrize("block", [Experts(routing, 12) for routing in ROUTINGS])
def test_the_sum_of_the_chosen_experts(block):
    a = arrays()
    np.testing.assert_allclose(mixture(block, *a), by_hand(block, *a), atol=1e-5)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("renormalise", [True, False])
def test_a_bias_and_groups_choose_as_in_deepseek_v3(groups, renormalise):
    """By transformers' own router, with experts that a bias makes attractive although they weigh little."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    rng = np.random.default_rng(3)
    h, router, bias = (rng.normal(0, 0.4, shape).astype(np.float32) for shape in ((200, 16), (16, 12), (12,)))
    config = transformers.DeepseekV3Config(
        hidden_size=16, n_routed_experts=12, num_experts_per_tok=3, n_group=groups, topk_group=min(2, groups),
        norm_topk_prob=renormalise, routed_scaling_factor=2.5,
    )  # fmt: skip
    module = theirs.DeepseekV3TopkRouter(config)
    module.weight.data[:], module.e_score_correction_bias[:] = torch.as_tensor(router.T), torch.as_tensor(bias)
    routing = Routing(12, 3, renormalise, "sigmoid", True, groups, min(2, groups), 2.5, 1e-20)
    scores, chosen = jax.jit(route, static_argnums=0)(routing, h, router, bias)
    weights = weigh(routing, scores, chosen)
    _, their_weights, their_choice = module(torch.as_tensor(h))
    order = their_choice.argsort(-1)
    np.testing.assert_array_equal(chosen, their_choice.gather(-1, order))
    np.testing.assert_allclose(weights, their_weights.gather(-1, order).detach(), rtol=1e-5)
    slope = jax.grad(lambda bias: weigh(routing, *route(routing, h, router, bias)).sum())(bias)
    assert not np.any(slope)


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_shared_expert_with_its_gate_is_that_of_qwen3_next(renormalise):
    """And its gradients: the block's output less the residual stream, behind the norm."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    block = Experts(Routing(6, 2, renormalise), 12, shared=1, shared_dim=20, shared_gate=True)
    config = transformers.Qwen3NextConfig(
        hidden_size=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=renormalise,
        shared_expert_intermediate_size=20,
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    module = theirs.Qwen3NextSparseMoeBlock(config)
    for parameter in module.parameters():
        parameter.data[:] = torch.randn_like(parameter) * 0.3
    w = {name: parameter.detach().numpy().swapaxes(-1, -2) for name, parameter in module.named_parameters()}
    layer = params.Layers(
        mlp_norm=jnp.ones(16), router=w["gate.weight"], router_bias=None, w_down=w["experts.down_proj"],
        w_gate=w["experts.gate_up_proj"][..., :12], w_up=w["experts.gate_up_proj"][..., 12:],
        shared_w_gate=w["shared_expert.gate_proj.weight"], shared_w_up=w["shared_expert.up_proj.weight"],
        shared_w_down=w["shared_expert.down_proj.weight"], shared_gate=w["shared_expert_gate.weight"],
    )  # fmt: skip
    spec = tiny.spec(embed_dim=16, family="qwen3_moe", num_layers=1, pattern=((block,),))
    shapes = {name: array and array.shape for name, array in block.arrays(spec).items()}
    assert shapes == {name: array if array is None else array.shape for name, array in vars(layer).items()}
    x = np.random.default_rng(2).normal(size=(30, 16)).astype(np.float32)
    x /= np.sqrt(np.mean(x**2, axis=1, keepdims=True) + spec.norm_eps)  # as the block's norm leaves it
    expected = module(torch.as_tensor(x)[None])[0]
    (expected**3).sum().backward()

    def cubes(layer):
        added, _ = block.apply(layer, spec, jnp.asarray(x), FlatRows(None, None), None)
        return (added**3).sum(), added

    gradients, added = jax.jit(jax.grad(cubes, has_aux=True))(layer)
    np.testing.assert_allclose(added, expected.detach(), atol=1e-5)
    for name, ours in (
        ("gate", "router"),
        ("shared_expert_gate", "shared_gate"),
        ("shared_expert.up_proj", "shared_w_up"),
    ):
        theirs_of = module.get_parameter(f"{name}.weight").grad.numpy().T
        np.testing.assert_allclose(getattr(gradients, ours), theirs_of, atol=1e-3 * np.abs(theirs_of).max())


def test_of_equal_experts_the_first_are_chosen_however_the_rows_lie():
    h, router, *_ = arrays()
    router[:, 1:] = router[:, :1]
    _, chosen = jax.jit(route, static_argnums=0)(BLOCK.routing, h, router)
    np.testing.assert_array_equal(chosen, np.tile([0, 1], (len(h), 1)))


def test_a_row_is_the_same_to_the_bit_whoever_chooses_its_expert():
    """Also when all others choose it, and when it is alone with it."""
    h, router, *matrices = arrays(rows=64)
    together = np.asarray(mixture(BLOCK, h, router, *matrices))
    rng = np.random.default_rng(1)
    for _ in range(4):
        order = rng.permutation(64)
        np.testing.assert_array_equal(np.asarray(mixture(BLOCK, h[order], router, *matrices)), together[order])
    for row in range(4):
        crowd, alone = np.tile(h[row], (64, 1)), np.tile(-h[row], (64, 1))
        alone[17] = h[row]
        np.testing.assert_array_equal(
            np.asarray(mixture(BLOCK, crowd, router, *matrices)), np.tile(together[row], (64, 1))
        )
        np.testing.assert_array_equal(np.asarray(mixture(BLOCK, alone, router, *matrices))[17], together[row])


def test_tiles_are_as_large_as_experts_are_busy():
    sizes = [tile_rows(rows, 8, 128) for rows in (1, 16, 64, 256, 1024, 16384)]
    assert sizes == [1, 8, 8, 16, 64, 128]


def loss(weights, spec, batch):
    """Mean negative log-prob of some targets."""
    x, *_ = transformer.forward_packed(
        weights, spec, *(batch[k] for k in ("tokens", "positions", "segments", "head_positions"))
    )
    targets = sharding.merge_rows(jnp.asarray(batch["targets"]))
    values, *_ = logprobs.token_scores(weights, spec, sharding.merge_rows(x), targets, 1.0)
    return -values.mean()


LATENT = LatentAttention(query_rank=12, rank=10, plain_dim=6, value_dim=10)
SHARED = (
    Experts(Routing(8, 2, True, "sigmoid", True, 4, 2, 1.7), 12, shared=2),
    Experts(Routing(5, 2), 12, shared=1, shared_dim=6, shared_gate=True),
)
LATENT_SPEC = dataclasses.replace(SPEC, pattern=tuple((LATENT, mixture) for mixture in SHARED))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [
        (MeshConfig(2, 2, 2, 1), EIGHT.pattern),
        (MeshConfig(2, 1, 1, 1, 4), EIGHT.pattern),
        (MeshConfig(1, 2, 2, 1, 2), EIGHT.pattern),
        (MeshConfig(2, 2, 2, 1), LATENT_SPEC.pattern),
    ],
    ids=["x1", "x4", "x2", "latent"],
)
def test_a_mesh_gives_the_gradients_of_one_device(sizes, pattern):
    spec = dataclasses.replace(EIGHT, pattern=pattern)
    batch, program = tiny.batch(8, 24, 6, EIGHT.vocab_size), jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected, gradients = program(tiny.init(spec), spec, batch)
    mesh = sharding.make_mesh(sizes)
    with jax.set_mesh(mesh):
        weights = tiny.init(spec, 0, params.shardings(spec, mesh, sharding.TRAIN))
        placed = {name: jax.device_put(x, sharding.rows(mesh, 2)) for name, x in batch.items()}
        value, others = program(weights, spec, placed)
    assert abs(float(value - expected)) < 1e-5
    assert tiny.worst_relative(gradients, others) < 1e-5
    zero = [path[-1].name for path, g in jax.tree_util.tree_leaves_with_path(gradients) if not np.any(g)]
    assert set(zero) <= {"router_bias"}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, MeshConfig(1, 2, 2, 1, 2)], ids=["one", "mesh"])
def test_the_grouped_product_of_a_gpu_gives_the_gradients_of_tiles(sizes, monkeypatch):
    """jax's own stands in for tokamax's, with rubbish in the rows of no group, forward and backward."""

    @jax.custom_vjp
    def spoilt(x, sizes):
        return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], x, jnp.nan)

    spoilt.defvjp(lambda x, sizes: (spoilt(x, sizes), sizes), lambda sizes, g: (spoilt(g, sizes), None))

    def product(x, w, sizes):
        return spoilt(jax.lax.ragged_dot(spoilt(x, sizes), w, sizes), sizes)

    batch, config = tiny.batch(8, 24, 6, EIGHT.vocab_size), dataclasses.replace(ADAPTED, targets="gate_proj,down_proj")
    base, adapters = tiny.init(EIGHT), random_adapters(EIGHT, config)

    def of(adapters, base, batch):
        return loss(lora.adapt(base, adapters, config), EIGHT, batch)

    expected = jax.jit(jax.value_and_grad(of, (0, 1)))(adapters, base, batch)
    monkeypatch.setattr(experts, "_is_grouped", lambda h: True)
    monkeypatch.setattr(gpu_kernels, "grouped_product", product)
    if sizes is None:
        got = jax.jit(jax.value_and_grad(lambda *a: of(*a), (0, 1)))(adapters, base, batch)
    else:
        mesh = sharding.make_mesh(sizes)
        with jax.set_mesh(mesh):
            base = jax.device_put(base, params.shardings(EIGHT, mesh, sharding.TRAIN))
            specs = lora.adapter_specs(EIGHT, config)
            adapters = jax.device_put(adapters, params.shardings_of(specs, mesh, sharding.TRAIN))
            placed = {name: jax.device_put(x, sharding.rows(mesh, 2)) for name, x in batch.items()}
            got = jax.jit(jax.value_and_grad(lambda *a: of(*a), (0, 1)))(adapters, base, placed)
    assert abs(float(got[0] - expected[0])) < 1e-5
    ours, theirs = (jax.tree.map(np.asarray, tree[1]) for tree in (got, expected))
    frozen = {name: getattr(ours[1].layers, name) for name in ("w_gate", "w_down")}  # tiles give these none
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(frozen))
    assert tiny.worst_relative(theirs[0], ours[0]) < 1e-4
    for name in ("w_up", "router", "mlp_norm"):
        assert tiny.worst_relative(getattr(theirs[1].layers, name), getattr(ours[1].layers, name)) < 1e-4


@pytest.mark.parametrize(
    "case", ["moe", *(pytest.param(case, marks=pytest.mark.slow) for case in ("glm-groups", "deepseek"))]
)
def test_gradients_are_torchs_and_folders_of_both_forms_load(case, tmp_path):
    torch = pytest.importorskip("torch")
    from tests.models import hf_cases

    def tensors(name):
        return safetensors.numpy.load_file(tmp_path / name / "model.safetensors")

    model = hf_cases.build(case)
    model.save_pretrained(tmp_path / "each")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in tensors("stacked")
    spec = hf.read_spec(tmp_path / "each", tiny.model_config())
    weights = hf.load(tmp_path / "each", spec, None)
    jax.tree.map(np.testing.assert_array_equal, weights, hf.load(tmp_path / "stacked", spec, None))

    batch = tiny.batch(2, 20, 8, spec.vocab_size)
    batch["segments"][:], batch["positions"][:] = 1, np.arange(20)
    gradients = jax.jit(jax.grad(loss), static_argnums=1)(weights, spec, batch)
    tokens, heads, targets = (torch.as_tensor(batch[k]).long() for k in ("tokens", "head_positions", "targets"))
    scores = torch.log_softmax(model(input_ids=tokens).logits, -1)[torch.arange(2)[:, None], heads]
    (-scores.gather(-1, targets[..., None]).mean()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        for _, buffer in model.named_buffers():
            buffer.zero_()  # a bias that chooses has no gradient
    model.save_pretrained(tmp_path / "theirs")
    hf.save(tmp_path / "ours", gradients, spec, "float32")
    theirs, ours = tensors("theirs"), tensors("ours")
    assert theirs.keys() == ours.keys()
    biases = {name for name in theirs if name.endswith("e_score_correction_bias")}
    assert all(not ours.pop(name).any() and not theirs.pop(name).any() for name in biases)
    assert tiny.worst_relative(theirs, ours) < 1e-3


def test_layers_before_the_pattern_repeats_are_stacks_of_their_own():
    dense, (attention, _) = tiny.spec().pattern[0], tiny.spec().pattern[0]
    spec = dataclasses.replace(SPEC, num_layers=6, pattern=(dense, dense, *[(attention, BLOCK)] * 4))
    assert spec.stacks == (range(1), range(1, 2), range(2, 6))
    turns = dataclasses.replace(spec, num_layers=7, pattern=(dense, *[dense, dense, (attention, BLOCK)] * 2))
    assert turns.stacks == (range(1), range(1, 7, 3), range(2, 7, 3), range(3, 7, 3))
    weights, batch = tiny.init(turns), tiny.batch(2, 12, 4, turns.vocab_size)
    single = weights.replace(layers=params.unstack(weights.layers))
    assert [layer.w_gate.ndim for layer in single.layers] == [2, 2, 2, 3, 2, 2, 3]
    scanned = dataclasses.replace(turns, remat="layer")
    values = [float(jax.jit(loss, static_argnums=1)(*args, batch)) for args in ((weights, scanned), (single, turns))]
    assert abs(values[0] - values[1]) < 1e-6


MIXED = tiny.spec(family="qwen3_moe", pattern=(SPEC.pattern[0], tiny.spec().pattern[0]))  # a dense layer in between


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (SPEC, ADAPTED),
        (MIXED, dataclasses.replace(ADAPTED, targets="q_proj,up_proj,down_proj")),
        pytest.param(LATENT_SPEC, ADAPTED, marks=pytest.mark.slow),
    ],
    ids=["all", "kinds", "latent"],
)
def test_adapters_beside_experts_and_multiplied_out_are_one_function(spec, config):
    """The gradients through W + s A B are the witness of those that never make it."""
    base, adapters = tiny.init(spec), random_adapters(spec, config)
    batch = tiny.batch(2, 24, 6, spec.vocab_size)

    @jax.jit
    def both(adapters):
        beside = lambda a: loss(lora.adapt(base, a, config), spec, batch)  # noqa: E731
        merged = lambda a: loss(lora.merge(base, a, config, "float32"), spec, batch)  # noqa: E731
        return [jax.value_and_grad(form)(adapters) for form in (beside, merged)]

    (value, gradients), (expected, others) = both(adapters)
    without = jax.jit(loss, static_argnums=1)(base, spec, batch)
    assert abs(float(value - expected)) < 1e-5 and abs(float(value - without)) > 1e-3
    assert tiny.worst_relative(others, gradients) < 1e-4
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradients))


def test_a_router_has_no_adapter():
    assert "gate" not in lora.targets(ADAPTED, SPEC)
    with pytest.raises(ConfigError, match=r"targets: no projection 'gate'\. Did you mean 'gate_proj'"):
        lora.adapter_specs(SPEC, dataclasses.replace(ADAPTED, targets="q_proj,gate"))


def test_a_mesh_must_divide_the_experts():
    message = r"config\.mesh\.expert=8 does not divide the 5 experts of 'layers\.w_gate'"
    with pytest.raises(ConfigError, match=message):
        params.shardings(SPEC, sharding.make_mesh(MeshConfig(1, 1, 1, 1, 8)), sharding.COMPUTE)


def test_int8_rounds_each_experts_channels_and_not_the_router():
    with jax.set_mesh(mesh_of()):
        placed = LanguageModel(SPEC, "float32", int8=True).lay_out(tiny.init(SPEC)).layers
    assert isinstance(placed.router, jax.Array) and isinstance(placed.w_down, Int8Array)
    assert placed.w_down.scale.shape == (SPEC.num_layers, BLOCK.routing.count, 1, SPEC.embed_dim)


def test_the_plan_counts_the_experts_that_a_token_goes_to():
    attention = costs.layer_matmul_params(tiny.spec()) - 2 * 3 * 16 * 32
    assert costs.layer_matmul_params(SPEC) == attention + 2 * (16 * 5 + 2 * 3 * 16 * 12)
    held = sum(array.size for array in jax.tree.leaves(params.param_specs(SPEC).layers) if array.summed)
    assert held == attention + 2 * (16 * 5 + 5 * 3 * 16 * 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_experts_per_tok=9), "num_experts_per_tok=9 of 8 experts"),
        (dict(num_local_experts=4), "num_experts and num_local_experts differ"),
        (dict(mlp_only_layers=3), "mlp_only_layers must be a list of the 2 layers' numbers, not 3"),
        (dict(mlp_only_layers=[2]), r"mlp_only_layers must be a list of the 2 layers' numbers, not \[2\]"),
        (dict(n_group=2), "nothing is known here of n_group=2"),
    ],
)
def test_what_a_config_must_not_say(changes, message, tmp_path):
    from jaxagent.models import hf_config

    spec = tiny.spec(family="qwen3_moe")
    with pytest.raises(ConfigError, match=message):
        hf_config.spec_from_hf(hf_config.spec_to_hf(spec, "float32") | changes, tiny.model_config(), "config.json")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("glm4_moe", dict(n_group=3), "num_experts_per_tok=2 of topk_group=1 of n_group=3 groups of two or more of n_"),
        ("glm4_moe", dict(n_group=4, num_experts_per_tok=3), "num_experts_per_tok=3 of topk_group=1 of n_group=4"),
        ("glm4_moe", dict(n_group=8), "n_group=8 groups of two or more of n_routed_experts=8 is not possible"),
        ("glm4_moe", dict(first_k_dense_replace=-1), "first_k_dense_replace must be a whole number from 0 on, not -1"),
        ("glm4_moe_lite", dict(mlp_layer_types=["dense"]), "mlp_layer_types must say 'dense' or 'sparse' for each of"),
        ("deepseek_v3", dict(num_key_value_heads=2), "num_key_value_heads must be the 4 num_attention_heads in latent"),
        ("deepseek_v3", dict(qk_rope_head_dim=7), "qk_rope_head_dim=7 must be even, and head_dim the same. It is 8"),
        ("deepseek_v3", dict(head_dim=16), "qk_rope_head_dim=8 must be even, and head_dim the same. It is 16"),
        ("deepseek_v3", dict(attention_bias=True), "attention_bias=True is not supported"),
    ],
)
def test_what_a_config_with_groups_or_latent_attention_must_not_say(family, changes, message):
    from jaxagent.models import hf_config

    hf = hf_config.spec_to_hf(tiny.spec(family=family, num_layers=2), "float32") | dict(head_dim=8)
    assert hf_config.spec_from_hf(hf, tiny.model_config(), "config.json").family == family
    with pytest.raises(ConfigError, match=message):
        hf_config.spec_from_hf(hf | changes, tiny.model_config(), "config.json")


def test_a_layer_that_only_speculative_decoding_runs_is_not_loaded(tmp_path):
    spec = tiny.spec(family="glm4_moe")
    hf.save(tmp_path, tiny.init(spec), spec, "float32")
    fewer = dataclasses.replace(spec, num_layers=1)  # what a config.json says that has a wrong number of layers
    with pytest.raises(ConfigError, match=r"layers\.1\..* is not part of a glm4_moe of 1 layers"):
        hf.load(tmp_path, fewer, None)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    beyond, of_it = (f"model.layers.{spec.num_layers}.{name}.weight" for name in ("shared_head.norm", "eh_proj"))
    hf.save_file(tensors | {beyond: np.ones(3, np.float32), of_it: np.ones(3, np.float32)}, path)
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path, spec, None).layers, tiny.init(spec).layers)
    hf.save_file(tensors | {beyond.replace("layers.2", "layers.3"): np.ones(3, np.float32)}, path)
    with pytest.raises(
        ConfigError, match=r"layers\.3\.shared_head\.norm\.weight' is not part of a glm4_moe of 2 layers"
    ):
        hf.load(tmp_path, spec, None)


def test_halves_of_different_sizes_are_no_gate_and_up_projection(tmp_path):
    """A folder with one row more than two equal halves have is refused, and that row not left out."""
    spec = tiny.spec(family="qwen3_moe", num_layers=1)
    hf.save(tmp_path, tiny.init(spec), spec, "float32")
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    block, width = "model.layers.0.mlp.experts", spec.pattern[0][1].width(spec)
    halves = [[tensors.pop(f"{block}.{x}.{part}_proj.weight") for part in ("gate", "up")] for x in range(8)]
    packed = np.stack([np.concatenate(both) for both in halves])
    hf.save_file(tensors | {f"{block}.gate_up_proj": packed}, path)
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path, spec, None).layers, tiny.init(spec).layers)
    longer = np.pad(packed, ((0, 0), (0, 1), (0, 0)))
    assert longer.shape[1] == 2 * width + 1
    hf.save_file(tensors | {f"{block}.gate_up_proj": longer}, path)
    with pytest.raises(ConfigError, match=r"experts\.0\.gate_proj\.weight' is missing"):
        hf.load(tmp_path, spec, None)
