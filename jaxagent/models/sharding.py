"""Where arrays live: the mesh, and the table from logical axes to mesh axes.

Every array of the model names its axes ("vocab", "embed", "heads", ...); a `Rules` table says which mesh axis splits
each of them. `TRAIN` also splits "embed" over fsdp and context (parameters, gradients and optimiser state); `COMPUTE`
does not: it is the layout in which the trainer *uses* a layer's weights (one all-gather per layer) and in which the
generation engine keeps them. Rows (sequences) are split over data, fsdp and expert together; the trainer splits the
tokens of a row over context (context.py), and the engine's slots and pages are split over all four. Matrices of experts
are split over expert in both layouts, and all other parameters in training, as over fsdp.

Sharding is explicit: it is part of an array's type, so a layout mistake is an error at trace time, not a slow step.
The maths also runs with no mesh at all (tests, notebooks): `constrain` and `out` are then no-ops.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxagent.config import ConfigError, MeshConfig

EXPERT = "expert"  # the mesh axis that splits experts, and rows outside of their block (blocks/experts.py)
ROWS = ("data", "fsdp", EXPERT)  # mesh axes that split batch rows
CONTEXT = "context"  # the mesh axis that splits what lies in a row
FLAT = (*ROWS, CONTEXT)  # mesh axes that split the flat tokens of all rows, and the engine's slots
AXES = ("data", "fsdp", CONTEXT, EXPERT, "tensor")  # of the mesh; of the last ones devices are neighbours


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axis (None: not split)."""

    layers: str | None
    vocab: str | None
    embed: str | tuple[str, ...] | None
    heads: str | None
    kv_heads: str | None
    head_dim: str | None
    mlp: str | None
    rank: str | None = None  # of LoRA adapters
    latent: str | None = None  # the few dimensions through which latent attention's projections go
    experts: str | None = EXPERT  # matrices of which each expert has one
    expert: str | None = None  # what a router says of each expert
    gate: str | None = None
    channel: str | None = None  # of a delta net

    def partition(self, axes: tuple[str, ...]) -> P:
        """The PartitionSpec of an array whose logical axes are `axes`."""
        return P(*(own[0] if len(own) == 1 else own or None for own in self.over(axes)))

    def over(self, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The mesh axes that split each axis of an array; one that splits its experts splits nothing else of it."""
        chosen = [getattr(self, axis) or () for axis in axes]
        chosen = [(own,) if isinstance(own, str) else own for own in chosen]
        if self.experts is None or "experts" not in axes:
            return chosen
        return [
            own if axis == "experts" else tuple(a for a in own if a != self.experts)
            for axis, own in zip(axes, chosen, strict=True)
        ]


COMPUTE = Rules(layers=None, vocab="tensor", embed=None, heads="tensor", kv_heads="tensor", head_dim=None, mlp="tensor")
TRAIN = dataclasses.replace(COMPUTE, embed=("fsdp", EXPERT, CONTEXT))


def make_mesh(mesh: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh (data, fsdp, context, expert, tensor), all axes Explicit.

    Args:
      mesh: its sizes.
      devices: the mesh takes the first ones; None = those of all processes, of each equally many, process by process:
        so the rows' axes lie across processes, and `tensor` inside one where its size divides a process's devices.

    Raises:
      ConfigError: a size is not positive, or there are too few devices.
    """
    sizes = sizes_of(mesh)
    if min(sizes) < 1:
        got = " ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
        raise ConfigError(f"config.mesh sizes must be positive, got {got}.")
    needed = math.prod(sizes)
    devices = of_every_process(needed) if devices is None else devices
    if len(devices) < needed:
        raise ConfigError(f"config.mesh needs {needed} devices, this machine has {len(devices)}.")
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=devices[:needed])


def sizes_of(mesh: MeshConfig) -> tuple[int, ...]:
    """The size of each of `AXES`."""
    return mesh.data, mesh.fsdp, mesh.context, mesh.expert, mesh.tensor


def of_every_process(needed: int) -> list[jax.Device]:
    """The first devices of every process, equally many of each, `needed` together or fewer where there are fewer.

    Raises:
      ConfigError: the processes cannot share them evenly.
    """
    processes = jax.process_count()
    if needed % processes:
        raise ConfigError(f"config.mesh has {needed} devices: {processes} trainer processes cannot share them evenly.")
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    return [device for _, own in sorted(by_process.items()) for device in own[: needed // processes]]


def check_divisible(name: str, shape: tuple[int, ...], axes: tuple[str, ...], rules: Rules, mesh: Mesh) -> None:
    """Raises ConfigError when the mesh does not divide an array's axis, naming both."""
    for size, axis, over in zip(shape, axes, rules.over(axes), strict=True):
        split = [a for a in over if mesh.shape[a] > 1]
        if size % math.prod(mesh.shape[a] for a in split):
            sizes = " x ".join(f"config.mesh.{a}={mesh.shape[a]}" for a in split)
            raise ConfigError(f"{sizes} does not divide the {size} {axis} of '{name}'.")


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


def over_context(x: jax.Array) -> jax.Array:
    """`x` [rows, places, ...] with the places split over context; `x` itself where context splits nothing."""
    if not in_mesh() or jax.sharding.get_abstract_mesh().shape.get(CONTEXT, 1) == 1:
        return x
    return jax.reshard(x, P(ROWS, CONTEXT, *(None,) * (x.ndim - 2)))


def is_over_context(x: jax.Array) -> bool:
    """Whether context splits the places of `x` [rows, places, ...], by its type."""
    spec = jax.typeof(x).sharding.spec
    return len(spec) > 1 and spec[1] == CONTEXT


def whole_rows(x: jax.Array) -> jax.Array:
    """The inverse of `over_context`: every device of the context axis gets all places."""
    return jax.reshard(x, P(ROWS, *(None,) * (x.ndim - 1))) if is_over_context(x) else x


def merge_places(x: jax.Array) -> jax.Array:
    """[rows, places, ...] -> [rows * places, ...]: row after row, on each device those parts that it has."""
    x = jnp.asarray(x)
    if not is_over_context(x):
        return merge_rows(x)
    rest = (None,) * (x.ndim - 2)
    local = lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:])  # noqa: E731
    return jax.shard_map(local, in_specs=P(ROWS, CONTEXT, *rest), out_specs=P(FLAT, *rest))(x)


def split_places(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `merge_places`: [rows * places, ...] -> [rows, places, ...], both laid out as those of `like`."""
    (count, places), rest = like.shape[:2], (None,) * (x.ndim - 1)
    if not is_over_context(like):
        return x.reshape(count, places, *x.shape[1:], out_sharding=out(row_axes(like), None, *rest))
    own = places // jax.sharding.get_abstract_mesh().shape[CONTEXT]
    local = lambda a: a.reshape(len(a) // own, own, *a.shape[1:])  # noqa: E731
    mapped = jax.shard_map(local, in_specs=P(FLAT, *rest), out_specs=P(ROWS, CONTEXT, *rest))
    return mapped(jax.reshard(x, P(FLAT, *rest)))


def tile_at(tiles: jax.Array, i: jax.Array) -> jax.Array:
    """tiles[i], split as the tiles' other axes are: from jax 0.11 on, indexing forgets it for an axis of length one."""
    return jax.reshard(tiles[i], P(*jax.typeof(tiles).sharding.spec[1:]))


def rows(mesh: Mesh, ndim: int) -> NamedSharding:
    """Sharding of an `ndim`-dimensional host array whose leading axis is rows."""
    return NamedSharding(mesh, P(ROWS, *(None,) * (ndim - 1)))
