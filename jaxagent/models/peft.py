"""LoRA adapters in and out of PEFT's layout: adapter_config.json + adapter_model.safetensors.

`peft.PeftModel.from_pretrained(base, folder)` and vLLM's and SGLang's `--lora-modules` read what `save` writes; `load`
reads it back, and what PEFT wrote, as long as it is plain LoRA on projections that `lora.TARGETS` names.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxagent.config import ConfigError, LoraConfig
from jaxagent.models import global_arrays, lora
from jaxagent.models.families import flag, integer, number
from jaxagent.models.hf import save_file
from jaxagent.models.hf_layout import from_stored, to_stored
from jaxagent.models.params import ArraySpec
from jaxagent.models.spec import ModelSpec

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

# Settings of adapter_config.json that change what an adapter computes, with the values that leave them off.
UNSUPPORTED = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "exclude_modules": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "monteclora_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None, {}),
    "ensure_weight_tying": (False, None),
    # How the adapters began. Of those that are not listed some change the base's weights (PiSSA, OLoRA, LoftQ, CorDA).
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
_READ = "peft_type r lora_alpha use_rslora target_modules"
_WITHOUT_EFFECT = """auto_mapping base_model_name_or_path revision task_type inference_mode peft_version lora_dropout
    runtime_config layers_pattern megatron_config megatron_core loftq_config corda_config eva_config lora_ga_config
    qalora_group_size"""


def save(folder: str | pathlib.Path, adapters: lora.Adapters, spec: ModelSpec, config: LoraConfig, base: str) -> None:
    """Writes the two files; the config comes last, so a folder that was cut off cannot be mistaken for a whole one.

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
    specs = lora.adapter_specs(spec, config)
    tensors = {}
    for array, weights in zip(jax.tree.leaves(specs), jax.tree.leaves(adapters), strict=True):
        tensors |= {array.hf.name.format(layer=i): to_stored(layer, array) for i, layer in enumerate(weights)}
    save_file(tensors, folder / WEIGHTS_FILE)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "use_rslora": config.rank_stabilised,
        "target_modules": list(lora.targets(config)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_config(folder: str | pathlib.Path) -> LoraConfig:
    """The config of a saved adapter.

    Raises:
      ConfigError: no such file, another kind of adapter, or a setting that this code does not compute.
    """
    path = pathlib.Path(folder) / CONFIG_FILE
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {str(said)[:40]!r}.")
    if said.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type {said.get('peft_type')!r} is not supported, only 'LORA'.")
    for key, off in UNSUPPORTED.items():
        if key in said and said[key] not in off:
            raise ConfigError(f"{path}: {key}={said[key]!r} is not supported.")
    if unknown := sorted(
        {key for key, value in said.items() if value is not None}.difference(
            _READ.split(), _WITHOUT_EFFECT.split(), UNSUPPORTED
        )
    ):
        raise ConfigError(
            f"{path}: nothing is known here of {unknown[0]}={said[unknown[0]]!r}, which may change what the adapter "
            "computes. Delete the key if it does not."
        )
    if "target_modules" not in said:
        raise ConfigError(f"{path} has no 'target_modules'.")
    names = said["target_modules"]
    if not isinstance(names, str) and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{path}: target_modules must be a text or a list of texts, not {names!r}.")
    config = LoraConfig(
        rank=integer(said, "r", source=str(path)),
        alpha=number(said, "lora_alpha", str(path)),
        rank_stabilised=flag(said, "use_rslora", str(path)),
        targets=names if isinstance(names, str) else ",".join(names),
    )
    if config.rank < 1 or config.alpha <= 0:
        raise ConfigError(f"{path}: r and lora_alpha must be positive, got {config.rank} and {config.alpha}.")
    try:
        lora.targets(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def load(folder: str | pathlib.Path, spec: ModelSpec, where: lora.Adapters | None) -> tuple[lora.Adapters, LoraConfig]:
    """Reads adapters.

    Args:
      folder: with both files.
      spec: of the base model.
      where: shardings, `params.shardings_of(lora.adapter_specs(...), ...)`; None = the default device.

    Raises:
      ConfigError: a missing file, setting or tensor, a tensor of another shape, or one that no adapter here has.
    """
    config = read_config(folder)
    path = pathlib.Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ConfigError(f"{path} does not exist.")
    try:
        tensors = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from error
    specs = lora.adapter_specs(spec, config)
    adapters = jax.tree.map(lambda array: _stacked(array, tensors, path), specs)
    if tensors:
        raise ConfigError(f"{path}: tensor '{min(tensors)}' belongs to no adapter of this model and config.")
    if where is None:
        return jax.device_put(adapters), config
    return jax.tree.map(global_arrays.put, adapters, where), config


def _stacked(array: ArraySpec, tensors: dict[str, Any], path: pathlib.Path) -> np.ndarray:
    """Takes one array's layers out of `tensors`."""
    single = tuple((0, size) for size in array.shape[1:])
    layers = []
    for layer in range(array.shape[0]):
        name = array.hf.name.format(layer=layer)
        if name not in tensors:
            raise ConfigError(f"{path}: tensor '{name}' is missing.")
        stored = tensors.pop(name)
        if stored.shape != array.hf.shape:
            raise ConfigError(f"{path}: tensor '{name}' has shape {stored.shape}, not {array.hf.shape}.")
        layers.append(from_stored(stored, array, single).astype(array.dtype))
    return np.stack(layers)
