"""Matrices as int8 with a float32 scale per output channel, multiplied out where they are used.

The layout is that of qwix's `QArray`: `qvalue` and a `scale` of the same rank. Nothing else of that package would be
used here, so these few lines do without it.
"""

from __future__ import annotations

import chex
import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Int8Array:
    """One matrix, qvalue * scale; stands where the model expects an array that it casts before use."""

    qvalue: jax.Array  # i8, the matrix's shape
    scale: jax.Array  # f32, the same rank, 1 along the axes that are summed over

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
