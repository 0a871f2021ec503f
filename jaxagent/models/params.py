"""The parameter tree, and one declarative `ArraySpec` per array from which everything about it derives.

`param_specs(spec)` says what every array is: shape, dtype, logical axes, initialiser, and how a Hugging Face checkpoint
stores it; of the layers' arrays their blocks say so (blocks/). From it come `init`, `shardings`, `abstract` (dry runs,
restore targets) and the import/export of `hf.py`. Arrays of all layers of a kind are stacked on a leading L axis, so
that the forward is one scan.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import GetAttrKey

from jaxagent.models.sharding import Rules, check_divisible

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec


WIDE = (
    "router_bias",
    "a_log",
)  # arrays of `Layers` that are float32 in whatever dtype the others are stored, used and sent


class Layers(types.SimpleNamespace):
    """Arrays of one kind of layer by name: stacked, with a leading L axis, or of one layer, without it. A pytree.

    Which ones there are its blocks say (`LayerBlock.arrays`), in this order; one that a family does not have is None.
    """

    def replace(self, **arrays: Any) -> Layers:
        """The same with other arrays, under names that are there."""
        return Layers(**vars(self) | arrays)


jax.tree_util.register_pytree_with_keys(
    Layers,
    lambda layers: ([(GetAttrKey(name), array) for name, array in vars(layers).items()], tuple(vars(layers))),
    lambda names, arrays: Layers(**dict(zip(names, arrays, strict=True))),
)


@flax.struct.dataclass
class Params:
    """One model. Leaves are arrays, or ArraySpecs, shardings, abstract arrays: the tree has one shape for all."""

    embed: Any  # [V, E]
    layers: Any  # `Layers` stacked; of several stacks a list of these; or a tuple of single layers
    final_norm: Any  # [E]
    head: Any  # [V, E], or None when tied to `embed`


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """One array of the model, and how a Hugging Face checkpoint stores it. A pytree leaf.

    Each dimension of the stored tensor merges some dimensions of our (single-layer, single-expert) array, in order.
    E.g. wq [E, H, D] is stored as `q_proj.weight` [H*D, E]: dims ((1, 2), (0,)). Only the vocabulary may be shorter
    there: not padded.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]  # logical axis of each dimension
    mean: float  # initialiser: normal(mean, std); std 0 = constant
    std: float
    hf_name: str  # with "{layer}" when stacked, and "{expert}" when each expert has one
    hf_dims: tuple[tuple[int, ...], ...]
    hf_shape: tuple[int, ...]
    layers: range = range(0)  # of a stack: the numbers of the layers that lie in it
    wide: bool = False  # one of `WIDE`

    @property
    def stacked(self) -> bool:
        """True when the leading axis is L."""
        return self.axes[0] == "layers"

    @property
    def stacks(self) -> int:
        """How many leading axes number stored tensors: layers, and of a mixture its experts."""
        return len(self.shape) - sum(map(len, self.hf_dims))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def dtype_among(self, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
        """Its own where the model's other arrays have this one."""
        return "float32" if self.wide else dtype

    @property
    def hf_names(self) -> list[str]:
        """The stored tensors, one per layer of a stack, or one per layer and expert."""
        experts = range(self.shape[1]) if self.stacks == 2 else (0,)
        numbers = itertools.product(self.layers, experts) if self.stacked else [(0, 0)]
        return [self.hf_name.format(layer=layer, expert=expert) for layer, expert in numbers]

    @property
    def summed(self) -> tuple[int, ...]:
        """Of a matrix the axes that a product with it sums over, its inputs; () of a norm or bias."""
        return tuple(axis + self.stacks for axis in self.hf_dims[-1]) if len(self.hf_dims) == 2 else ()

    @property
    def projects(self) -> bool:
        """Whether it is a matrix that may be rounded, and have an adapter: no router, which decides, and no gate."""
        return bool(self.summed) and self.axes[-1] not in ("expert", "gate")


def vector(name: str, sizes: dict[str, int], mean: float = 0.0) -> ArraySpec:
    """A norm or bias of a block, stored flat; `sizes` by logical axis. `param_specs` adds its dtype and the layers."""
    shape = tuple(sizes.values())
    return ArraySpec(shape, "", tuple(sizes), mean, 0.0, name, (tuple(range(len(shape))),), (math.prod(shape),))


def block_norm(spec: ModelSpec, name: str, behind: bool) -> ArraySpec:
    """The RMSNorm before a block; or behind it, where its gain says how much a layer adds (`LayerBlock.arrays`)."""
    gain = spec.embed_init_std if behind else 1.0
    return vector(f"{name}_layernorm.weight", {"embed": spec.embed_dim}, gain - spec.zero_centred_norms)


def matrix(name: str, inputs: dict[str, int], outputs: dict[str, int], std: float) -> ArraySpec:
    """A projection: [inputs.., outputs..] here, stored as [outputs, inputs]. As `vector`."""
    sizes, split = inputs | outputs, len(inputs)
    dims = tuple(range(split, len(sizes))), tuple(range(split))
    stored = math.prod(outputs.values()), math.prod(inputs.values())
    return ArraySpec(tuple(sizes.values()), "", tuple(sizes), 0.0, std, name, dims, stored)


def per_expert(array: ArraySpec, experts: int) -> ArraySpec:
    """An array that each expert has, [X, ..]; its name has "{expert}" in it."""
    return dataclasses.replace(array, shape=(experts, *array.shape), axes=("experts", *array.axes))


def stacked(array: ArraySpec, layers: range, dtype: str, prefix: str) -> ArraySpec:
    """The stack of an array of these layers, whose name has "{layer}" in it once `prefix` stands before it."""
    shape, axes, name = (len(layers), *array.shape), ("layers", *array.axes), prefix + array.hf_name
    return dataclasses.replace(array, shape=shape, axes=axes, dtype=dtype, hf_name=name, layers=layers)


@functools.lru_cache(maxsize=64)
def param_specs(spec: ModelSpec) -> Params:
    """The tree of `ArraySpec`s of a model. Shared: change nothing in it."""

    def stack_of(layers: range) -> Layers:
        arrays = {name: array for block in spec.pattern[layers[0]] for name, array in block.arrays(spec).items()}
        where = layers, spec.param_dtype, "model.layers.{layer}."
        stacks = {name: array and stacked(array, *where) for name, array in arrays.items()}
        wide = {name: dataclasses.replace(a, wide=True, dtype="float32") for name in WIDE if (a := stacks.get(name))}
        return Layers(**stacks | wide)

    def table(name: str, std: float) -> ArraySpec:
        sizes = {"vocab": spec.padded_vocab_size, "embed": spec.embed_dim}
        stored = spec.vocab_size, spec.embed_dim
        return ArraySpec(tuple(sizes.values()), spec.param_dtype, tuple(sizes), 0.0, std, name, ((0,), (1,)), stored)

    stacks = [stack_of(layers) for layers in spec.stacks]
    final_norm = vector("model.norm.weight", {"embed": spec.embed_dim}, mean=1.0 - spec.zero_centred_norms)
    return Params(
        embed=table("model.embed_tokens.weight", spec.embed_init_std),
        layers=stacks if len(stacks) > 1 else stacks[0],
        final_norm=dataclasses.replace(final_norm, dtype=spec.param_dtype),
        head=None if spec.tie_embeddings else table("lm_head.weight", spec.embed_dim**-0.5),
    )


def stacks_of(layers: Any) -> list[Any]:
    """All stacks, of `Params.layers` that are stacked."""
    return layers if isinstance(layers, list) else [layers]


def in_order(depths: Sequence[int]) -> list[tuple[int, int]]:
    """Of each layer the number of its stack and its place there, from the depths of all; see `ModelSpec.stacks`."""
    alone = sum(depth < depths[-1] for depth in depths)
    repeated = [(stack, i) for i in range(depths[-1]) for stack in range(alone, len(depths))]
    return [(stack, 0) for stack in range(alone)] + repeated


def unstack(
    layers: Any, take: Callable[[Layers, int], Layers] = lambda stack, i: jax.tree.map(lambda w: w[i], stack)
) -> tuple[Layers, ...]:
    """The stacked layers as a tuple of single layers. `hidden` takes either; a decode loop slices once, outside."""
    if isinstance(layers, tuple):
        return layers
    stacks = stacks_of(layers)
    return tuple(take(stacks[stack], i) for stack, i in in_order([len(jax.tree.leaves(s)[0]) for s in stacks]))


def count(spec: ModelSpec) -> int:
    """Number of parameters, padded vocabulary rows included."""
    return sum(array.size for array in jax.tree.leaves(param_specs(spec)))


def shardings(spec: ModelSpec, mesh: Mesh, rules: Rules) -> Params:
    """`shardings_of` the model."""
    return shardings_of(param_specs(spec), mesh, rules)


def shardings_of(specs: Any, mesh: Mesh, rules: Rules) -> Any:
    """The NamedShardings of any tree of ArraySpecs.

    Raises:
      ConfigError: the mesh does not divide an array.
    """

    def sharding_of(path, array: ArraySpec) -> NamedSharding:
        check_divisible(jax.tree_util.keystr(path, simple=True, separator="."), array.shape, array.axes, rules, mesh)
        return NamedSharding(mesh, rules.partition(array.axes))

    return jax.tree_util.tree_map_with_path(sharding_of, specs)


def abstract(spec: ModelSpec, mesh: Mesh, rules: Rules) -> Params:
    """The tree of `jax.ShapeDtypeStruct`s with shardings: for dry runs and as restore target. Allocates nothing."""
    return abstract_of(param_specs(spec), mesh, rules)


def abstract_of(specs: Any, mesh: Mesh, rules: Rules) -> Any:
    """`abstract`, of any tree of ArraySpecs."""
    return jax.tree.map(
        lambda array, where: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where),
        specs,
        shardings_of(specs, mesh, rules),
    )


