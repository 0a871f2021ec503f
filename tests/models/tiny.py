"""Tiny models for tests: specs, configs and packed batches that compile in a second."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxagent.config import ModelConfig
from jaxagent.models import params
from jaxagent.models.spec import ModelSpec


def spec(**changes) -> ModelSpec:
    """A two-layer Qwen3 with 61 tokens in 64 vocabulary rows; anything can be changed."""
    return ModelSpec(
        **dict(
            family="qwen3",
            vocab_size=61,
            padded_vocab_size=64,
            num_layers=2,
            embed_dim=16,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            mlp_dim=32,
            tie_embeddings=True,
            rope_theta=10_000.0,
            rope_scaling=None,
            norm_eps=1e-6,
            max_position=0,
            embed_init_std=0.5,
            compute_dtype="float32",
            param_dtype="float32",
            remat="none",
            logprob_chunk_tokens=1024,
        )
        | changes
    )


def model_config(**changes) -> ModelConfig:
    """The config of a model read from a folder: no shapes."""
    config = ModelConfig(
        path="",
        family="",
        num_layers=0,
        embed_dim=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        mlp_dim=0,
        vocab_multiple=16,
        rope_theta=0.0,
        tie_embeddings=False,
        embed_init_std=0.0,
        param_dtype="float32",
        compute_dtype="float32",
        remat="none",
        logprob_chunk_tokens=1024,
    )
    return dataclasses.replace(config, **changes)


def random_params(spec: ModelSpec, seed: int = 0):
    """Weights on the host, without compiling an initialiser: norms 1, all else normal."""
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        if "norm" in jax.tree_util.keystr(path):
            return np.ones(leaf.shape, leaf.dtype)
        return rng.normal(0, spec.embed_init_std, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, shapes(spec))


def init(spec: ModelSpec, seed: int = 0, where=None):
    """Weights as `params.init` draws them, but NumPy's: its dozen initialisers need not be compiled.

    Args:
      where: `params.shardings(...)`; None: the default device.
    """
    return init_of(params.param_specs(spec), seed, where)


def init_of(specs, seed: int = 0, where=None):
    """`init`, of any tree of ArraySpecs."""
    rng = np.random.default_rng(seed)
    made = jax.tree.map(
        lambda array: (array.mean + array.std * rng.normal(size=array.shape)).astype(jax.numpy.dtype(array.dtype)),
        specs,
    )
    return jax.device_put(made, where)


def shapes(spec: ModelSpec):
    """The abstract weights, on no mesh."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), params.param_specs(spec))


def batch(b: int, t: int, r: int, vocab: int, seed: int = 0) -> dict[str, np.ndarray]:
    """b packed rows of two sequences and some padding, with r target positions each."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((b, t), np.int32)
    positions = np.zeros((b, t), np.int32)
    for row in range(b):
        first = int(rng.integers(2, t - 3))
        second = int(rng.integers(1, t - first))
        segments[row, :first], segments[row, first : first + second] = 1, 2
        positions[row, :first], positions[row, first : first + second] = np.arange(first), np.arange(second)
    return dict(
        tokens=rng.integers(0, vocab, (b, t)).astype(np.int32),
        positions=positions,
        segments=segments,
        head_positions=rng.integers(0, t, (b, r)).astype(np.int32),
        targets=rng.integers(0, vocab, (b, r)).astype(np.int32),
    )


def worst_relative(tree_a, tree_b) -> float:
    """Largest relative difference (in norm) between two arrays of the same place in two trees."""

    def one(a, b) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(one, tree_a, tree_b)))
