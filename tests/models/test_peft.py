"""Adapters in PEFT's files mean to torch what they mean here: the oracle adds B A to transformers' own weights."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import safetensors.torch  # noqa: E402

from jaxagent.config import ConfigError, LoraConfig  # noqa: E402
from jaxagent.models import hf, lora, params, peft  # noqa: E402
from jaxagent.models.blocks.experts import Experts  # noqa: E402
from jaxagent.models.blocks.routing import Routing  # noqa: E402
from tests.models import hf_cases, tiny  # noqa: E402
from tests.models.forward import all_logits  # noqa: E402
from tests.models.test_lora import random_adapters  # noqa: E402

PREFIX = "base_model.model."


def with_adapter(model, folder):
    """What PEFT does when it merges: weight += lora_alpha / r * B A, by the names of the file."""
    said = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    scale = said["lora_alpha"] / (said["r"] ** 0.5 if said["use_rslora"] else said["r"])
    adapted = set()
    for name, module in model.named_modules():
        if name.split(".")[-1] in said["target_modules"]:
            a, b = (tensors.pop(f"{PREFIX}{name}.lora_{x}.weight") for x in "AB")
            with torch.no_grad():
                module.weight += scale * (b @ a)
            adapted.add(name)
    assert not tensors and adapted
    return model


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen2-untied", LoraConfig(3, 6.0, False, "all-linear")),
        ("qwen3-tied", LoraConfig(4, 2.5, True, "v_proj,o_proj,down_proj")),
        ("llama-untied", LoraConfig(1, 1.0, False, "all-linear")),
    ],
)
def test_torch_computes_the_same_from_the_files(name, config, tmp_path):
    model = hf_cases.build(name)
    model.save_pretrained(tmp_path / "base")
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 30)).astype(np.int32)
    plain = hf_cases.logits(model, tokens).numpy()
    spec = hf.read_spec(tmp_path / "base", tiny.model_config())
    base, adapters = hf.load(tmp_path / "base", spec, None), random_adapters(spec, config)
    peft.save_adapters(tmp_path / "adapter", adapters, spec, config, str(tmp_path / "base"))

    expected = hf_cases.logits(with_adapter(model, tmp_path / "adapter"), tokens).numpy()
    assert np.abs(expected - plain).max() > 0.1
    ours = all_logits(lora.adapt(base, adapters, config), spec, tokens)
    np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=0)
    hf.save(tmp_path / "merged", lora.merge(base, adapters, config, "float32"), spec, "float32", tmp_path / "base")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    np.testing.assert_allclose(hf_cases.logits(merged, tokens).numpy(), expected, atol=2e-4, rtol=0)

    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    paths = [f"model.layers.{i}.x.{name}" for i in range(spec.num_layers) for name in settings["target_modules"]]
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps(settings | {"target_modules": paths, "use_dora": False, "rank_pattern": {}})  # as PEFT writes them
    )
    again, read = peft.load_adapters(tmp_path / "adapter", spec)
    assert lora.targets(read, spec) == lora.targets(config, spec) and lora.scale(read) == lora.scale(config)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)


def adapter_folder(tmp_path, **changes):
    """A folder with an adapter, and settings changed."""
    spec, config = tiny.spec(), LoraConfig(2, 4.0, False, "q_proj")
    adapters = params.init_of(lora.adapter_specs(spec, config), jax.random.key(0))
    peft.save_adapters(tmp_path, adapters, spec, config, "somewhere")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(peft_type="IA3"), "adapter_config.json: peft_type 'IA3' is not supported"),
        (dict(use_dora=True), "adapter_config.json: use_dora=True is not supported"),
        (dict(init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
        (dict(init_lora_weights="olora"), "init_lora_weights='olora' is not supported"),
        (dict(trainable_token_indices=[3]), "trainable_token_indices"),
        (dict(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
        (dict(new_method=True), "new_method=True is not supported"),
        (dict(target_modules=["q_prjo"]), "no projection 'q_prjo'. Did you mean 'q_proj'"),
        (dict(target_modules=["q_proj", "v_proj"]), r"layers.0.self_attn.v_proj.lora_A.weight' is missing"),
        (dict(r=4), r"q_proj.lora_A.weight' has shape \(2, 16\), not \(4, 16\)"),
        (dict(target_modules=["k_proj"]), "k_proj.lora_A.weight' is missing"),
        (dict(rank_pattern=[2]), r"rank_pattern must be an object, not \[2\]"),
        (dict(rank_pattern={"(": 2}), r"rank_pattern: '\(' is no regular expression"),
        (dict(rank_pattern={"q_proj": 0}), "rank_pattern: q_proj must be a whole number from 1 on, not 0"),
        (dict(alpha_pattern={"q_proj": "x"}), "alpha_pattern: q_proj must be a positive number, not 'x'"),
        (dict(r=4, rank_pattern={"k_proj": 3}), r"q_proj.lora_A.weight' has shape \(2, 16\), not \(4, 16\)"),
    ],
)
def test_what_cannot_be_read_is_named(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        peft.load_adapters(tmp_path, adapter_folder(tmp_path, **changes))


def test_joined_adapters_of_a_mixture_with_other_experts(tmp_path):
    spec, config = tiny.spec(family="qwen3_moe"), LoraConfig(2, 4.0, False, "q_proj,gate_proj,up_proj")
    adapters = params.init_of(lora.adapter_specs(spec, config), jax.random.key(0))
    peft.save_adapters(tmp_path, adapters, spec, config, "somewhere")
    attention, experts = spec.pattern[0]
    fewer = dataclasses.replace(experts, routing=dataclasses.replace(experts.routing, count=4))
    with pytest.raises(ConfigError, match=r"experts.lora_A.weight' .* not rank 4 for each of the 4 experts"):
        peft.load_adapters(tmp_path, tiny.spec(family="qwen3_moe", pattern=((attention, fewer),)))
    with pytest.raises(ConfigError, match=r"not rank 4 for each of the 0 experts"):
        peft.load_adapters(tmp_path, tiny.spec())


def test_a_tensor_of_nobody_and_a_cut_off_folder(tmp_path):
    spec = adapter_folder(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    broken = {name: tensor * float("nan") for name, tensor in tensors.items()}
    safetensors.torch.save_file(broken, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="holds numbers that are not finite"):
        peft.load_adapters(tmp_path, spec)
    extra = tensors | {f"{PREFIX}model.layers.7.self_attn.q_proj.lora_A.weight": torch.zeros(2, 16)}
    safetensors.torch.save_file(extra, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.7\..* belongs to no adapter"):
        peft.load_adapters(tmp_path, spec)
    wide = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}  # as trained in half precision
    safetensors.torch.save_file(wide, tmp_path / "adapter_model.safetensors")
    adapters, _ = peft.load_adapters(tmp_path, spec)
    assert adapters["wq"].a.dtype == "float32"
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"adapter_config\.json does not exist"):
        peft.load_adapters(tmp_path, spec)


def mixture(tmp_path):
    """A mixture of transformers', its spec and weights here, and tokens."""
    model = hf_cases.build("moe")
    model.save_pretrained(tmp_path / "base")
    spec = hf.read_spec(tmp_path / "base", tiny.model_config())
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 30)).astype(np.int32)
    return model, spec, hf.load(tmp_path / "base", spec, None), tokens


