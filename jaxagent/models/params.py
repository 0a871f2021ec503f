"""The parameter tree, and one declarative `ArraySpec` per array from which everything about it derives.

`param_specs(spec)` is the single place that says what an array is: shape, dtype, logical axes, initialiser, and how
it is stored in a Hugging Face checkpoint. From it come `init`, `shardings`, `abstract` (dry runs, restore targets)
and the import/export of `hf.py`. Arrays of all layers are stacked on a leading L axis, so that the forward is one scan.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from jaxagent.models.sharding import Rules, check_divisible
from jaxagent.models.spec import ModelSpec


@flax.struct.dataclass
class Layers:
    """Arrays of the decoder layers: stacked, with a leading L axis, or of one layer, without it.

    An array that the family does not have is None.
    """

    attn_norm: Any  # [L, E]
    wq: Any  # [L, E, H, D]
    wk: Any  # [L, E, K, D]
    wv: Any  # [L, E, K, D]
    bq: Any  # [L, H, D] or None
    bk: Any  # [L, K, D] or None
    bv: Any  # [L, K, D] or None
    q_norm: Any  # [L, D] or None
    k_norm: Any  # [L, D] or None
    wo: Any  # [L, H, D, E]
    mlp_norm: Any  # [L, E]
    w_gate: Any  # [L, E, F]
    w_up: Any  # [L, E, F]
    w_down: Any  # [L, F, E]


@flax.struct.dataclass
class Params:
    """One model. Leaves are arrays, or ArraySpecs, shardings, abstract arrays: the tree has one shape for all."""

    embed: Any  # [V, E]
    layers: Layers
    final_norm: Any  # [E]
    head: Any  # [V, E], or None when tied to `embed`


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """One array of the model, and how a Hugging Face checkpoint stores it. A pytree leaf.

    Each dimension of the stored tensor merges some dimensions of our (single-layer) array, in order. E.g. wq [E, H, D]
    is stored as `q_proj.weight` [H*D, E]: dims ((1, 2), (0,)). Only the vocabulary may be shorter there: not padded.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]  # logical axis of each dimension
    mean: float  # initialiser: normal(mean, std); std 0 = constant
    std: float
    hf_name: str  # with "{layer}" when stacked
    hf_dims: tuple[tuple[int, ...], ...]
    hf_shape: tuple[int, ...]

    @property
    def stacked(self) -> bool:
        """True when the leading axis is L."""
        return self.axes[0] == "layers"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def param_specs(spec: ModelSpec) -> Params:
    """The tree of `ArraySpec`s of a model."""
    e, h, k, d, f, v = (
        spec.embed_dim,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.mlp_dim,
        spec.padded_vocab_size,
    )

    def array(
        name: str,
        sizes: dict[str, int],
        dims: tuple[tuple[int, ...], ...],
        shape: tuple[int, ...],
        mean: float = 0.0,
        std: float = 0.0,
    ) -> ArraySpec:
        """An ArraySpec outside the layers."""
        return ArraySpec(tuple(sizes.values()), spec.param_dtype, tuple(sizes), mean, std, name, dims, shape)

    def layer(name: str, *args, **kwargs) -> ArraySpec:
        """An ArraySpec of the layers: with a leading axis L."""
        single = array("model.layers.{layer}." + name, *args, **kwargs)
        return dataclasses.replace(single, shape=(spec.num_layers, *single.shape), axes=("layers", *single.axes))

    def norm(name: str, axis: str, size: int) -> ArraySpec:
        return layer(name, {axis: size}, ((0,),), (size,), mean=1.0)

    def projection(name: str, axis: str, heads: int) -> ArraySpec:
        sizes = {"embed": e, axis: heads, "head_dim": d}
        return layer(f"self_attn.{name}_proj.weight", sizes, ((1, 2), (0,)), (heads * d, e), std=e**-0.5)

    def bias(name: str, axis: str, heads: int) -> ArraySpec | None:
        if not spec.qkv_bias:
            return None
        return layer(f"self_attn.{name}_proj.bias", {axis: heads, "head_dim": d}, ((0, 1),), (heads * d,))

    # Projections back into the residual stream start at the scale of the embeddings: a layer then adds to what a token
    # is without drowning it, and tied embeddings can be copied from the first steps on.
    branch = spec.embed_init_std
    layers = Layers(
        attn_norm=norm("input_layernorm.weight", "embed", e),
        wq=projection("q", "heads", h),
        wk=projection("k", "kv_heads", k),
        wv=projection("v", "kv_heads", k),
        bq=bias("q", "heads", h),
        bk=bias("k", "kv_heads", k),
        bv=bias("v", "kv_heads", k),
        q_norm=norm("self_attn.q_norm.weight", "head_dim", d) if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm.weight", "head_dim", d) if spec.qk_norm else None,
        wo=layer(
            "self_attn.o_proj.weight",
            {"heads": h, "head_dim": d, "embed": e},
            ((2,), (0, 1)),
            (e, h * d),
            std=branch * (h * d) ** -0.5,
        ),
        mlp_norm=norm("post_attention_layernorm.weight", "embed", e),
        w_gate=layer("mlp.gate_proj.weight", {"embed": e, "mlp": f}, ((1,), (0,)), (f, e), std=e**-0.5),
        w_up=layer("mlp.up_proj.weight", {"embed": e, "mlp": f}, ((1,), (0,)), (f, e), std=e**-0.5),
        w_down=layer("mlp.down_proj.weight", {"mlp": f, "embed": e}, ((1,), (0,)), (e, f), std=branch * f**-0.5),
    )
    rows = {"vocab": v, "embed": e}
    return Params(
        embed=array("model.embed_tokens.weight", rows, ((0,), (1,)), (spec.vocab_size, e), std=spec.embed_init_std),
        layers=layers,
        final_norm=array("model.norm.weight", {"embed": e}, ((0,),), (e,), mean=1.0),
        head=None
        if spec.tie_embeddings
        else array("lm_head.weight", rows, ((0,), (1,)), (spec.vocab_size, e), std=e**-0.5),
    )


def count(spec: ModelSpec) -> int:
    """Number of parameters, padded vocabulary rows included."""
    return sum(array.size for array in jax.tree.leaves(param_specs(spec)))


def shardings(spec: ModelSpec, mesh: Mesh, rules: Rules) -> Params:
    """The tree of NamedShardings.

    Raises:
      ConfigError: the mesh does not divide an array.
    """
    return shardings_of(param_specs(spec), mesh, rules)


def shardings_of(specs: Any, mesh: Mesh, rules: Rules) -> Any:
    """`shardings`, of any tree of ArraySpecs."""

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
    """Random parameters, made directly in their shardings.

    The numbers depend on the key and on each array's path only: not on the mesh (but for a last bit that a compiler
    may round otherwise), and not on which other arrays exist.

    Args:
      spec: the model.
      key: a typed key, `jax.random.key(seed)`.
      where: `shardings(...)`; None leaves everything on the default device.
    """
    return init_of(param_specs(spec), key, where)


def init_of(specs: Any, key: jax.Array, where: Any = None) -> Any:
    """`init`, of any tree of ArraySpecs."""

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
