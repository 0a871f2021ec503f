"""`model.settings`: what a family's config.json says beside the sizes, for a model without a folder."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxagent.config import ConfigError, parse
from jaxagent.configs import coding_agent, polar_swe
from jaxagent.models import hf_config, params
from jaxagent.models.blocks.experts import Experts
from jaxagent.models.blocks.routing import Routing
from jaxagent.models.spec import ModelSpec
from tests.models import tiny

SIZES = dict(num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32, embed_init_std=0.5)


def spec_of(family: str = "qwen3_moe", **settings) -> ModelSpec:
    return ModelSpec.from_config(config(family=family, settings=json.dumps(settings)), 61)


def config(**changes):
    return dataclasses.replace(tiny.model_config(), **SIZES | {"rope_theta": 10_000.0} | changes)


def test_settings_are_read_as_a_folder_s():
    spec = spec_of(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=False)
    assert spec.pattern[0][1] == Experts(Routing(6, 3, renormalise=False), 20)
    folder = hf_config.spec_to_hf(spec, "float32")
    assert (
        dataclasses.replace(hf_config.spec_from_hf(folder, tiny.model_config(), "config.json"), max_position=0) == spec
    )
    plain = spec_of("qwen3")
    scaled = spec_of("qwen3", rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32})
    assert scaled.rope_scaling.factor == 4 and dataclasses.replace(scaled, rope_scaling=None, max_position=0) == plain


@pytest.mark.parametrize(
    ("recipe", "preset", "parameters"),
    [
        (coding_agent, "qwen3-30b-a3b", 30_532_122_624),
        (coding_agent, "qwen3.6-35b-a3b", 34_660_610_688),
        (polar_swe, "qwen3.5-4b", 4_205_751_296),
    ],
)
def test_published_shapes_have_the_published_sizes(recipe, preset, parameters):
    """As transformers counts the classes' arrays."""
    cfg = parse(recipe.get_config(preset))
    spec = ModelSpec.from_config(cfg.model, cfg.tokenizer.vocab_size)
    assert params.count(spec) == parameters


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("[1]", "config.model.settings must be a JSON object such as"),
        ("num_experts=8", "config.model.settings must be a JSON object such as"),
        ("[" * 100_000, "config.model.settings must be a JSON object such as"),
        ('{"sliding_window": 8}', "config.model.settings: sliding_window=8 is not supported."),
        ('{"no_such": 8}', "config.model.settings: nothing is known here of no_such=8"),
        ('{"num_hidden_layers": 7}', "config.model is another model than config.model.settings: num_layers is 2"),
    ],
    ids=lambda text: text[:20],
)
def test_other_settings_are_refused(text, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        ModelSpec.from_config(config(family="llama", settings=text), 61)


def test_beside_a_folder_they_are_a_demand():
    folder = hf_config.spec_to_hf(spec_of(num_experts=6), "float32")
    asked = dataclasses.replace(tiny.model_config(), family="", settings='{"num_experts": 6}')
    assert hf_config.spec_from_hf(folder, asked, "config.json").pattern[0][1].routing.count == 6
    with pytest.raises(ConfigError, match=r"settings: num_experts is 6 \(8 there\)"):
        hf_config.spec_from_hf(folder | {"num_experts": 8}, asked, "config.json")


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("deepseek_v3", "rope_parameters", "yarn"),
        ("qwen3_moe", "rope_type", {"rope_parameters": {"rope_type": ["yarn"], "factor": 2.0}}),
        ("glm4_moe_lite", "mlp_layer_types", [["dense"], ["sparse"]]),
        ("qwen3_next", "linear_conv_kernel_dim", 1),
    ],
)
def test_values_of_other_kinds_are_refused_by_name(family, key, value):
    changes = value if isinstance(value, dict) else {key: value}
    heads = {"num_kv_heads": 4} if family in ("deepseek_v3", "glm4_moe_lite") else {}
    layers = {"num_layers": 4} if family == "qwen3_next" else {}
    with pytest.raises(ConfigError, match=key):
        ModelSpec.from_config(config(family=family, settings=json.dumps(changes), **heads, **layers), 61)
