"""No folder loads silently as another function: every key that transformers reads is read here too, or refused.

The keys are transformers' own: those of each family's config class, and those of its RoPE sections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import jax  # noqa: E402 (after importorskip)
from transformers.modeling_rope_utils import RopeParameters  # noqa: E402

from jaxagent.config import ConfigError  # noqa: E402
from jaxagent.models import hf, hf_config  # noqa: E402
from jaxagent.models.families import FAMILIES  # noqa: E402
from tests.models import hf_cases, tiny  # noqa: E402
from tests.models.forward import all_logits  # noqa: E402

CASES = {"qwen2": "qwen2-untied", "qwen3": "qwen3-untied", "llama": "llama-untied", "mistral": "mistral",
         "smollm3": "smollm3", "olmo2": "olmo2", "qwen3_moe": "moe", "glm4_moe": "glm",
         "deepseek_v3": "deepseek", "glm4_moe_lite": "glm-lite", "olmoe": "olmoe",
         "qwen3_next": "qwen3_next", "qwen3_5_text": "qwen3_5-tied", "qwen3_5_moe_text": "qwen3_5_moe"}  # fmt: skip
LATENT = ("deepseek_v3", "glm4_moe_lite")  # all heads have keys of their own
EVERYWHERE = {key for keys in hf_config.HARMLESS.values() for key in keys.split()}
OTHER = {  # of what is no number, flag or list that holds any
    "mlp_only_layers": [0],
    "mlp_layer_types": ["sparse"] * 8,
    "hidden_act": "gelu",
    "dtype": "float64",
    "problem_type": "regression",
    "id2label": {"0": "other"},
    "label2id": {"other": 0},
}
SECTION = dict(  # another value of each key of a RoPE section
    rope_theta=77.0, rope_type="longrope", partial_rotary_factor=0.5, factor=3.0, original_max_position_embeddings=20,
    attention_factor=1.3, beta_fast=16.0, beta_slow=2.0, short_factor=[2.0] * 4, long_factor=[2.0] * 4,
    low_freq_factor=1.5, high_freq_factor=5.0, mscale=0.5, mscale_all_dim=0.7, truncate=False, mrope_section=[1, 1, 2],
)  # fmt: skip


def keys_of(family: str) -> dict[str, object]:
    """Every field of the family's config class in transformers, with its default."""
    config = hf_cases.CONFIGS[family]()
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {key: value for key, value in (config.to_dict() | fields).items() if not key.startswith("_")}