def init(spec: ModelSpec, key: jax.Array, where: Params | None = None) -> Params:
    """`init_of` the model."""
    return init_of(param_specs(spec), key, where)


def init_of(specs: Any, key: jax.Array, where: Any = None) -> Any:
    """Random arrays of any tree of ArraySpecs, made directly in their shardings.

    The numbers depend on the key and on each array's path only: not on the mesh (but for a last bit that a compiler
    may round otherwise), and not on which other arrays exist.

    Args:
      key: a typed key, `jax.random.key(seed)`.
      where: `shardings_of(...)`; None leaves everything on the default device.
    """
    arrays, tree = jax.tree_util.tree_flatten_with_path(specs)
    places = [None] * len(arrays) if where is None else jax.tree.leaves(where)
    leaves = []
    for (path, array), place in zip(arrays, places, strict=True):
        own = jax.random.key_data(jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode())))
        initialise = _initialiser(array.shape, jnp.dtype(array.dtype), array.mean, array.std, place)
        # NumPy's, which every process of a mesh has alike; inside a program of the caller's the key has no numbers yet.
        leaves.append(initialise(own if isinstance(own, Tracer) else np.asarray(own)))
    return jax.tree.unflatten(tree, leaves)


@functools.lru_cache(maxsize=256)
def _initialiser(
    shape: tuple[int, ...], dtype: jnp.dtype, mean: float, std: float, where: NamedSharding | None
) -> Callable[[np.ndarray | jax.Array], jax.Array]:
    """The data of a key -> one array. A program of its own: arrays and models of one shape, and all seeds, share it."""

    def initialise(data: jax.Array) -> jax.Array:
        if std == 0.0:
            return jnp.full(shape, mean, dtype)
        normal = jax.random.normal(jax.random.wrap_key_data(data), shape, jnp.float32)
        return (mean + std * normal).astype(dtype)

    return jax.jit(initialise, out_shardings=where)
