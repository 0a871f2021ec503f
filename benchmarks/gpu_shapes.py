"""Model shapes that the GPU benchmarks run, with random weights: published ones, and a tiny one for a dry run.

Shape's name in -> a parsed config of that shape on one device, its spec and its mesh.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxagent.config import Config, parse
from jaxagent.configs import search_r1
from jaxagent.models import sharding
from jaxagent.models.spec import ModelSpec

# Layers, embedding, heads, key heads, head, MLP, vocabulary, tied embeddings: the config.json of Qwen2.5-0.5B and -3B.
SHAPES = {
    "0.5b": (24, 896, 14, 2, 64, 4_864, 151_936, True),
    "3b": (36, 2_048, 16, 2, 128, 11_008, 151_936, True),
    "tiny": (2, 64, 4, 2, 16, 128, 512, True),
}
_FIELDS = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a benchmark builds its programs from."""

    cfg: Config
    spec: ModelSpec
    mesh: jax.sharding.Mesh


def shape(name: str, remat: str = "none", engine: dict[str, Any] | None = None, **batch: int) -> Shape:
    """The shape called `name`, bfloat16 weights and products; `engine` and `batch` change fields of the config."""
    raw = search_r1.get_config("qwen2.5-3b")
    *sizes, vocabulary, tied = SHAPES[name]
    raw.model.update(dict(zip(_FIELDS, sizes, strict=True)), tie_embeddings=tied, param_dtype="bfloat16", remat=remat)
    raw.tokenizer.vocab_size = vocabulary
    raw.mesh.fsdp = 1
    raw.engine.update(engine or {})
    raw.rl.batch.update(batch)
    cfg = parse(raw).for_platform(jax.default_backend())
    return Shape(cfg, ModelSpec.from_config(cfg.model, cfg.tokenizer.vocab_size), sharding.make_mesh(cfg.mesh))
