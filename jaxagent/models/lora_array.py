"""A frozen matrix with a low-rank adapter beside it, standing where the model expects a matrix.

`layers.contract` applies it without ever making the sum: x W + scale (x A) B. `product` makes it: W + scale A B.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxagent.models import sharding

TERMS = 8  # of a matrix's sum that are added while it is read and written once


@flax.struct.dataclass
class Adapter:
    """The trained arrays of one projection. Inputs and outputs have one axis or two, as in the matrix (heads apart)."""

    a: jax.Array  # [L, inputs.., r]
    b: jax.Array  # [L, r, outputs..]


@flax.struct.dataclass
class LoraArray:
    """w + scale * a b, not multiplied out: stacked, with a leading L axis on each array, or of one layer."""

    w: jax.Array  # [L, inputs.., outputs..]
    a: jax.Array  # [L, inputs.., r]
    b: jax.Array  # [L, r, outputs..]
    scale: float = flax.struct.field(pytree_node=False)

    def laid_out(self, dtype: str, where: P) -> LoraArray:
        """The array of one layer, cast and laid out for use; `where` is the layout of the matrix."""
        inputs = self.a.ndim - 1

        def place(x: jax.Array, where: P) -> jax.Array:
            return sharding.constrain(x.astype(dtype), where)

        return self.replace(
            w=place(self.w, where), a=place(self.a, P(*where[:inputs], None)), b=place(self.b, P(None, *where[inputs:]))
        )


def beside(equation: str) -> tuple[str, str]:
    """The two products of an adapter: for "nhd,hde->ne" (the matrix's), "nhd,hdr->nr" and "nr,re->ne"."""
    operands, result = equation.split("->")
    x, w = operands.split(",")
    summed = "".join(letter for letter in w if letter in x)
    kept = "".join(letter for letter in x if letter not in summed)
    return f"{x},{summed}r->{kept}r", f"{kept}r,r{w.removeprefix(summed)}->{result}"


def product(array: LoraArray, dtype: str) -> jax.Array:
    """The stacked matrices multiplied out, summed in float32 and then cast; in the layout of `array.w`.

    Every element is summed by itself, in the order of the rank. A matrix product's bits depend on the shape of what a
    device holds, and on what an autotuner chose; these do not. So processes on different meshes that have the same
    base and adapters make the same weights (runs/fleet/engine_weights.py). It is a small part of an update's work.
    """
    inputs, outputs = array.a.ndim - 2, array.b.ndim - 2
    a = jnp.expand_dims(
        jnp.moveaxis(array.a.astype(jnp.float32), -1, 0), tuple(range(2 + inputs, 2 + inputs + outputs))
    )
    b = jnp.expand_dims(jnp.moveaxis(array.b.astype(jnp.float32), 1, 0), tuple(range(2, 2 + inputs)))

    def add(total: jax.Array, terms: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        for one, other in zip(*terms, strict=True):
            total = total + one * other
        return total, None

    total, _ = jax.lax.scan(add, jnp.zeros_like(array.w, jnp.float32), (_in_passes(a), _in_passes(b)))
    return (array.w.astype(jnp.float32) + array.scale * total).astype(dtype)


def _in_passes(x: jax.Array) -> jax.Array:
    """[r, ...] -> [passes, TERMS, ...], with zeros at the end, which add nothing."""
    more = -len(x) % TERMS
    padded = jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)])
    return padded.reshape(-1, TERMS, *x.shape[1:])
