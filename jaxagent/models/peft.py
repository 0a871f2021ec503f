"""LoRA adapters in PEFT's layout: adapter_config.json + adapter_model.safetensors.

`peft.PeftModel.from_pretrained(base, folder)` and vLLM's and SGLang's `--lora-modules` read what `save` writes.
"""

from __future__ import annotations

import json
import pathlib

import jax

from jaxagent.config import LoraConfig
from jaxagent.models import global_arrays, lora
from jaxagent.models.hf import save_file
from jaxagent.models.hf_layout import to_stored
from jaxagent.models.spec import ModelSpec

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


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
