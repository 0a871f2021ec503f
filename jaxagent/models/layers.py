"""The small maths every layer is made of: matrix products, RMSNorm, and what attention to pages has in common.

All take and return flat rows [N, ...]. Reductions and norms are float32 whatever the compute dtype. Where the model
expects a matrix, a frozen one with a low-rank adapter beside it may stand, a `LoraArray`: `contract` applies it without
ever making the sum, x W + scale (x A) B; `product` makes it, W + scale A B. Or a rounded one, an `Int8Array`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import chex
import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxagent.models import gpu_products, sharding

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec

KEPT = "attention"  # name, for policies of rematerialisation, of what attention's backward pass reads
TERMS = 8  # of a matrix's sum that are added while it is read and written once


@flax.struct.dataclass
class Adapter:
    """The trained arrays of one projection. Inputs and outputs have one axis or two, as in the matrix (heads apart)."""

    a: jax.Array  # [L, inputs.., r]
    b: jax.Array  # [L, r, outputs..]


@flax.struct.dataclass
class LoraArray:
    """w + scale * a b, not multiplied out. Each array may have leading axes that number matrices: layers, experts."""

    w: jax.Array  # [.., inputs.., outputs..]
    a: jax.Array  # [.., inputs.., r]
    b: jax.Array  # [.., r, outputs..]
    scale: float = flax.struct.field(pytree_node=False)

    @property
    def stacks(self) -> int:
        """How many leading axes number matrices."""
        return self.a.ndim + self.b.ndim - self.w.ndim - 2

    def laid_out(self, dtype: str, where: P) -> LoraArray:
        """The array of one layer, cast and laid out for use; `where` is the layout of the matrix."""
        stacks, inputs = self.stacks, self.a.ndim - 1

        def place(x: jax.Array, where: P) -> jax.Array:
            return sharding.constrain(x.astype(dtype), where)

        return self.replace(
            w=place(self.w, where),
            a=place(self.a, P(*where[:inputs], None)),
            b=place(self.b, P(*where[:stacks], None, *where[inputs:])),
        )


@flax.struct.dataclass
class Int8Array:
    """qvalue * scale, a matrix with one scale per output channel; it is multiplied out by the cast before its use."""

    qvalue: jax.Array  # i8, the matrix's shape
    scale: jax.Array  # f32, the same rank, 1 along the axes that a product sums over

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The matrix itself."""
        return (self.qvalue.astype(jnp.float32) * self.scale).astype(dtype)

    def after(self, x: jax.Array) -> Int8Array:
        """The array, multiplied out no sooner than `x` is computed: adds a zero that the compiler cannot see.

        Otherwise XLA multiplies all layers out ahead of the loops that use them, and all of them are in memory at once.
        (An optimisation barrier does not keep XLA:CPU from it.)
        """
        zero = jnp.minimum(jnp.max(jnp.abs(x)), 0).astype(jnp.int8)
        return self.replace(qvalue=self.qvalue + zero)


def quantise(weights: jax.Array, summed: int | tuple[int, ...]) -> Int8Array:
    """Rounds to whole multiples of 1/127 of the largest weight of each output channel; `summed` are the other axes."""
    chex.assert_type(weights, float)
    wide = weights.astype(jnp.float32)
    peak = jnp.max(jnp.abs(wide), axis=summed, keepdims=True)
    scale = jnp.where(peak > 0, peak / 127, 1.0)
    return Int8Array(jnp.round(wide / scale).astype(jnp.int8), scale)


def beside(equation: str) -> tuple[str, str]:
    """The two products of an adapter: for "nhd,hde->ne" (the matrix's), "nhd,hdr->nr" and "nr,re->ne"."""
    operands, result = equation.split("->")
    x, w = operands.split(",")
    summed = "".join(letter for letter in w if letter in x)
    rest = "".join(letter for letter in x if letter not in summed)
    rank = next(letter for letter in "rqz" if letter not in equation)
    return f"{x},{summed}{rank}->{rest}{rank}", f"{rest}{rank},{rank}{w.removeprefix(summed)}->{result}"


