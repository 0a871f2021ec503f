"""A mixture of experts: a router sends each token to few of many gated feed-forward blocks.

Rows are sorted by expert into tiles of a fixed number of rows, one expert to a tile, so that what a row gets does not
depend on how many others chose its expert. One code path serves training, the engine and exact scoring. The mesh's
axis `expert` splits rows around this block and experts inside it: its devices exchange their rows, each computes what
its own experts add to all of them, and each gets back what is added to its own. Tensor splits the inner dimension.

Axis letters: N rows, X experts, k experts per row, T tiles, R rows of a tile, E embed, F inner dimension of an expert.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxagent.models import gpu_kernels, kernels, sharding
from jaxagent.models.blocks import FlatRows, LayerBlock, State
from jaxagent.models.blocks.mlp import swiglu
from jaxagent.models.blocks.routing import Routing, route, weigh
from jaxagent.models.layers import LoraArray, contract, gain, rms_norm
from jaxagent.models.params import ArraySpec, Layers, block_norm, matrix, per_expert, vector
from jaxagent.models.sharding import EXPERT

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec

MOST_ROWS = 128  # of a tile
Matrix = jax.Array | LoraArray


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
        """Row by row, on the device that has the row; what experts add to it, on the devices that have them."""
        h = rms_norm(x, gain(layer.mlp_norm, spec), spec.norm_eps)
        added, state = self._of_chosen(layer, h, rows, state)
        if not self.shared:
            return added, state
        shared = swiglu(h, layer.shared_w_gate, layer.shared_w_up, layer.shared_w_down)
        if self.shared_gate:
            gate = jax.nn.sigmoid(contract("ne,eo->no", h, layer.shared_gate).astype(jnp.float32))
            shared = (shared.astype(jnp.float32) * gate).astype(x.dtype)
            shared = lax.optimization_barrier(shared)  # rounded, then added
        return added + shared, state

    def _of_chosen(self, layer: Layers, h: jax.Array, rows: FlatRows, state: State) -> tuple[jax.Array, State]:
        split = sharding.row_axes(h)
        by_rows = jax.P(split, None)
        decide = functools.partial(route, self.routing)
        if sharding.in_mesh():
            decide = jax.shard_map(decide, in_specs=(by_rows, jax.P(None, None), jax.P(None)), out_specs=by_rows)
        scores, chosen = decide(h, layer.router, layer.router_bias)
        if rows.choose is not None:
            chosen, state = rows.choose(state, scores, chosen)
        arrays = h, scores, chosen, layer.w_gate, layer.w_up, layer.w_down
        if not sharding.in_mesh():
            return self._mixture(*arrays), state
        specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arrays)
        rows_over = (split,) if isinstance(split, str) else split or ()
        over = dict.fromkeys((*rows_over, EXPERT, "tensor"))
        checked = not _is_grouped(h)  # tokamax's kernels do not say how their results vary

        def own(array: jax.Array, where: jax.P) -> jax.Array:
            """Varying over all axes: its gradients are summed along those that do not split it."""
            split = [axis for axes in where for axis in ((axes,) if isinstance(axes, str) else axes or ())]
            axes = tuple(axis for axis in over if axis not in split)
            return lax.pcast(array, axes, to="varying") if axes and checked else array

        def local(*arrays: Any) -> jax.Array:
            return lax.psum(self._mixture(*jax.tree.map(own, arrays, specs), over=rows_over), "tensor")

        return jax.shard_map(local, in_specs=specs, out_specs=by_rows, check_vma=checked)(*arrays), state

    def _mixture(
        self,
        h: jax.Array,
        scores: jax.Array,
        chosen: jax.Array,
        *matrices: Matrix,
        over: tuple[str, ...] | None = None,
    ) -> jax.Array:
        """[N, E]. `over`: inside a mesh, the axes that split rows; the matrices are those of the device's experts."""
        weights = weigh(self.routing, scores, chosen)
        exact, rows = kernels.are_exact(), len(h)
        if over is not None and EXPERT in over:
            h, weights, chosen = (lax.all_gather(a, EXPERT, tiled=True) for a in (h, weights, chosen))
        # In exact numerics tiles have the size that they have on one device with these rows.
        size = tile_rows(rows if exact else len(h), self.routing.active, self.routing.count)
        own = chosen if over is None else chosen - lax.axis_index(EXPERT) * _count(matrices)
        own = jnp.where((own >= 0) & (own < _count(matrices)), own, _count(matrices))
        if _is_grouped(h):
            added = _grouped(h, weights, *matrices, own)
        else:
            added = (_parts if exact else _experts)(size, h, weights, *matrices, own)
        if over is not None:
            add = functools.partial(lax.psum_scatter, tiled=True) if EXPERT in over else lax.psum
            added = add(added, EXPERT)
        return (_in_order(added) if exact else added).astype(h.dtype)

    @property
    def choices(self) -> tuple[int, int]:
        """The experts that a token goes to, of all."""
        return self.routing.active, self.routing.count

    def used(self, array: ArraySpec) -> float:
        """Of what each expert has, the part that is in the experts that a token goes to."""
        return self.routing.active / self.routing.count if array.axes[0] == "experts" else 1

    def params_read(self, spec: ModelSpec, rows: float, expert_shards: int = 1) -> float:
        """An expert is read if any row goes to it; with equal loads and rows that choose on their own."""
        share = self.routing.active / self.routing.count
        experts = sum(a.size for a in self.arrays(spec).values() if a and a.axes[0] == "experts")
        return self.matmul_params(spec) + experts * ((1 - (1 - share) ** rows) / expert_shards - share)


