"""LoRA: low-rank adapters beside frozen projections (Hu et al., https://arxiv.org/abs/2106.09685), for every family.

A projection W[inputs, outputs] becomes W + s A B with A[inputs, r], B[r, outputs] and s = alpha / r (section 4.1), or
alpha / sqrt(r), rank-stabilised (Kalajdzievski, https://arxiv.org/abs/2312.03732). Only A and B are trained: the base
has no gradient, no optimiser state and no copy, and it is the reference policy of a KL term as it stands.

Two ways to compute it, used where each is right:

*Gradients* come from `adapt`: x W + s (x A) B. No gradient of a weight's size ever exists, and backward leaves out the
product that would make it, a third of the training FLOPs of the projections.

*What is served* is `merge`: W + s A B, multiplied out once per update by one program. Generation then costs what it
costs without adapters, and runs the same programs. With exact numerics the trainer's log-probs are computed from these
very arrays, so they are the engine's bit for bit, by construction; that the two ways agree in floating point (gradients
then belong to these values) is what the tests rest on. The price is memory: the targeted matrices a second time, in
compute dtype and sharded like the base, where full fine-tuning has gradients and two moments in float32.

A critic, if the algorithm has one, stays a full model that starts at the base: its task is another, and it is not
served. Algorithms that take advantages from groups have none.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxagent.config import ConfigError, LoraConfig, nearest
from jaxagent.models import global_arrays, layers
from jaxagent.models.hf import from_stored, read_json, save_file, to_stored
from jaxagent.models.hf_config import flag, integer, number
from jaxagent.models.layers import Adapter, LoraArray
from jaxagent.models.params import ArraySpec, Params, matrix, param_specs, stacked
from jaxagent.models.spec import ModelSpec

Adapters = dict[str, Adapter]  # by field of `Layers`; leaves as in `Params`: arrays, ArraySpecs, shardings, ...

ALL_LINEAR = "all-linear"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# Settings of adapter_config.json that change nothing of what a written adapter computes, but for those read here.
_WITHOUT_EFFECT = """auto_mapping base_model_name_or_path revision task_type inference_mode peft_version lora_dropout
    runtime_config layers_pattern megatron_config megatron_core loftq_config corda_config eva_config lora_ga_config
    qalora_group_size"""
_READ = "peft_type r lora_alpha use_rslora target_modules"
# How adapters began without a change of the base's weights, which PiSSA, OLoRA, LoftQ and CorDA make.
_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")
ADAPTER_DTYPE = "float32"  # masters of what is trained, whatever the base is stored in


def projections(spec: ModelSpec) -> dict[str, str]:
    """Every matrix that can have an adapter: its name in Hugging Face's families -> its field of `Layers`, in order."""
    layers = param_specs(spec).layers
    if isinstance(layers, list):
        raise ConfigError(f"config.model.lora: {spec.family} has layers of several kinds, which take no adapters yet.")
    matrices = {name: array for name, array in vars(layers).items() if array and array.summed}
    return {array.hf_name.split(".")[-2]: name for name, array in matrices.items() if "expert" not in array.axes}


def targets(config: LoraConfig, spec: ModelSpec) -> dict[str, str]:
    """The `projections` that have adapters.

    Raises:
      ConfigError: there is no such projection.
    """
    all_of, names = projections(spec), [name.strip() for name in config.targets.split(",")]
    mixed = {array.hf_name.split(".")[-2] for array in jax.tree.leaves(param_specs(spec)) if "expert" in array.axes}
    if wanted := sorted(mixed.intersection(mixed if names == [ALL_LINEAR] else names)):
        raise ConfigError(
            f"config.model.lora.targets: {', '.join(wanted)} of a mixture of experts take no adapters yet. Name "
            f"projections of attention: {','.join(all_of)}."
        )
    if names == [ALL_LINEAR]:
        return all_of
    for name in names:
        if name not in all_of:
            raise ConfigError(
                f"config.model.lora.targets: no projection '{name}'. {nearest(name, [*all_of, ALL_LINEAR])}"
            )
    return {name: field for name, field in all_of.items() if name in names}


def scale(config: LoraConfig) -> float:
    """s, by which an adapter's product is multiplied."""
    return config.alpha / (math.sqrt(config.rank) if config.rank_stabilised else config.rank)


def adapter_specs(spec: ModelSpec, config: LoraConfig) -> Adapters:
    """The tree of `ArraySpec`s of the adapters, derived from those of the projections; names are PEFT's.

    A is Gaussian and B is 0 (section 4.1), so training starts at the base. The paper does not say the variance of A;
    that of its released code is 1 / (3 inputs).
    """
    layers = param_specs(spec).layers
    return {name: _adapter(getattr(layers, name), config.rank) for name in targets(config, spec).values()}


