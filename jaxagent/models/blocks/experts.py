"""A mixture of experts: a router sends each token to few of many gated feed-forward blocks.

Rows are sorted by expert into tiles of a fixed number of rows, one expert to a tile, so that what a row gets does not
depend on how many others chose its expert. One code path serves training, the engine and exact scoring. Each device
handles its own rows; of the experts it has all, their inner dimension split over tensor. (An axis of the mesh that
splits experts would exchange rows in `apply`, before they are sorted and after they are summed.)

Axis letters: N rows, X experts, k experts per row, T tiles, R rows of a tile, E embed, F inner dimension of an expert.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxagent.models import sharding
from jaxagent.models.blocks import FlatRows, LayerBlock, State
from jaxagent.models.blocks.mlp import swiglu
from jaxagent.models.blocks.routing import Routing, route
from jaxagent.models.layers import contract, gain, rms_norm
from jaxagent.models.params import ArraySpec, Layers, block_norm, matrix, per_expert, vector

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec

MOST_ROWS = 128  # of a tile
MATRICES = ("w_gate", "w_up", "w_down")


@dataclasses.dataclass(frozen=True)
class Experts(LayerBlock):
    """Sum over the chosen experts of weight * swiglu_expert(h), h = rms_norm(x), as Qwen3-MoE has it.

    Which experts a row goes to, and what they weigh, `Routing` says. See Shazeer et al.
    (https://arxiv.org/abs/1701.06538).
    """

    routing: Routing = dataclasses.field(default_factory=Routing)
    mlp_dim: int = 0  # of one expert; 0: `ModelSpec.mlp_dim` of all active ones together
    shared: int = 0  # more experts, which every row goes to, side by side as one
    shared_dim: int = 0  # of one of them; 0: as that of the others
    shared_gate: bool = False  # it weighs what a sigmoid says of the row, and not 1

    def width(self, spec: ModelSpec) -> int:
        """F."""
        return self.mlp_dim or max(1, spec.mlp_dim // self.routing.active)

    def shared_width(self, spec: ModelSpec) -> int:
        """F of the shared experts together."""
        return self.shared * (self.shared_dim or self.width(spec))

    def arrays(self, spec: ModelSpec) -> dict[str, ArraySpec | None]:
        """The norm, the router, and the projections of all experts."""
        embed, mlp = {"embed": spec.embed_dim}, {"mlp": self.width(spec)}

        shared = {"mlp": self.shared_width(spec)}

        def projection(part: str, inputs: dict[str, int], outputs: dict[str, int], std: float) -> ArraySpec:
            return matrix(f"mlp.{part}_proj.weight", inputs, outputs, std)

        def each(name: str, *where: Any) -> ArraySpec:
            return per_expert(projection(f"experts.{{expert}}.{name}", *where), self.routing.count)

        def of_shared(name: str, *where: Any) -> ArraySpec | None:
            return projection(f"{beside}.{name}", *where) if self.shared else None

        beside = "shared_expert" if self.shared_gate else "shared_experts"  # checkpoints with a gate have one
        into, out = spec.embed_dim**-0.5, spec.embed_init_std
        return {
            "mlp_norm": block_norm(spec, "post_attention", behind=False),
            "router": matrix("mlp.gate.weight", embed, {"expert": self.routing.count}, into),
            "router_bias": vector("mlp.gate.e_score_correction_bias", {"expert": self.routing.count})
            if self.routing.bias
            else None,
            "w_gate": each("gate", embed, mlp, into),
            "w_up": each("up", embed, mlp, into),
            "w_down": each("down", mlp, embed, out * self.width(spec) ** -0.5),
            "shared_w_gate": of_shared("gate", embed, shared, into),
            "shared_w_up": of_shared("up", embed, shared, into),
            "shared_w_down": of_shared("down", shared, embed, out * max(1, self.shared_width(spec)) ** -0.5),
            "shared_gate": matrix("mlp.shared_expert_gate.weight", embed, {"gate": 1}, into)
            if self.shared_gate
            else None,
        }

    def apply(
        self, layer: Layers, spec: ModelSpec, x: jax.Array, rows: FlatRows, state: State
    ) -> tuple[jax.Array, State]:
        """Row by row, on the device that has the row."""
        h = rms_norm(x, gain(layer.mlp_norm, spec), spec.norm_eps)
        added = self._of_chosen(layer, h)
        if not self.shared:
            return added, state
        shared = swiglu(h, layer.shared_w_gate, layer.shared_w_up, layer.shared_w_down)
        if self.shared_gate:
            gate = jax.nn.sigmoid(contract("ne,eo->no", h, layer.shared_gate).astype(jnp.float32))
            shared = lax.optimization_barrier(
                (shared.astype(jnp.float32) * gate).astype(x.dtype)
            )  # rounded, then added
        return added + shared, state

    def _of_chosen(self, layer: Layers, h: jax.Array) -> jax.Array:
        arrays = layer.router, layer.router_bias, layer.w_gate, layer.w_up, layer.w_down
        if not sharding.in_mesh():
            return self._mixture(h, *arrays)
        split = sharding.row_axes(h)
        rows_over = (split,) if isinstance(split, str) else split or ()

        def own(array: jax.Array | None, *axes: str) -> jax.Array | None:  # the gradients of all along them are summed
            return lax.pcast(array, axes, to="varying") if axes and array is not None else array

        def local(h: jax.Array, router: jax.Array, bias: jax.Array | None, *matrices: jax.Array) -> jax.Array:
            matrices = [own(array, *rows_over) for array in matrices]
            router, bias = (own(array, *rows_over, "tensor") for array in (router, bias))
            return lax.psum(self._mixture(own(h, "tensor"), router, bias, *matrices), "tensor")

        wide, narrow = jax.P(None, None, "tensor"), jax.P(None, "tensor", None)
        layout, by_rows = (jax.P(None, None), jax.P(None), wide, wide, narrow), jax.P(split, None)
        return jax.shard_map(local, in_specs=(by_rows, *layout), out_specs=by_rows)(h, *arrays)

    def _mixture(self, h: jax.Array, router: jax.Array, bias: jax.Array | None, *matrices: jax.Array) -> jax.Array:
        weights, chosen = route(self.routing, h, router, bias)
        return _experts(h, weights, *matrices, chosen)

    def matmul_params(self, spec: ModelSpec) -> float:
        """Of all but the experts that a token does not go to."""
        experts = sum(self.arrays(spec)[name].size for name in MATRICES)
        return super().matmul_params(spec) - experts * (1 - self.routing.active / self.routing.count)


class _Tiles(NamedTuple):
    """Which rows lie in which tile."""

    slot: jax.Array  # i32[N, k], where in [T * R] the row lies for each of its experts
    entry: jax.Array  # i32[T, R], which of the N * k; N * k where nothing lies
    expert: jax.Array  # i32[T]
    used: jax.Array  # i32, tiles in which anything lies


def tile_rows(rows: int, active: int, experts: int) -> int:
    """R: a power of two near an expert's mean load, and no more rows than an expert can get."""
    mean = max(8, rows * active // experts)
    return min(MOST_ROWS, rows, 1 << (mean.bit_length() - 1))


def _tiles(chosen: jax.Array, experts: int) -> _Tiles:
    n, k = chosen.shape
    entries, size = n * k, tile_rows(n, k, experts)
    most = min(entries, (entries + experts * (size - 1)) // size)
    flat, numbers = chosen.reshape(-1), jnp.arange(entries, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True)
    rows = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    tiles = -(-rows // size)
    ends = jnp.cumsum(tiles)
    shift = (ends - tiles) * size - (jnp.cumsum(rows) - rows)  # from the place among all sorted to the slot
    slot = jnp.zeros_like(flat).at[order].set(numbers + shift[flat[order]])
    entry = jnp.full(most * size, entries, jnp.int32).at[slot].set(numbers)
    expert = jnp.searchsorted(ends, jnp.arange(most), side="right").astype(jnp.int32)
    return _Tiles(slot.reshape(n, k), entry.reshape(most, size), jnp.minimum(expert, experts - 1), ends[-1])


def _swiglu(x: jax.Array, weight: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """One expert's part of what is added to rows x[R, E]; weight f32[R]."""
    hidden = jax.nn.silu(contract("re,ef->rf", x, w_gate)) * contract("re,ef->rf", x, w_up)
    return (contract("rf,fe->re", hidden, w_down).astype(jnp.float32) * weight[:, None]).astype(x.dtype)


@jax.custom_vjp
def _experts(
    h: jax.Array, weights: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, chosen: jax.Array
) -> jax.Array:
    """What is added to each row, [N, E]. Its own derivative, since loops run over the tiles that are used alone.

    Args:
      h: [N, E]; weights f32[N, k].
      w_gate, w_up, w_down: [X, E, F] twice and [X, F, E].
      chosen: i32[N, k], ascending in each row.
    """
    tiles = _tiles(chosen, len(w_gate))
    size = tiles.entry.shape[1]

    def step(t: jax.Array, out: jax.Array) -> jax.Array:
        x, weight = _rows_at(tiles.entry[t], h, weights)
        added = _swiglu(x, weight, *(w[tiles.expert[t]] for w in (w_gate, w_up, w_down)))
        return lax.dynamic_update_slice_in_dim(out, added, t * size, 0)

    out = lax.fori_loop(0, tiles.used, step, jnp.zeros_like(h, h.dtype, shape=(tiles.entry.size, h.shape[1])))
    return _sum_of_slots(out, tiles.slot)


def _experts_forward(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _experts(*args), args


def _experts_backward(args: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    """The inner dimension is computed again; the gradients of the experts are summed in float32."""
    h, weights, *matrices, chosen = args
    tiles = _tiles(chosen, len(matrices[0]))
    size = tiles.entry.shape[1]

    def step(t: jax.Array, carry: tuple) -> tuple:
        of_rows, of_weights, of_matrices = carry
        x, weight = _rows_at(tiles.entry[t], h, weights)
        above, _ = _rows_at(tiles.entry[t], gradient, weights)
        expert = tiles.expert[t]
        _, pull = jax.vjp(_swiglu, x, weight, *(w[expert] for w in matrices))
        of_x, of_weight, *parts = pull(above)
        return (
            lax.dynamic_update_slice_in_dim(of_rows, of_x, t * size, 0),
            lax.dynamic_update_slice_in_dim(of_weights, of_weight, t * size, 0),
            [total.at[expert].add(part) for total, part in zip(of_matrices, parts, strict=True)],
        )

    slots = tiles.entry.size
    of_matrices = [jnp.zeros_like(h, jnp.float32, shape=w.shape) for w in matrices]
    start = (
        jnp.zeros_like(h, h.dtype, shape=(slots, h.shape[1])),
        jnp.zeros_like(h, jnp.float32, shape=(slots,)),
        of_matrices,
    )
    of_rows, of_weights, of_matrices = lax.fori_loop(0, tiles.used, step, start)
    of_matrices = (total.astype(w.dtype) for total, w in zip(of_matrices, matrices, strict=True))
    return _sum_of_slots(of_rows, tiles.slot), of_weights[tiles.slot], *of_matrices, None


_experts.defvjp(_experts_forward, _experts_backward)


def _rows_at(entry: jax.Array, rows: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows [R, E] of a tile and their weights f32[R]; zeros where nothing lies."""
    x = rows.at[entry // weights.shape[1]].get(mode="fill", fill_value=0)
    return x, weights.reshape(-1).at[entry].get(mode="fill", fill_value=0)


def _sum_of_slots(out: jax.Array, slot: jax.Array) -> jax.Array:
    """[N, E]: the parts of each row, from [T * R, E], added in the order of its experts."""
    return sum(out[slot[:, i]].astype(jnp.float32) for i in range(slot.shape[1])).astype(out.dtype)
