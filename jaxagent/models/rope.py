"""Rotary position embeddings: frequencies per dimension pair, and the rotation itself.

Positions in, turned q and k out. Frequencies are computed once in NumPy float32, the precision transformers uses.
See Su et al., RoFormer (https://arxiv.org/abs/2104.09864).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec, RopeScaling


def frequencies(spec: ModelSpec) -> np.ndarray:
    """Radians per position of each pair of dimensions that turns, scaling included. f32[R/2], R = `spec.rotary_dim`."""
    d = spec.rotary_dim
    plain = (1.0 / spec.rope_theta ** (np.arange(0, d, 2, dtype=np.float32) / np.float32(d))).astype(np.float32)
    scaling = spec.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return (plain / np.float32(scaling.factor)).astype(np.float32)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, scaling, spec.rope_theta, d)


@jax.named_scope("rope")
def table(spec: ModelSpec, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of the angles of each row: f32[N, R/2] each, from positions i32[N]."""
    chex.assert_rank(positions, 1)
    chex.assert_type(positions, int)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies(spec))[None, :]
    scale = spec.rope_scaling.attention_factor if spec.rope_scaling else 1.0
    # Behind a barrier: XLA would rather compute them again for every head of every layer (a CPU spends a fifteenth of
    # a small model's train step on that).
    return jax.lax.optimization_barrier((jnp.cos(angles) * scale, jnp.sin(angles) * scale))


@jax.named_scope("rope")
def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns dimension pairs (i, i + R/2) of x[N, H, D] by the angles whose cos and sin are f32[N, R/2].

    Dimensions from R on stay as they are.
    """
    chex.assert_rank([x, cos, sin], [3, 2, 2])
    chex.assert_equal_shape([cos, sin])
    chex.assert_equal_shape_prefix([x, cos], 1)
    chex.assert_type([x, cos, sin], float)
    half = cos.shape[1]
    chex.assert_axis_dimension_gteq(x, 2, 2 * half)
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(x.dtype)


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, between them a linear blend. f32[R/2]."""
    original = scaling.original_max_position
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * plain / scaling.factor + blend * plain).astype(np.float32)


def _yarn(plain: np.ndarray, scaling: RopeScaling, theta: float, d: int) -> np.ndarray:
    """Interpolates dimensions that turn slowly, keeps those that turn fast. f32[R/2].

    See Peng et al., YaRN (https://arxiv.org/abs/2309.00071), section 3.2.
    """

    def dimension_of(turns: float) -> float:
        return d * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001  # as published: avoids a division by zero
    interpolated = np.clip((np.arange(d // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    return (plain / scaling.factor * interpolated + plain * (1 - interpolated)).astype(np.float32)


def yarn_attention_factor(factor: float, rope: Mapping[str, Any]) -> float:
    """The scale of cos and sin that a config's YaRN section means, explicit or derived from its factor."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return mscale(1.0)