def adapt(base: Params, adapters: Adapters, config: LoraConfig) -> Params:
    """The model with each adapter beside its projection, not multiplied out: gradients are taken through this form."""
    return base.replace(layers=base.layers.replace(**carried(base, adapters, config)))


def merge(base: Params, adapters: Adapters, config: LoraConfig, dtype: str) -> Params:
    """The model with its adapters multiplied out, in `dtype` where targeted; all else are the base's own arrays.

    Do not jit the whole function: jit copies every array that it returns, even one that only passes through.
    """
    return base.replace(layers=base.layers.replace(**products(carried(base, adapters, config), dtype)))


def carried(base: Params, adapters: Adapters, config: LoraConfig) -> dict[str, LoraArray]:
    """Each targeted projection with its adapter, by field of `Layers`."""
    return {
        name: LoraArray(getattr(base.layers, name), adapter.a, adapter.b, scale(config))
        for name, adapter in adapters.items()
    }


@functools.partial(jax.jit, static_argnums=1)
def products(arrays: dict[str, LoraArray], dtype: str) -> dict[str, jax.Array]:
    """The adapted projections, multiplied out."""
    return {name: layers.product(array, dtype) for name, array in arrays.items()}


def _adapter(array: ArraySpec, rank: int) -> Adapter:
    """Specs of the adapter of a stack of projections."""
    sizes = dict(zip(array.axes, array.shape, strict=True))
    inputs = {array.axes[axis]: array.shape[axis] for axis in array.summed}
    outputs = {axis: size for axis, size in sizes.items() if axis not in ("layers", *inputs)}
    name = array.hf_name.removesuffix(".weight")
    a = matrix(f"{name}.lora_A.weight", inputs, {"rank": rank}, std=(3 * array.hf_shape[1]) ** -0.5)
    b = matrix(f"{name}.lora_B.weight", {"rank": rank}, outputs, std=0.0)
    return Adapter(*(stacked(single, array.layers, ADAPTER_DTYPE, "base_model.model.") for single in (a, b)))


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
    specs = adapter_specs(spec, config)
    tensors = {}
    for array, weights in zip(jax.tree.leaves(specs), jax.tree.leaves(adapters), strict=True):
        tensors |= {name: to_stored(layer, array) for name, layer in zip(array.hf_names, weights, strict=True)}
    save_file(tensors, folder / WEIGHTS_FILE)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "use_rslora": config.rank_stabilised,
        "target_modules": list(targets(config, spec)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_adapters(
    folder: str | pathlib.Path, spec: ModelSpec, where: Adapters | None = None
) -> tuple[Adapters, LoraConfig]:
    """Reads what `save_adapters` wrote, or PEFT itself.

    Args:
      folder: with both files.
      spec: of the base model.
      where: shardings, `params.shardings_of(adapter_specs(...), ...)`; None = the default device.

    Raises:
      ConfigError: a missing file, setting or tensor, a tensor of another shape or of no adapter of this model, another
        kind of adapter, or a setting that this code does not compute.
    """
    config = _read_config(pathlib.Path(folder) / CONFIG_FILE, spec)
    path = pathlib.Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ConfigError(f"{path} does not exist.")
    try:
        tensors = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from error

    def layer_of(array: ArraySpec, name: str) -> np.ndarray:
        if name not in tensors:
            raise ConfigError(f"{path}: tensor '{name}' is missing.")
        tensor = tensors.pop(name)
        if tensor.shape != array.hf_shape:
            raise ConfigError(f"{path}: tensor '{name}' has shape {tensor.shape}, not {array.hf_shape}.")
        return from_stored(tensor, array, tuple((0, size) for size in array.shape[1:])).astype(array.dtype)

    adapters = jax.tree.map(
        lambda array: np.stack([layer_of(array, name) for name in array.hf_names]), adapter_specs(spec, config)
    )
    if tensors:
        raise ConfigError(f"{path}: tensor '{min(tensors)}' belongs to no adapter of this model and config.")
    return (jax.device_put(adapters) if where is None else jax.tree.map(global_arrays.put, adapters, where)), config


def _read_config(path: pathlib.Path, spec: ModelSpec) -> LoraConfig:
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
    names = settings.get("target_modules")
    if not isinstance(names, str) and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{path}: target_modules must be a text or a list of texts, not {names!r}.")
    config = LoraConfig(
        rank=integer(settings, "r", source=str(path)),
        alpha=number(settings, "lora_alpha", str(path)),
        rank_stabilised=flag(settings, "use_rslora", str(path)),
        targets=names if isinstance(names, str) else ",".join(name.rpartition(".")[2] for name in names),  # of paths
    )
    try:
        targets(config, spec)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config
