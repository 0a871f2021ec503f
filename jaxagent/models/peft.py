"""LoRA adapters as PEFT's two files, in and out, for transformers' other readers of such folders, too.

Matrices of experts have two forms there. One adapter per expert, under the names that released checkpoints have, is
what we write; PEFT joins them when it loads them into transformers 5, but only all three projections or down alone.
PEFT itself writes the joined form (`target_parameters`): the experts' A below one another, their B beside one another,
rank by rank, and for gate and up together one A and one B. We write it where PEFT could not join, and read both.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxagent.config import ConfigError, LoraConfig
from jaxagent.models import global_arrays, lora
from jaxagent.models.hf import from_stored, read_json, save_file, to_stored
from jaxagent.models.hf_config import flag, integer, number
from jaxagent.models.layers import Adapter
from jaxagent.models.lora import Adapters
from jaxagent.models.params import ArraySpec, param_specs
from jaxagent.models.spec import ModelSpec

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# Settings of adapter_config.json that change nothing of what a written adapter computes, but for those read here.
_WITHOUT_EFFECT = """auto_mapping base_model_name_or_path revision task_type inference_mode peft_version lora_dropout
    runtime_config layers_pattern megatron_config megatron_core loftq_config corda_config eva_config lora_ga_config
    qalora_group_size"""
_READ = "peft_type r lora_alpha use_rslora target_modules target_parameters rank_pattern alpha_pattern"
# How adapters began without a change of the base's weights, which PiSSA, OLoRA, LoftQ and CorDA make.
_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")
# The experts' matrices as transformers 5 joins them, the first of two being the inner one of PEFT's wrappers.
_JOINED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def save_adapters(
    folder: str | pathlib.Path, adapters: Adapters, spec: ModelSpec, config: LoraConfig, base: str
) -> None:
    """Writes PEFT's two files, which `peft.PeftModel.from_pretrained` and vLLM's and SGLang's `--lora-modules` read.

    The config comes last, so a folder that was cut off cannot be mistaken for a whole one.

    Args:
      folder: made if missing.
      adapters: f32, in any sharding. Of several processes each has to call this, and process 0 writes.
      spec, config: of the base and of the adapters.
      base: folder or hub name of the base model, for whoever loads the adapters.
    """
    adapters = global_arrays.get(adapters)
    if not global_arrays.writes():
        return
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    arrays = jax.tree.leaves(lora.adapter_specs(spec, config))
    tensors = {}
    for array, weights in zip(arrays, jax.tree.leaves(adapters), strict=True):
        singles = weights.reshape(-1, *weights.shape[array.stacks :])
        tensors |= {name: to_stored(single, array) for name, single in zip(array.hf_names, singles, strict=True)}
    each = {_part(array.hf_name) for array in arrays if array.stacks == 2}  # projections of experts
    # PEFT doubles rank and alpha of gate and up, which keeps alpha / rank alone.
    stabilised = config.rank_stabilised and not each
    alpha = config.alpha if stabilised == config.rank_stabilised else lora.scale(config) * config.rank
    modules, joined = lora.targets(config, spec), {}
    if each and each != {"down_proj"} and len(each) < 3:
        kinds = [kind for kind, parts in _JOINED.items() if each.intersection(parts)]
        _join(tensors, arrays, kinds)
        wide = [kind for kind in kinds if each.issuperset(_JOINED[kind]) and len(_JOINED[kind]) == 2]
        joined = {
            "target_parameters": kinds,
            "rank_pattern": {rf".*\.{kind}": 2 * config.rank for kind in wide},
            "alpha_pattern": {rf".*\.{kind}": 2 * alpha for kind in wide},
        }
        modules = [name for name in modules if name not in each]
    save_file(tensors, folder / WEIGHTS_FILE)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": stabilised,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        **joined,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_adapters(
    folder: str | pathlib.Path, spec: ModelSpec, where: Adapters | None = None, config: LoraConfig | None = None
) -> tuple[Adapters, LoraConfig]:
    """Reads what `save_adapters` wrote, or PEFT itself.

    Args:
      folder: with both files.
      spec: of the base model.
      where: shardings, `params.shardings_of(lora.adapter_specs(...), ...)`; None = NumPy's arrays.
      config: of the run that goes on with them, whose scale they get; None = as the folder says.

    Returns:
      The adapters, f32, and the config under which they mean what they mean in the folder.

    Raises:
      ConfigError: a missing file, setting or tensor, a tensor of another shape or of no adapter of this model, another
        kind of adapter, a setting that this code does not compute, or other projections or another rank than `config`.
    """
    settings, path = _read_settings(pathlib.Path(folder) / CONFIG_FILE, spec), pathlib.Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ConfigError(f"{path} does not exist.")
    try:
        tensors = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from error
    scales = _split_by_expert(tensors, settings, spec, path)
    rank = settings.config.rank
    if settings.rank_pattern:
        rank = max([rank, *(len(tensor) for name, tensor in tensors.items() if name.endswith(".lora_A.weight"))])
    own = _of_rank(settings.config, rank)
    if config is None:
        config = own
    if lora.targets(config, spec) != lora.targets(own, spec) or config.rank != own.rank:
        names = ",".join(lora.targets(own, spec))
        raise ConfigError(
            f"config.model.lora.rank and targets must be those of {path.parent}: --config.model.lora.rank={own.rank} "
            f"--config.model.lora.targets={names}."
        )

    def single(array: ArraySpec, name: str, scale: float, axis: int) -> np.ndarray:
        """Padded with zeros to the rank of all, which `axis` of the stored tensor counts."""
        if name not in tensors:
            raise ConfigError(f"{path}: tensor '{name}' is missing.")
        tensor, wanted = tensors.pop(name), list(array.hf_shape)
        if not np.isfinite(tensor).all():
            raise ConfigError(f"{path}: tensor '{name}' holds numbers that are not finite (NaN or infinity).")
        narrow = tensor.ndim == 2 and tensor.shape[axis] < wanted[axis]
        if narrow and (_module(name) in scales or tensor.shape[axis] == settings.rank(_module(name))):
            tensor = np.pad(tensor, [(0, wanted[i] - tensor.shape[i] if i == axis else 0) for i in range(2)])
        if tensor.shape != array.hf_shape:
            raise ConfigError(f"{path}: tensor '{name}' has shape {tensor.shape}, not {array.hf_shape}.")
        tensor = tensor.astype(array.dtype)
        tensor = tensor if scale == 1 else tensor * np.float32(scale)
        return from_stored(tensor, array, tuple((0, size) for size in array.shape[array.stacks :]))

    def adapter_of(adapter: Adapter) -> Adapter:
        def of_all(array: ArraySpec, axis: int) -> np.ndarray:
            by_name = {name: _module(name) for name in array.hf_names}
            scale = {
                n: scales.get(m, settings.scale(m)) / lora.scale(config) if axis else 1 for n, m in by_name.items()
            }
            return np.stack([single(array, name, scale[name], axis) for name in by_name]).reshape(array.shape)

        return Adapter(of_all(adapter.a, 0), of_all(adapter.b, 1))

    specs = lora.adapter_specs(spec, config)
    adapters = jax.tree.map(adapter_of, specs, is_leaf=lambda x: isinstance(x, Adapter))
    if tensors:
        raise ConfigError(f"{path}: tensor '{min(tensors)}' belongs to no adapter of this model and config.")
    return (adapters if where is None else jax.tree.map(global_arrays.put, adapters, where)), config


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What an adapter_config.json says."""

    config: LoraConfig
    joined: list[str]  # of `_JOINED`, which have adapters in the joined form
    rank_pattern: Mapping[str, int]  # ranks of some modules, by regular expression
    alpha_pattern: Mapping[str, float]

    def rank(self, module: str) -> int:
        """Of a module's adapter, the module named without prefix; of one expert's where they are joined."""
        return _of_module(self.rank_pattern, module, self.config.rank)

    def scale(self, module: str) -> float:
        """By which a module's product is multiplied."""
        alpha = _of_module(self.alpha_pattern, module, self.config.alpha)
        return lora.scale(dataclasses.replace(self.config, rank=self.rank(module), alpha=alpha))