class _Tiles(NamedTuple):
    """Which rows lie in which tile."""

    slot: jax.Array  # i32[N, k], where in [T * R] the row lies for each of its experts; T * R where it lies nowhere
    entry: jax.Array  # i32[T, R], which of the N * k; N * k where nothing lies
    expert: jax.Array  # i32[T]
    used: jax.Array  # i32, tiles in which anything lies


def tile_rows(rows: int, active: int, experts: int) -> int:
    """R: a power of two near an expert's mean load, and no more rows than an expert can get."""
    mean = max(8, rows * active // experts)
    return min(MOST_ROWS, rows, 1 << (mean.bit_length() - 1))


def _count(matrices: Any) -> int:
    """X, of the experts that this device has."""
    return len(jax.tree.leaves(matrices)[0])


def _is_grouped(h: jax.Array) -> bool:
    return kernels.experts(kernels.platform(), str(h.dtype), kernels.are_exact()).name != "tiles"


def _grouped(
    h: jax.Array, weights: jax.Array, w_gate: Matrix, w_up: Matrix, w_down: Matrix, chosen: jax.Array
) -> jax.Array:
    """As `_experts`, by products that take the rows of all experts at once."""
    n, k = chosen.shape
    flat, count = chosen.reshape(-1), _count(w_gate)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    own = (flat[order] < count)[:, None]  # behind them nothing is computed, forward or backward

    def product(x: jax.Array, w: Matrix) -> jax.Array:
        if isinstance(w, LoraArray):
            return product(x, w.w) + w.scale * product(product(x, w.a), w.b)
        return jnp.where(own, gpu_kernels.grouped_product(x, w, sizes), 0)

    x = jnp.where(own, h[order // k], 0)
    hidden = jax.nn.silu(product(x, w_gate)) * product(x, w_up)
    added = product(hidden, w_down).astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    parts = jnp.zeros_like(x).at[order].set(added.astype(h.dtype))
    return _in_order(parts.reshape(n, k, -1))


def _tiles(chosen: jax.Array, experts: int, size: int) -> _Tiles:
    """Of entries that chose one of `experts`, numbered from 0; those that say `experts` lie in no tile."""
    n, k = chosen.shape
    entries = n * k
    most = min(entries, (entries + experts * (size - 1)) // size)
    flat, numbers = chosen.reshape(-1), jnp.arange(entries, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True)
    rows = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    tiles = -(-rows // size)
    ends = jnp.cumsum(tiles)
    shift = (ends - tiles) * size - (jnp.cumsum(rows) - rows)  # from the place among all sorted to the slot
    sorted_by = flat[order]
    at = jnp.where(sorted_by < experts, numbers + shift[jnp.minimum(sorted_by, experts - 1)], most * size)
    slot = jnp.zeros_like(flat).at[order].set(at)
    entry = jnp.full(most * size, entries, jnp.int32).at[slot].set(numbers, mode="drop")
    expert = jnp.searchsorted(ends, jnp.arange(most), side="right").astype(jnp.int32)
    return _Tiles(slot.reshape(n, k), entry.reshape(most, size), jnp.minimum(expert, experts - 1), ends[-1])


def _swiglu(x: jax.Array, weight: jax.Array, w_gate: Matrix, w_up: Matrix, w_down: Matrix) -> jax.Array:
    """One expert's part of what is added to rows x[R, E]; weight f32[R]."""
    hidden = jax.nn.silu(contract("re,ef->rf", x, w_gate)) * contract("re,ef->rf", x, w_up)
    return (contract("rf,fe->re", hidden, w_down).astype(jnp.float32) * weight[:, None]).astype(x.dtype)


def _parts(
    size: int, h: jax.Array, weights: jax.Array, w_gate: Matrix, w_up: Matrix, w_down: Matrix, chosen: jax.Array
) -> jax.Array:
    """What each of its experts adds to each row, [N, k, E]; 0 of an expert that another device has. As `_experts`."""
    tiles = _tiles(chosen, _count(w_gate), size)

    def step(t: jax.Array, out: jax.Array) -> jax.Array:
        x, weight = _rows_at(tiles.entry[t], h, weights)
        added = _swiglu(x, weight, *_at((w_gate, w_up, w_down), tiles.expert[t]))
        return lax.dynamic_update_slice_in_dim(out, added, t * size, 0)

    out = lax.fori_loop(0, tiles.used, step, jnp.zeros_like(h, h.dtype, shape=(tiles.entry.size, h.shape[1])))
    return out.at[tiles.slot].get(mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(
    size: int, h: jax.Array, weights: jax.Array, w_gate: Matrix, w_up: Matrix, w_down: Matrix, chosen: jax.Array
) -> jax.Array:
    """What is added to each row, f32[N, E]. Its own derivative, since loops run over the tiles that are used alone.

    Args:
      size: R.
      h: [N, E]; weights f32[N, k].
      w_gate, w_up, w_down: [X, E, F] twice and [X, F, E].
      chosen: i32[N, k], ascending in each row but for those that say X: another device's.
    """
    return _in_order(_parts(size, h, weights, w_gate, w_up, w_down, chosen))


def _experts_forward(size: int, *args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _experts(size, *args), args


def _experts_backward(size: int, args: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
    """The inner dimension is computed again; the gradients of the experts are summed in float32.

    A matrix with an adapter is frozen: only the adapter gets one.
    """
    h, weights, *matrices, chosen = args
    tiles = _tiles(chosen, _count(matrices), size)
    gradient = gradient.astype(h.dtype)
    trained = [(w.a, w.b) if isinstance(w, LoraArray) else w for w in matrices]

    def step(t: jax.Array, carry: tuple) -> tuple:
        of_rows, of_weights, totals = carry
        x, weight = _rows_at(tiles.entry[t], h, weights)
        above, _ = _rows_at(tiles.entry[t], gradient, weights)
        expert = tiles.expert[t]
        frozen = _at(matrices, expert)

        def part(x: jax.Array, weight: jax.Array, trained: list[Any]) -> jax.Array:
            return _swiglu(x, weight, *map(_with, frozen, trained))

        _, pull = jax.vjp(part, x, weight, _at(trained, expert))
        of_x, of_weight, parts = pull(above)
        return (
            lax.dynamic_update_slice_in_dim(of_rows, of_x, t * size, 0),
            lax.dynamic_update_slice_in_dim(of_weights, of_weight, t * size, 0),
            jax.tree.map(lambda total, part: total.at[expert].add(part), totals, parts),
        )

    slots = tiles.entry.size
    start = (
        jnp.zeros_like(h, h.dtype, shape=(slots, h.shape[1])),
        jnp.zeros_like(h, jnp.float32, shape=(slots,)),
        jax.tree.map(lambda w: jnp.zeros_like(h, jnp.float32, shape=w.shape), trained),
    )
    of_rows, of_weights, totals = lax.fori_loop(0, tiles.used, step, start)
    totals = jax.tree.map(lambda total, w: total.astype(w.dtype), totals, trained)
    of_matrices = [_with(jax.tree.map(jnp.zeros_like, w), total) for w, total in zip(matrices, totals, strict=True)]
    of_rows, of_weights = (a.at[tiles.slot].get(mode="fill", fill_value=0) for a in (of_rows, of_weights))
    return _in_order(of_rows).astype(h.dtype), of_weights, *of_matrices, None


_experts.defvjp(_experts_forward, _experts_backward)


def _at(matrices: Any, expert: jax.Array) -> Any:
    return jax.tree.map(lambda w: w[expert], matrices)


def _with(matrix: Matrix, trained: Any) -> Matrix:
    """The matrix with what is trained in its place, or in its adapter's."""
    return matrix.replace(a=trained[0], b=trained[1]) if isinstance(matrix, LoraArray) else trained


def _rows_at(entry: jax.Array, rows: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows [R, E] of a tile and their weights f32[R]; zeros where nothing lies."""
    x = rows.at[entry // weights.shape[1]].get(mode="fill", fill_value=0)
    return x, weights.reshape(-1).at[entry].get(mode="fill", fill_value=0)


def _in_order(parts: jax.Array) -> jax.Array:
    """f32[N, E]: the parts [N, k, E] of each row, added in the order of its experts."""
    return sum(parts[:, i].astype(jnp.float32) for i in range(parts.shape[1]))
