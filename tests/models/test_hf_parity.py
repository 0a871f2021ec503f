"""Our logits equal transformers' on random tiny models of every family and RoPE scaling; folders go both ways."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from jaxagent.config import ConfigError  # noqa: E402 (after importorskip)
from jaxagent.models import hf, hf_config, rope  # noqa: E402
from jaxagent.models.families import FAMILIES  # noqa: E402
from tests.models import forward, hf_cases, tiny  # noqa: E402
from tests.models.forward import all_logits  # noqa: E402

TOLERANCE = 1e-4
GRADIENTS = {
    "qwen2-yarn",
    "llama-llama3",
    "mistral",
    "smollm3",
    "olmo2",
    "qwen3_5",
    "qwen3_next-dense",
}  # each family and scaling once


def tensors_of(folder) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: t for file in files for name, t in safetensors.numpy.load_file(file).items()}


def assert_gradients(model, params, spec, tokens) -> None:
    """Of the mean log-prob of the next token, each of our arrays' as it would be stored."""
    model.zero_grad()
    labels = torch.as_tensor(tokens, dtype=torch.long)
    model(input_ids=labels, labels=labels).loss.backward()

    def loss(params):
        logits = forward.every_logit(params, spec, tokens)[:, :-1, : spec.vocab_size]
        logprobs = jax.nn.log_softmax(logits)
        return -jax.numpy.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    ours = dict(hf._stored_tensors(jax.grad(loss)(params), spec, np.dtype("float32")))
    theirs = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert set(ours) == set(theirs)
    for name, theirs_of in theirs.items():
        worst = np.linalg.norm(ours[name] - theirs_of) / np.linalg.norm(theirs_of)
        assert worst <= 1e-3, (name, worst)


def heavy(name: str):
    """The case, among the quick tests only where its gradients are not compared."""
    return pytest.param(name, marks=pytest.mark.slow if name in GRADIENTS else ())


@pytest.mark.parametrize("name", [*sorted(hf_cases.CASES), *hf_cases.MIXTURES, *map(heavy, hf_cases.HYBRIDS)])
def test_logits_and_round_trip(name, tmp_path):
    model = hf_cases.build(name)
    model.save_pretrained(tmp_path / "theirs")
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 30)).astype(np.int32)
    expected = hf_cases.logits(model, tokens).numpy()

    spec = hf.read_spec(tmp_path / "theirs", tiny.model_config())
    params = hf.load(tmp_path / "theirs", spec, None)
    np.testing.assert_allclose(all_logits(params, spec, tokens), expected, atol=TOLERANCE, rtol=0)

    if name in GRADIENTS:
        assert_gradients(model, params, spec, tokens)

    hf.save(tmp_path / "ours", params, spec, "float32", assets=tmp_path / "theirs")
    assert hf.read_spec(tmp_path / "ours", tiny.model_config()) == spec
    theirs, ours = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert set(theirs) == set(ours)
    for key in theirs:
        assert theirs[key].dtype == ours[key].dtype and theirs[key].tobytes() == ours[key].tobytes(), key

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert type(again) is type(model)
    np.testing.assert_array_equal(hf_cases.logits(again, tokens).numpy(), expected)


