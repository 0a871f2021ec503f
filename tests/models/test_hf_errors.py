"""A folder that is not what it says is one clear line that names the file, the tensor or the field."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxagent.config import ConfigError, MeshConfig
from jaxagent.models import hf, params, sharding
from tests.models import tiny

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(GOLDEN / "qwen2-untied", tmp_path / "model")
    return tmp_path / "model"


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder, change):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def read(folder, **model):
    spec = hf.read_spec(folder, tiny.model_config(**model))
    return hf.load(folder, spec, None)


def test_import_then_export_is_byte_identical(folder, tmp_path):
    """bfloat16 -> float32 masters -> bfloat16 loses nothing, and neither does padding the vocabulary."""
    spec = hf.read_spec(folder, tiny.model_config())
    assert spec.padded_vocab_size % 16 == 0 and spec.param_dtype == "float32"
    hf.save(tmp_path, read(folder), spec, "bfloat16", assets=folder)
    theirs, ours = (safetensors.numpy.load_file(path / "model.safetensors") for path in (folder, tmp_path))
    assert {k: (v.shape, v.dtype, v.tobytes()) for k, v in theirs.items()} == {
        k: (v.shape, v.dtype, v.tobytes()) for k, v in ours.items()
    }
    assert hf.read_spec(tmp_path, tiny.model_config()) == spec


def test_slices_read_for_eight_devices_are_the_whole_arrays(folder):
    spec = hf.read_spec(folder, tiny.model_config())
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, context=1))
    where = params.shardings(spec, mesh, sharding.TRAIN)
    split, complete = hf.load(folder, spec, where), read(folder)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), split, complete)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b, split, where)))
    assert split.layers.wq.addressable_shards[0].data.size * 4 == complete.layers.wq.size


def test_saved_files_can_be_read_by_others_as_far_as_the_umask_says(folder):
    before = os.umask(0o027)
    try:
        hf.save(folder, read(folder), hf.read_spec(folder, tiny.model_config()), "float32")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.safetensors")} == {0o640}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="mamba"), "model_type 'mamba' is not supported: there is no code for state space layers"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(use_sliding_window=True), "use_sliding_window"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
        (dict(layer_types=["full_attention"]), "only 'full_attention' for each of the 2 layers"),
        (dict(layer_types="full_attention"), "layer_types full_attention is not supported"),
        (dict(is_causal=False), "is_causal=False is not supported"),
        (dict(auto_map={"AutoModel": "x.Y"}), "auto_map"),
        (dict(logit_softcapping=30.0), "nothing is known here of logit_softcapping=30.0"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(hidden_size=None), "has no 'hidden_size'"),
        (dict(rope_parameters={"rope_type": "longrope", "factor": 2.0}), "rope_type 'longrope'"),
        (dict(rope_parameters={"rope_type": "linear"}), "has no 'factor'"),
        (dict(rope_parameters={"rope_type": "llama3", "factor": 2.0}), "low_freq_factor"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "'rope_parameters' and 'rope_scaling' say different"),
        (dict(rope_parameters={"full_attention": {"rope_type": "linear"}}), "layers of type 'full_attention'"),
        (dict(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
        (dict(partial_rotary_factor=0.25), "partial_rotary_factor=0.25"),
        (dict(tie_word_embeddings=True), "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
        (dict(num_attention_heads=3), "num_heads=3 is not a multiple"),
        (
            dict(num_hidden_layers=3, layer_types=None),
            "'model.layers.2.input_layernorm.weight' is missing from model.safetensors",
        ),
        (dict(num_hidden_layers=1, layer_types=None), "'model.layers.1.* is not part of a qwen2 of 1 layers"),
        (dict(intermediate_size=32), r"'model.layers.0.mlp.gate_proj.weight' has shape \(24, 16\).* says \(32, 16\)"),
        (dict(tie_word_embeddings=False, vocab_size=49), "'model.embed_tokens.weight' has shape"),
    ],
)
def test_config_json(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=message) as error:
        read(folder)
    assert "\n" not in str(error.value)


def test_keys_of_published_folders_that_change_nothing_are_taken(folder):
    """SmolLM2's own, Unsloth's, vLLM's, Llama 1's; and a key that is null is as good as none."""
    change_config(
        folder, is_llama_config=True, rope_interleaved=False, unsloth_fixed=True, kv_cache_dtype="auto",
        max_sequence_length=2048, base_model_tp_plan=None, **{"transformers.js_config": {"kv_cache_dtype": {}}},
    )  # fmt: skip
    read(folder)


WRONG = ("x", "32", "1e-5", [1], {}, 64.0, 0, -1, True, float("nan"), 10**400)
SIZES = "vocab_size num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size"


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_every_key_is_read_as_what_it_is(folder, value):
    path = folder / "config.json"
    whole = json.loads(path.read_text())

    def refused(key, **changes):
        path.write_text(json.dumps(whole | changes))
        with pytest.raises(ConfigError) as error:
            read(folder)
        assert key in str(error.value) and "\n" not in str(error.value)

    for key in (*SIZES.split(), "max_position_embeddings"):
        refused(key, **{key: value})
    if value is not True:
        refused("tie_word_embeddings", tie_word_embeddings=value)
    refused("model_type", model_type=value)
    if value != 64.0:
        for key in ("rms_norm_eps", "initializer_range", "rope_theta"):
            refused(key, **{"rope_parameters": None, key: value})
        refused("factor", rope_parameters={"rope_type": "linear", "factor": value})
    if not isinstance(value, dict):
        refused("rope_parameters", rope_parameters=value)


@pytest.mark.parametrize(
    "content", ["[]", "null", "5", '"x"', "[" * 100_000, "{", "\ufeff", b"\xff"], ids=lambda c: c[:5]
)
def test_a_file_that_holds_no_object(folder, content):
    for name in ("config.json", hf.INDEX):
        content = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(content)
        with pytest.raises(ConfigError, match=r"is not JSON|must hold a JSON object") as error:
            hf.read_spec(folder, tiny.model_config()) if name == "config.json" else hf._weight_files(folder)
        assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("weight_map", [None, {}, [], 5, {"a": 1}, {"a": "../model.safetensors"}], ids=repr)
def test_an_index_that_names_no_files(folder, weight_map):
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=f"{hf.INDEX}: weight_map must say"):
        read(folder)


def test_two_models_in_one_folder(folder):
    shards = {"model-1.safetensors": "lm_head.weight"}
    index = {"weight_map": {name: file for file, name in shards.items()}}
    (folder / hf.INDEX).write_text(json.dumps(index))
    read(folder)  # save_pretrained leaves the index of shards that it removed: the one file is the model
    shutil.copyfile(folder / "model.safetensors", folder / "model-1.safetensors")
    with pytest.raises(ConfigError, match="two models"):
        read(folder)
    (folder / hf.INDEX).unlink()
    with pytest.raises(ConfigError, match=r"is in model-1\.safetensors and in model\.safetensors"):
        read(folder)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.bool_, np.complex64])
def test_only_floats_are_weights(folder, dtype):
    change_tensors(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(dtype)}))
    with pytest.raises(
        ConfigError, match=r"tensor 'model.norm.weight' is stored as \w+; weights must be one of float32"
    ):
        read(folder)


def test_weights_of_eight_bits_are_refused_by_name(folder):
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    entry = header["model.norm.weight"]
    header["model.norm.weight"] = entry | {
        "dtype": "F8_E4M3",
        "shape": [entry["data_offsets"][1] - entry["data_offsets"][0]],
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(ConfigError, match=r"tensor 'model\.norm\.weight' is stored as F8_E4M3"):
        read(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (dict(num_layers=7, mlp_dim=24, head_dim=5), r"num_layers is 7 \(2 there\), head_dim is 5 \(8 there\). Say"),
        (dict(family="llama"), r"another model than .*config.json: family is 'llama' \('qwen2' there\)"),
    ],
)
def test_config_file_contradicts_folder(folder, model, message):
    with pytest.raises(ConfigError, match=message):
        read(folder, **model)


def test_missing_tensor(folder):
    change_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"'lm_head.weight' is missing.*tie_word_embeddings = true"):
        read(folder)


def test_a_tied_head_may_be_stored_too(folder):
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    change_config(folder, tie_word_embeddings=True)
    assert read(folder).head is None


def test_unknown_tensor(folder):
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": np.zeros(4, np.float32)}))
    with pytest.raises(ConfigError, match=r"model.safetensors: tensor 'model.layers.0.self_attn.o_proj.bias'"):
        read(folder)


def test_a_name_of_the_hub_is_told_what_to_do(folder):
    with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen2\.5-0\.5B --local-dir"):
        hf.read_spec("Qwen/Qwen2.5-0.5B", None)


def test_missing_files(folder):
    with pytest.raises(ConfigError, match=r"nowhere' does not exist.*data_pipelines.smollm2"):
        read(folder.parent / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*.safetensors"):
        read(folder)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ConfigError, match=r"model-00001-of-00002.safetensors is missing"):
        read(folder)


def test_cut_off_file(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"model.safetensors is not a whole safetensors file"):
        read(folder)


@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("bfloat16", np.inf), ("float16", -np.inf)])
def test_weights_that_are_not_finite_are_named(folder, dtype, value):
    name = "model.layers.1.mlp.up_proj.weight"

    def change(tensors):
        for other in tensors:
            tensors[other] = tensors[other].astype(np.dtype(jax.numpy.dtype(dtype)))
        tensors[name][3, 5] = value

    change_tensors(folder, change)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor '{name}' holds numbers that are not finite"):
        read(folder)
