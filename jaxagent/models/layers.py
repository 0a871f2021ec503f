"""The small maths every layer is made of: matrix products, RMSNorm, SwiGLU.

All take and return flat rows [N, ...]. Reductions and norms are float32 whatever the compute dtype.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxagent.models.lora_array import LoraArray, beside


def contract(equation: str, x: jax.Array, w: jax.Array | LoraArray, out: P | None = None, dtype=None) -> jax.Array:
    """einsum(equation, x, w) in the dtype of `x`; `out` is needed when the contracted axis is sharded.

    float32 operands are multiplied in true float32: accelerators would otherwise round them to TF32 or bfloat16.
    `dtype` asks for a wider result than the operands (logits).
    With a `LoraArray` for `w`, its adapter is applied beside it.
    """
    if isinstance(w, LoraArray):
        down, up = beside(equation)
        low = contract(down, x, w.a, out, dtype)
        return contract(equation, x, w.w, out, dtype) + w.scale * contract(up, low, w.b, out, dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(equation, x, w, precision=precision, preferred_element_type=dtype or x.dtype, out_sharding=out)


@jax.named_scope("norm")
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis, in float32, returned in the dtype of `x`.

    See Zhang and Sennrich, Root Mean Square Layer Normalization (https://arxiv.org/abs/1910.07467).
    """
    chex.assert_shape(scale, x.shape[-1:])
    chex.assert_type([x, scale], float)
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


def swiglu(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, out: P | None) -> jax.Array:
    """(silu(x w_gate) * (x w_up)) w_down for x[N, E]. See Shazeer (https://arxiv.org/abs/2002.05202)."""
    gate = jax.nn.silu(contract("ne,ef->nf", x, w_gate))
    return contract("nf,fe->ne", gate * contract("ne,ef->nf", x, w_up), w_down, out)