def another(key: str, value: object) -> object:
    """A value of the same kind that says something else."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + (1 if isinstance(value, int) else 0.5)
    if isinstance(value, list) and value:
        return [1 - one if one in (0, 1) else "sliding_attention" for one in value]
    return OTHER.get(key, 3)


class Folder:
    """A tiny model of transformers' in a folder whose config.json can be edited: its logits here and there."""

    def __init__(self, case: str, path):
        self.path, model = path, hf_cases.build(case)
        model.save_pretrained(path)
        self.config = json.loads((path / "config.json").read_text())
        self.tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (1, 40)).astype(np.int32)
        self.known: dict = {}  # spec -> logits

    def ours(self, config: dict) -> np.ndarray | None:
        """Our logits; None where the folder is refused."""
        (self.path / "config.json").write_text(json.dumps(config))
        with contextlib.suppress(ConfigError):
            spec = hf.read_spec(self.path, tiny.model_config())
            if spec not in self.known:
                with jax.disable_jit():  # operations compile once for all specs
                    self.known[spec] = all_logits(hf.load(self.path, spec, None), spec, self.tokens)
            return self.known[spec]
        return None

    def assert_same_or_refused(self, config: dict) -> None:
        if (ours := self.ours(config)) is not None:
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(self.path, attn_implementation="eager").eval()
            except KeyError:  # YaRN without its factor, which only older versions derive from two lengths
                return
            np.testing.assert_allclose(ours, hf_cases.logits(model.float(), self.tokens).numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_key_is_read_or_refused_or_listed(family):
    base = hf_cases.CONFIGS[family]().to_dict() | {"architectures": [FAMILIES[family].architecture]}
    base = {key: value for key, value in base.items() if not key.startswith("_")} | dict(
        sliding_window=None, num_attention_heads=64, hidden_size=16640, num_hidden_layers=8,
        num_key_value_heads=64 if family in LATENT else 1,
    )  # fmt: skip
    base |= {"layer_types": None, "no_rope_layers": [1, 0] * 5} if family == "smollm3" else {"layer_types": None}
    spec = hf_config.spec_from_hf(base, tiny.model_config(), "config.json")
    listed = EVERYWHERE | FAMILIES[family].harmless.keys()
    for key, value in keys_of(family).items():
        if key in ("layer_types", "rope_parameters"):
            continue
        changed = base | {key: another(key, base.get(key, value))}
        try:
            same = hf_config.spec_from_hf(changed, tiny.model_config(), "config.json") == spec
        except ConfigError as error:
            assert key in str(error), error
            assert key not in listed
        else:
            # An interval is read where no list stands beside it.
            assert same == (key in listed or key == "no_rope_layer_interval"), key


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_changed_and_missing_keys_are_the_model_that_transformers_reads(family, tmp_path):
    folder = Folder(CASES[family], tmp_path)
    assert folder.ours(folder.config) is not None
    for key, value in (keys_of(family) | folder.config).items():
        if key in ("rope_parameters", "model_type", "transformers_version", "return_dict"):  # a tuple has no logits
            continue
        folder.assert_same_or_refused(folder.config | {key: another(key, folder.config.get(key, value))})
        if key != "pad_token_id":  # without it SmolLM3's class takes one that this vocabulary does not have
            folder.assert_same_or_refused({name: one for name, one in folder.config.items() if name != key})
    folder.assert_same_or_refused(folder.config | {"layer_types": ["sliding_attention"] * 4, "sliding_window": 4})


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama-untied", "llama-llama3", "llama-linear", "llama-dynamic", "mistral-yarn"])
def test_every_key_of_a_rope_section(case, tmp_path):
    assert set(SECTION) == set(RopeParameters.__annotations__)
    folder = Folder(case, tmp_path)
    section = folder.config["rope_parameters"]
    for key, value in SECTION.items():
        folder.assert_same_or_refused(folder.config | {"rope_parameters": section | {key: value}})
        folder.assert_same_or_refused(
            folder.config | {"rope_parameters": {name: one for name, one in section.items() if name != key}}
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(family):
    """Of a folder that leaves everything out but its sizes each key can be left out, too, or be there as by default."""
    sizes = dict(vocab_size=8, hidden_size=1024, intermediate_size=8, num_hidden_layers=4, num_attention_heads=64)
    sizes |= dict(model_type=family, num_key_value_heads=1, head_dim=16, sliding_window=None)
    sizes |= dict(num_key_value_heads=64, head_dim=64) if family in LATENT else {}

    def spec_of(hf):
        try:
            spec = hf_config.spec_from_hf(hf, tiny.model_config(), "config.json")
        except ConfigError as error:
            return str(error)
        return dataclasses.replace(spec, max_position=0)  # a bound that is not known is no other function

    for field in dataclasses.fields(hf_cases.CONFIGS[family]):
        if field.name.startswith("_") or field.name == "model_type" or field.default is dataclasses.MISSING:
            continue
        absent = spec_of({key: value for key, value in sizes.items() if key != field.name})
        there = spec_of(sizes | {field.name: field.default})
        if isinstance(absent, str):
            assert field.name in absent, (field.name, absent)
        else:
            assert absent == there, field.name
    theta = hf_config.spec_from_hf(sizes, tiny.model_config(), "config.json").rope_theta
    assert theta == hf_cases.CONFIGS[family].default_theta


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("gpt_oss", "attention sinks"),
        ("gemma3_text", "norms on both sides of a block"),
        ("deepseek_v2", "DeepSeek-V2's routing"),
        ("nemotron_h", "state space layers"),
        ("olmo3", "sliding windows"),
    ],
)
def test_what_a_family_would_need_is_named_before_weights_are_read(model_type, what, tmp_path):
    transformers.CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(
        ConfigError, match=rf"model_type '{model_type}' is not supported: there is no code for .*{what}"
    ):
        hf.read_spec(tmp_path, tiny.model_config())


@pytest.mark.slow
def test_no_other_config_of_transformers_is_taken_for_a_family_s(tmp_path):
    """Every class of its registry, with its defaults: refused in one sentence, or one of ours."""
    refused = 0
    for model_type in transformers.CONFIG_MAPPING:
        try:
            config = transformers.CONFIG_MAPPING[model_type]().to_dict()
        except Exception:  # classes that need arguments or other packages
            continue
        for name, section in [("", config), *((k, v) for k, v in config.items() if isinstance(v, dict) and k)]:
            if section.get("model_type") in {*FAMILIES, "qwen3_5", "qwen3_5_moe"} or "model_type" not in section:
                continue
            with pytest.raises(ConfigError) as error:
                hf_config.spec_from_hf(section, tiny.model_config(), name or "config.json")
            assert f"model_type {section['model_type']!r} is not supported" in str(error.value)
            refused += 1
    assert refused > 300