EXPERTS = [
    LoraConfig(3, 6.0, False, "all-linear"),
    LoraConfig(4, 6.0, True, "q_proj,gate_proj,up_proj"),  # joined by us, since PEFT would not
    LoraConfig(4, 6.0, False, "q_proj,up_proj,down_proj"),
    LoraConfig(2, 3.0, True, "down_proj"),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", EXPERTS, ids=lambda config: config.targets)
def test_the_package_computes_the_same_with_adapters_of_experts(config, tmp_path):
    """What we write, read by PEFT; and what PEFT makes of it, which is the joined form, read here."""
    package = pytest.importorskip("peft")
    model, spec, base, tokens = mixture(tmp_path)
    adapters = random_adapters(spec, config)
    peft.save_adapters(tmp_path / "ours", adapters, spec, config, str(tmp_path / "base"))
    adapted = package.PeftModel.from_pretrained(model, tmp_path / "ours").eval()
    expected = hf_cases.logits(adapted, tokens).numpy()
    np.testing.assert_allclose(all_logits(lora.adapt(base, adapters, config), spec, tokens), expected, atol=1e-4)
    adapted.save_pretrained(tmp_path / "theirs")
    again, read = peft.load_adapters(tmp_path / "theirs", spec)
    np.testing.assert_allclose(all_logits(lora.adapt(base, again, read), spec, tokens), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "rank"),
    [
        (dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]), 2),
        (
            dict(target_modules=["k_proj", "gate_proj", "up_proj", "down_proj"]),
            4,
        ),  # PEFT doubles the rank of what it joins
        (dict(target_parameters=["mlp.experts.gate_up_proj"], use_rslora=True), 2),
    ],
)
def test_what_the_package_has_trained_is_read(targets, rank, tmp_path):
    package = pytest.importorskip("peft")
    model, spec, base, tokens = mixture(tmp_path)
    adapted = package.get_peft_model(model, package.LoraConfig(r=2, lora_alpha=6, **targets)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(tmp_path / "theirs")
    adapters, config = peft.load_adapters(tmp_path / "theirs", spec)
    assert config.rank == rank
    ours = all_logits(lora.adapt(base, adapters, config), spec, tokens)
    np.testing.assert_allclose(ours, hf_cases.logits(adapted, tokens).numpy(), atol=1e-4)
    wider = dataclasses.replace(config, rank=9)
    with pytest.raises(ConfigError, match=rf"must be those of .*theirs: --config.model.lora.rank={rank} --config"):
        peft.load_adapters(tmp_path / "theirs", spec, config=wider)
    other = dataclasses.replace(config, alpha=1.5 * config.alpha)  # of a run that goes on: the function stays
    adapters, _ = peft.load_adapters(tmp_path / "theirs", spec, config=other)
    np.testing.assert_allclose(all_logits(lora.adapt(base, adapters, other), spec, tokens), ours, atol=1e-4)


@pytest.mark.parametrize("config", [*EXPERTS[:2], EXPERTS[3]], ids=lambda config: config.targets)
def test_adapters_of_experts_come_back(config, tmp_path):
    block = Experts(Routing(3, 2), mlp_dim=6)
    spec = tiny.spec(family="qwen3_moe", pattern=((tiny.spec().pattern[0][0], block), tiny.spec().pattern[0]))
    spec = spec if config.targets == "all-linear" else dataclasses.replace(spec, pattern=spec.pattern[:1])
    adapters = random_adapters(spec, config)
    peft.save_adapters(tmp_path, adapters, spec, config, "somewhere")
    again, read = peft.load_adapters(tmp_path, spec, config=config)
    assert read == config
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), again, adapters)
    tensors = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    joined = any(name.endswith(".experts.lora_A.weight") for name in tensors)
    assert joined == (config.targets == "q_proj,gate_proj,up_proj")
    if "gate_proj" in config.targets:
        name = f"{PREFIX}model.layers.1.mlp.experts.lora_A.weight"
        safetensors.torch.save_file(tensors | {name: torch.zeros(7, 16)}, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=r"layers.1.mlp.experts.lora_A.weight' has shape \(7, 16\), not rank 8"):
            peft.load_adapters(tmp_path, spec)