@pytest.mark.parametrize("scaling", [hf_cases.PLAIN, hf_cases.YARN, hf_cases.LLAMA3], ids=lambda s: s["rope_type"])
def test_a_part_of_each_head_turns_as_in_qwen3_next(scaling):
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    config = transformers.Qwen3NextConfig(head_dim=16, rope_parameters=scaling | dict(partial_rotary_factor=0.5))
    folder = dict(model_type="qwen3", vocab_size=8, num_hidden_layers=1, hidden_size=16, num_attention_heads=1)
    folder |= dict(
        intermediate_size=8, num_key_value_heads=1, head_dim=16, rope_parameters=scaling, max_position_embeddings=64
    )
    spec = hf_config.spec_from_hf(folder, tiny.model_config(), "config.json")
    spec = dataclasses.replace(spec, partial_rotary_factor=0.5)
    x = np.random.default_rng(0).normal(size=(50, 3, 16)).astype(np.float32)
    q = torch.as_tensor(x).transpose(0, 1)[None]
    angles = theirs.Qwen3NextRotaryEmbedding(config)(q, torch.arange(50)[None])
    expected = theirs.apply_rotary_pos_emb(q, q, *angles)[0][0].transpose(0, 1).numpy()
    ours = rope.rotate(jax.numpy.asarray(x), *rope.table(spec, np.arange(50, dtype=np.int32)))
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_a_model_that_sees_is_read_as_its_language_model(tmp_path):
    """Names and config.json nested as Qwen3.5 is released, with a vision tower and a layer for speculation."""
    _, text = hf_cases.HYBRIDS["qwen3_5-tied"]
    sizes = dict(vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    text = text | sizes | dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=64)
    text |= dict(rope_parameters=dict(rope_theta=1e4, rope_type="default", mrope_section=[1, 1, 0]))
    vision = dict(depth=1, hidden_size=8, num_heads=2, intermediate_size=8, out_hidden_size=16, patch_size=4)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    stored = safetensors.numpy.load_file(path)
    assert any(name.startswith("model.visual.") for name in stored)
    safetensors.numpy.save_file(stored | {"mtp.fc.weight": np.zeros((2, 2), np.float32)}, path)

    spec = hf.read_spec(tmp_path / "theirs", tiny.model_config())
    assert spec.family == "qwen3_5_text" and spec.tie_embeddings and spec.rotary_dim == 4
    params = hf.load(tmp_path / "theirs", spec, None)
    tokens = np.random.default_rng(1).integers(0, 48, (2, 20)).astype(np.int32)
    np.testing.assert_allclose(all_logits(params, spec, tokens), hf_cases.logits(model, tokens).numpy(), atol=TOLERANCE)
    assert hf.unread(tmp_path / "theirs", spec).endswith("no log-prob of text needs: model.visual.*, mtp.*")

    hf.save(tmp_path / "ours", params, spec, "float32", assets=tmp_path / "theirs")
    assert hf.read_spec(tmp_path / "ours", tiny.model_config()) == spec
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_allclose(hf_cases.logits(again, tokens), hf_cases.logits(model, tokens), atol=1e-6)

    edited = json.loads((tmp_path / "theirs" / "config.json").read_text())
    for changes in (dict(tie_word_embeddings=False), dict(fusion="late"), dict(text_config=None)):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            hf_config.spec_from_hf(edited | changes, tiny.model_config(), "config.json")


YARN = hf_cases.YARN | dict(rope_theta=500.0)
ABSENT = object()

# What config.json files look like that were edited, converted, or written by an older version; (case, changes).
EDITED = {
    "one scaling in both forms": ("llama-untied", dict(rope_scaling=YARN, rope_parameters=YARN)),
    "the old form only": ("llama-untied", dict(rope_scaling=YARN, rope_parameters=ABSENT, rope_theta=500.0)),
    "length beside llama3": ("llama-llama3", dict(original_max_position_embeddings=32)),
    "length beside yarn": ("llama-untied", dict(rope_parameters=YARN, original_max_position_embeddings=40)),
    "length beside linear": ("llama-linear", dict(original_max_position_embeddings=8)),
    "length in dynamic": (
        "llama-dynamic",
        dict(rope_parameters=hf_cases.DYNAMIC | dict(original_max_position_embeddings=999)),
    ),
    "no eps": ("llama-untied", dict(rms_norm_eps=ABSENT)),
    "no kv heads": ("llama-linear", dict(num_key_value_heads=ABSENT)),
    "no head_dim": ("wide-heads", dict(head_dim=ABSENT)),  # of Qwen3: 128 dimensions then, whatever hidden_size is
    "swish": ("llama-untied", dict(hidden_act="swish")),
}


@pytest.mark.parametrize("name", sorted(EDITED))
def test_an_edited_config_is_the_model_that_transformers_reads(name, tmp_path):
    case, changes = EDITED[name]
    original = hf_cases.build(case)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter *= 0.05 if name == "no eps" else 1.0  # small activations: there eps is seen
    original.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ABSENT}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = np.random.default_rng(1).integers(0, original.config.vocab_size, (2, 60)).astype(np.int32)
    spec = hf.read_spec(tmp_path, tiny.model_config())
    ours = all_logits(hf.load(tmp_path, spec, None), spec, tokens)
    np.testing.assert_allclose(ours, hf_cases.logits(theirs, tokens).numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", sorted(hf_cases.CONFIGS))
def test_own_model_exports_to_transformers(family, tmp_path):
    """A model born here, with a padded vocabulary, in several files."""
    spec = tiny.spec(family=family, tie_embeddings=False, num_layers=len(FAMILIES[family].pattern) * 2)
    spec = dataclasses.replace(spec, head_dim=spec.embed_dim // spec.num_heads) if family == "olmoe" else spec
    from jaxagent.models import params as model_params

    params = model_params.init(spec, jax.random.key(0))
    hf.save(tmp_path, params, spec, "float32", file_bytes=8000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, (2, 30)).astype(np.int32)
    expected = hf_cases.logits(theirs, tokens).numpy()
    np.testing.assert_allclose(all_logits(params, spec, tokens), expected, atol=TOLERANCE, rtol=0)
