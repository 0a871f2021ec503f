"""Where arrays live: the mesh, and the table from logical axes to mesh axes.

Every array of the model names its axes ("vocab", "embed", "heads", ...); a `Rules` table says which mesh axis splits
each of them. `TRAIN` also splits "embed" over fsdp (parameters, gradients and optimiser state); `COMPUTE` does not:
it is the layout in which the trainer *uses* a layer's weights (one all-gather per layer) and in which the generation
engine keeps them. Rows (tokens, sequences, slots) are split over data and fsdp together.

Sharding is explicit: it is part of an array's type, so a layout mistake is an error at trace time, not a slow step.
The maths also runs with no mesh at all (tests, notebooks): `constrain` and `out` are then no-ops.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxagent.config import ConfigError, MeshConfig

ROWS = ("data", "fsdp")  # mesh axes that split batch rows, sequences and slots


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axis (None: not split)."""

    layers: str | None
    vocab: str | None
    embed: str | None
    heads: str | None
    kv_heads: str | None
    head_dim: str | None
    mlp: str | None
    rank: str | None = None  # of LoRA adapters

    def partition(self, axes: tuple[str, ...]) -> P:
        """The PartitionSpec of an array whose logical axes are `axes`."""
        return P(*(getattr(self, axis) for axis in axes))


COMPUTE = Rules(layers=None, vocab="tensor", embed=None, heads="tensor", kv_heads="tensor", head_dim=None, mlp="tensor")
TRAIN = dataclasses.replace(COMPUTE, embed="fsdp")


def make_mesh(mesh: MeshConfig) -> Mesh:
    """The mesh (data, fsdp, tensor) over the first `data * fsdp * tensor` devices, all axes Explicit.

    Raises:
      ConfigError: a size is not positive, or there are too few devices.
    """
    sizes = (mesh.data, mesh.fsdp, mesh.tensor)
    if min(sizes) < 1:
        raise ConfigError(f"config.mesh sizes must be positive, got data={sizes[0]} fsdp={sizes[1]} tensor={sizes[2]}.")
    needed, devices = sizes[0] * sizes[1] * sizes[2], jax.devices()
    if len(devices) < needed:
        raise ConfigError(f"config.mesh needs {needed} devices, this machine has {len(devices)}.")
    return jax.make_mesh(
        sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 3, devices=devices[:needed]
    )


def check_divisible(name: str, shape: tuple[int, ...], axes: tuple[str, ...], rules: Rules, mesh: Mesh) -> None:
    """Raises ConfigError when the mesh does not divide an array's axis, naming both."""
    for size, axis in zip(shape, axes, strict=True):
        mesh_axis = getattr(rules, axis)
        if mesh_axis and size % mesh.shape[mesh_axis]:
            raise ConfigError(
                f"config.mesh.{mesh_axis}={mesh.shape[mesh_axis]} does not divide the {size} {axis} of '{name}'."
            )


def in_mesh() -> bool:
    """True inside `jax.set_mesh(...)`."""
    return not jax.sharding.get_abstract_mesh().empty


def out(*axes: str | tuple[str, ...] | None) -> P | None:
    """`out_sharding` of an operation: P(*axes) inside a mesh, else None."""
    return P(*axes) if in_mesh() else None


def constrain(x: jax.Array, partition: P) -> jax.Array:
    """`x` laid out as `partition` (an all-gather or a slice where it is not yet); `x` itself without a mesh."""
    return jax.reshard(x, partition) if in_mesh() else x


def row_axes(x: jax.Array) -> str | tuple[str, ...] | None:
    """The mesh axes that split the leading axis of `x`, read from its type. Works on tracers."""
    spec = jax.typeof(x).sharding.spec
    return spec[0] if len(spec) else None


def row_shards(x: jax.Array) -> int:
    """Into how many parts the mesh splits the leading axis of `x`."""
    axes = row_axes(x)
    if axes is None:
        return 1
    sizes = jax.sharding.get_abstract_mesh().shape
    count = 1
    for axis in axes if isinstance(axes, tuple) else (axes,):
        count *= sizes[axis]
    return count


def split_rows(x: jax.Array, outer: int, inner: int) -> jax.Array:
    """[N, ...] -> [outer, inner, ...]; what splits N over the mesh splits `outer`, and nothing splits `inner`.

    The sharding is stated, not inferred: for mesh axes of size 1 inference may leave the name on the inner axis.
    """
    x = jnp.asarray(x)
    spec = jax.typeof(x).sharding.spec
    return x.reshape(outer, inner, *x.shape[1:], out_sharding=out(spec[0], None, *spec[1:]))


def merge_rows(x: jax.Array) -> jax.Array:
    """[outer, inner, ...] -> [outer * inner, ...], the inverse of `split_rows`."""
    spec = jax.typeof(x).sharding.spec
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:], out_sharding=out(spec[0], *spec[2:]))


def rows(mesh: Mesh, ndim: int) -> NamedSharding:
    """Sharding of an `ndim`-dimensional host array whose leading axis is rows."""
    return NamedSharding(mesh, P(ROWS, *(None,) * (ndim - 1)))