def product(array: LoraArray, dtype: str) -> jax.Array:
    """The stacked matrices multiplied out, summed in float32 and then cast; in the layout of `array.w`.

    Every element is summed by itself, in the order of the rank. A matrix product's bits depend on the shape of what a
    device holds, and on what an autotuner chose; these do not. So processes on different meshes that have the same
    base and adapters make the same weights (runs/fleet/engine_weights.py). It is a small part of an update's work.
    """
    stacks, before, outputs = array.stacks, array.a.ndim, array.b.ndim - array.stacks - 1
    a = jnp.expand_dims(jnp.moveaxis(array.a.astype(jnp.float32), -1, 0), tuple(range(before, before + outputs)))
    b = jnp.expand_dims(jnp.moveaxis(array.b.astype(jnp.float32), stacks, 0), tuple(range(1 + stacks, before)))

    def add(total: jax.Array, terms: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        for a_term, b_term in zip(*terms, strict=True):
            total = total + a_term * b_term
        return total, None

    total, _ = jax.lax.scan(add, jnp.zeros_like(array.w, jnp.float32), (_in_passes(a), _in_passes(b)))
    return (array.w.astype(jnp.float32) + array.scale * total).astype(dtype)


def _in_passes(x: jax.Array) -> jax.Array:
    """[r, ...] -> [passes, TERMS, ...], with zeros at the end, which add nothing."""
    more = -len(x) % TERMS
    padded = jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)])
    return padded.reshape(-1, TERMS, *x.shape[1:])


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
    pinned = gpu_products.are_pinned()
    if pinned and gpu_products.is_matrix_product(equation):
        return gpu_products.contract(equation, x, [w], dtype or x.dtype)[0]
    x, w = lax.optimization_barrier((x, w)) if pinned else (x, w)  # nothing fused in, so one kernel for one shape
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    y = jnp.einsum(equation, x, w, precision=precision, preferred_element_type=dtype or x.dtype, out_sharding=out)
    return lax.optimization_barrier(y) if pinned else y


def contract_each(equation: str, x: jax.Array, *weights: jax.Array | LoraArray) -> tuple[jax.Array, ...]:
    """`contract` of the same rows with each of several matrices."""
    if gpu_products.are_pinned() and not any(isinstance(w, LoraArray) for w in weights):
        return gpu_products.contract(equation, x, weights, x.dtype)
    return tuple(contract(equation, x, w) for w in weights)


@jax.named_scope("norm")
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the axes of `scale`, the last ones, in float32, returned in the dtype of `x`.

    See Zhang and Sennrich, Root Mean Square Layer Normalization (https://arxiv.org/abs/1910.07467).
    """
    axes = tuple(range(x.ndim - scale.ndim, x.ndim))
    chex.assert_shape(scale, tuple(x.shape[axis] for axis in axes))
    chex.assert_type([x, scale], float)
    if gpu_products.are_pinned():
        return gpu_products.rms_norm(x, scale, eps)
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + eps)
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


def gain(stored: jax.Array, spec: ModelSpec) -> jax.Array:
    """What an RMSNorm of the model multiplies with."""
    return 1.0 + stored.astype(jnp.float32) if spec.zero_centred_norms else stored


# A finite stand-in for -inf: a row with nothing to see then gives a mean of values instead of NaN.
MASKED = -1e30


def cut(
    keys: jax.Array, values: jax.Array, block: jax.Array, start: jax.Array, page_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The page of each sequence that begins at any token of a block.

    Args:
      keys, values: [B, K, D, C] and [B, K, C, D].
      block, start: i32[m].
      page_tokens: of a page.

    Returns:
      [m, K, D, page_tokens] and [m, K, page_tokens, D]. A start too near the end of its block is moved back.
    """
    chex.assert_rank([keys, values, block, start], [4, 4, 1, 1])
    chex.assert_equal_shape([block, start])
    chex.assert_type([block, start], int)
    _, kv_heads, head_dim, _ = keys.shape

    def page_of(block: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        page = jax.lax.dynamic_slice(keys, (block, 0, 0, start), (1, kv_heads, head_dim, page_tokens))
        value = jax.lax.dynamic_slice(values, (block, 0, start, 0), (1, kv_heads, page_tokens, head_dim))
        return page[0], value[0]

    return jax.vmap(page_of)(block, start)
