"""The model of the engine and train benchmarks: a random Qwen2 of five million parameters, float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax

from jaxagent.config import MeshConfig
from jaxagent.models import hf, params, sharding
from jaxagent.models.spec import ModelSpec
from jaxagent.runs import devices

SPEC = ModelSpec(
    family="qwen2",
    vocab_size=4096,
    padded_vocab_size=4096,
    num_layers=4,
    embed_dim=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=704,
    tie_embeddings=False,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    max_position=0,
    embed_init_std=0.1,
    compute_dtype="float32",
    param_dtype="float32",
    remat="none",
    logprob_chunk_tokens=1024,
)


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """The same weights for every contender."""

    spec: ModelSpec
    mesh: jax.sharding.Mesh
    params: params.Params
    folder: Path  # a Hugging Face folder of them
    exact: bool  # numerics of our engine


def two_devices() -> None:
    """Gives jax two virtual CPU devices, and glibc's huge pages, as `jaxagent.main` does. Before jax starts."""
    devices.use_huge_pages()
    jax.config.update("jax_num_cpu_devices", 2)


def spread(model: TinyModel, count: int) -> TinyModel:
    """The same model on a mesh of `count` devices, data parallel."""
    mesh = sharding.make_mesh(MeshConfig(data=count, fsdp=1, tensor=1, context=1))
    weights = jax.device_put(model.params, params.shardings(model.spec, mesh, sharding.TRAIN))
    return dataclasses.replace(model, mesh=mesh, params=weights)


def make(folder: Path, exact: bool = False, seed: int = 0) -> TinyModel:
    """Initialises the model and exports it into `folder`."""
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, context=1))
    with jax.set_mesh(mesh):
        weights = params.init(SPEC, jax.random.key(seed), params.shardings(SPEC, mesh, sharding.TRAIN))
    hf.save(folder, weights, SPEC, "float32")
    return TinyModel(SPEC, mesh, weights, folder, exact)


def load(folder: Path) -> TinyModel:
    """What `make` exported, in another process."""
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, context=1))
    weights = hf.load(folder, SPEC, params.shardings(SPEC, mesh, sharding.TRAIN))
    return TinyModel(SPEC, mesh, weights, folder, exact=False)
