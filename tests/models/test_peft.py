"""Adapters in PEFT's files mean to torch what they mean here: the oracle adds B A to transformers' own weights."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import safetensors.torch  # noqa: E402

from jaxagent.config import LoraConfig  # noqa: E402
from jaxagent.models import hf, lora, peft  # noqa: E402
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
    peft.save(tmp_path / "adapter", adapters, spec, config, str(tmp_path / "base"))

    expected = hf_cases.logits(with_adapter(model, tmp_path / "adapter"), tokens).numpy()
    assert np.abs(expected - plain).max() > 0.1
    ours = all_logits(lora.adapt(base, adapters, config), spec, tokens)
    np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=0)
    hf.save(tmp_path / "merged", lora.merge(base, adapters, config, "float32"), spec, "float32", tmp_path / "base")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    np.testing.assert_allclose(hf_cases.logits(merged, tokens).numpy(), expected, atol=2e-4, rtol=0)
