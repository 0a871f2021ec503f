"""Makes the golden vectors beside this file: tiny Hugging Face folders and the logits transformers computes for them.

Needs torch and transformers; run from the repository root, then commit what changed:

    python -m tests.models.golden.make
"""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import torch
import transformers

from tests.models import hf_cases

HERE = pathlib.Path(__file__).parent
GOLDEN = ("qwen2-untied", "qwen2-yarn", "qwen3-tied", "qwen3-dynamic", "llama-tied", "llama-llama3", "llama-linear")


def main() -> None:
    """Writes one folder per case: config.json, model.safetensors (bfloat16), expected.npz (tokens, float32 logits)."""
    for name in GOLDEN:
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        # bfloat16 weights halve the files; both sides then compute in float32 from the same rounded weights. Read
        # back, because a model cast in memory keeps rounded rotary frequencies too.
        hf_cases.build(name).to(torch.bfloat16).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 40))
        expected = hf_cases.logits(model.eval(), tokens).numpy()
        np.savez_compressed(folder / "expected.npz", tokens=tokens.astype(np.int32), logits=expected)


if __name__ == "__main__":
    main()