def _of_module(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _module(name: str) -> str:
    """The module of a tensor's name: "model.layers.0.self_attn.q_proj"."""
    return re.sub(r"^base_model\.model\.|\.lora_[AB]\.weight$", "", name)


def _part(name: str) -> str:
    """The projection of a tensor's name: "gate_proj"."""
    return _module(name).rpartition(".")[2]


def _join(tensors: dict[str, np.ndarray], arrays: Sequence[ArraySpec], kinds: Sequence[str]) -> None:
    """Puts joined adapters in the place of those of each expert."""
    modules: dict[str, int] = {}
    for array in arrays:
        for layer in array.layers if array.stacks == 2 else ():
            modules[array.hf_name.format(layer=layer, expert=0).partition(".experts.")[0] + ".experts"] = array.shape[1]
    for module, count in modules.items():
        for kind in kinds:
            parts = [part for part in _JOINED[kind] if f"{module}.0.{part}.lora_A.weight" in tensors]
            a = [[tensors.pop(f"{module}.{x}.{part}.lora_A.weight") for x in range(count)] for part in parts]
            b = [[tensors.pop(f"{module}.{x}.{part}.lora_B.weight") for x in range(count)] for part in parts]
            below, beside = np.concatenate(a, axis=1), np.stack(b)  # [X, ranks, inputs], [parts, X, outputs, r]
            (_, _, rows, rank), all_of = beside.shape, _JOINED[kind]
            up = np.zeros((len(all_of) * rows, len(parts), rank, count), np.float32)
            for i, part in enumerate(parts):
                at = all_of.index(part) * rows
                up[at : at + rows, i] = beside[i].transpose(1, 2, 0)
            stem = f"{module}.base_layer" if len(kinds) == 2 and kind == kinds[0] else module
            tensors[f"{stem}.lora_A.weight"] = below.reshape(-1, below.shape[2])
            tensors[f"{stem}.lora_B.weight"] = up.reshape(len(up), -1)


def _of_rank(config: LoraConfig, rank: int) -> LoraConfig:
    """The same scale with a wider rank, to which narrower adapters are padded."""
    if rank == config.rank:
        return config
    alpha = config.alpha * (math.sqrt(rank / config.rank) if config.rank_stabilised else rank / config.rank)
    return dataclasses.replace(config, rank=rank, alpha=alpha)


def _split_by_expert(
    tensors: dict[str, np.ndarray], settings: _Settings, spec: ModelSpec, path: pathlib.Path
) -> dict[str, float]:
    """Puts each expert's adapters in the place of joined ones; gives the scale of each by its module."""
    scales: dict[str, float] = {}
    experts = {array.shape[1] for array in jax.tree.leaves(param_specs(spec)) if array.stacks == 2}
    for name in [name for name in tensors if name.endswith(".experts.lora_A.weight") or ".base_layer." in name]:
        if not name.endswith(".lora_A.weight") or not settings.joined:
            continue
        stem = name.removesuffix(".lora_A.weight")
        module, inner = stem.removesuffix(".base_layer"), stem.endswith(".base_layer")
        kind, count = settings.joined[0 if inner else -1], max(experts, default=0)
        a, b = tensors.pop(name), tensors.pop(f"{stem}.lora_B.weight", np.zeros((0, 0), np.float32))
        joined = f"{_module(module)}.{kind}"
        if not count or len(a) != count * settings.rank(joined) or a.shape[0] != b.shape[-1]:
            raise ConfigError(
                f"{path}: tensor '{name}' has shape {a.shape}, not rank {settings.rank(joined)} for each of the "
                f"{count} experts of this model."
            )
        a, b = a.reshape(count, -1, a.shape[1]), b.reshape(len(b), -1, count).transpose(2, 0, 1)
        parts, rank = _JOINED[kind], a.shape[1]
        for i, part in enumerate(parts):
            rows = slice(i * b.shape[1] // len(parts), (i + 1) * b.shape[1] // len(parts))
            own = slice(i * rank // 2, (i + 1) * rank // 2) if len(parts) == 2 and _apart(b) else slice(None)
            for expert in range(count):
                single = f"{module}.{expert}.{part}"
                tensors[f"{single}.lora_A.weight"] = a[expert, own]
                tensors[f"{single}.lora_B.weight"] = b[expert, rows, own]
                scales[_module(single)] = settings.scale(joined)
    return scales


def _apart(b: np.ndarray) -> bool:
    """Whether B [X, outputs, r] of two joined projections is still the two of them apart, each with half the rank."""
    rows, rank = b.shape[1] // 2, b.shape[2] // 2
    return not b.shape[2] % 2 and bool(b.any()) and not (b[:, :rows, rank:].any() or b[:, rows:, :rank].any())


def _read_settings(path: pathlib.Path, spec: ModelSpec) -> _Settings:
    """The config of a saved adapter. A key that is unknown here must be off: null, false, 0 or empty."""
    settings = read_json(path)
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type {settings.get('peft_type')!r} is not supported, only 'LORA'.")
    off = {"bias": ("none", None), "init_lora_weights": _BEGINNINGS}
    for key, value in settings.items():
        if value not in off[key] if key in off else value and key not in (*_READ.split(), *_WITHOUT_EFFECT.split()):
            raise ConfigError(
                f"{path}: {key}={value!r} is not supported: it may change what the adapter computes. Delete the key if "
                "it does not."
            )
    listed = []
    for key in ("target_modules", "target_parameters"):
        value = settings.get(key) or ([] if settings.get("target_parameters") or key == "target_parameters" else None)
        value = value.split(",") if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{path}: {key} must be a text or a list of texts, not {value!r}.")
        listed.append([name.removesuffix(".weight").rpartition(".")[2] for name in value])  # of paths
    joined = [kind for kind in _JOINED if kind in listed[1]]
    names = listed[0] + [part for name in listed[1] for part in _JOINED.get(name, (name,))]
    config = LoraConfig(
        rank=integer(settings, "r", source=str(path)),
        alpha=number(settings, "lora_alpha", str(path)),
        rank_stabilised=flag(settings, "use_rslora", str(path)),
        targets=",".join(dict.fromkeys(names)),
    )
    try:
        lora.targets(config, spec)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    ranks, alphas = (_pattern(settings, key, path) for key in ("rank_pattern", "alpha_pattern"))
    ranks = {name: integer(ranks, name, source=f"{path}: rank_pattern") for name in ranks}
    return _Settings(config, joined, ranks, {name: number(alphas, name, f"{path}: alpha_pattern") for name in alphas})


def _pattern(settings: Mapping[str, Any], key: str, path: pathlib.Path) -> Mapping[str, Any]:
    """A section with regular expressions for keys."""
    section = settings.get(key) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {key} must be an object, not {section!r}.")
    for name in section:
        try:
            re.compile(name)
        except re.error as error:
            raise ConfigError(f"{path}: {key}: {name!r} is no regular expression ({error}).") from None
    return section
