"""What a model computes besides attention, on NVIDIA GPUs in exact numerics: kernels that round the same everywhere.

XLA times several kernels for a matrix product, program by program, splits its sum and fuses what stands around it. So
one product is rounded in two ways in the engine's program and in the trainer's. Under `pinned` every matrix product,
norm and log-prob of the model is a Triton kernel whose tile and parts its weights' shape alone decides: a row is summed
in one order, whatever other rows there are. XLA fuses nothing into a kernel, so what is left to it (bias, rotation,
silu, residual sums) stands between the same neighbours in all programs: tests/models/test_gpu_programs.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from jaxagent.models import gpu_calls
from jaxagent.models.sharding import in_mesh

_ROWS = 64  # of a product's tile
# By bytes of a number: columns of a tile for many and for few columns, depth of a step, steps on their way at a time.
_TILES = {2: (64, 32, 128, 3), 4: (32, 32, 32, 3)}
_MANY_COLUMNS = 8192  # that fill a chip's some hundred processors with wide tiles
_PART = 2048  # terms of a sum of few columns that one program adds
_SUM_BLOCK = 1024  # numbers whose parts one program adds
_VOCABULARY = 4096  # logits that a program reads at a time

_is_pinned = contextvars.ContextVar("_is_pinned", default=False)


@contextlib.contextmanager
def pinned(on: bool) -> Iterator[None]:
    """While it is traced, the model's products, norms and log-probs are these kernels, if `on`."""
    before = _is_pinned.set(on)
    try:
        yield
    finally:
        _is_pinned.reset(before)


def are_pinned() -> bool:
    """Whether these kernels are to be used."""
    return _is_pinned.get()


def is_matrix_product(equation: str) -> bool:
    """Whether the summed axes stand last in x, and together at either end of w; `contract` takes no other equation."""
    in_x, in_w = equation.split("->")[0].split(",")
    summed = "".join(axis for axis in in_x if axis in in_w)
    return bool(summed) and in_x.endswith(summed) and (in_w.startswith(summed) or in_w.endswith(summed))


def contract(
    equation: str, x: jax.Array, weights: Sequence[jax.Array], dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, ...]:
    """einsum(equation, x, w) of each w in `dtype`, by one kernel; summed in float32, over devices, too."""
    in_x, in_w = equation.split("->")[0].split(",")
    count = sum(axis in in_w for axis in in_x)
    last = not in_w.startswith(in_x[-count:])
    rows, columns = slice(x.ndim - count), slice(-count) if last else slice(count, None)
    x_spec, *w_specs = (tuple(jax.typeof(a).sharding.spec) for a in (x, *weights))
    over = [axis for axis in x_spec[-count:] if axis is not None]
    split = any(jax.sharding.get_abstract_mesh().shape[axis] > 1 for axis in over)

    def local(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        depth = math.prod(x.shape[-count:])
        flat = [w.reshape(-1, depth) if last else w.reshape(depth, -1) for w in weights]
        sums = product(x.reshape(-1, depth), flat, last, jnp.float32 if split else dtype)
        sums = jax.lax.psum(sums, over).astype(dtype) if over else sums
        ends = list(itertools.accumulate(math.prod(w.shape[columns]) for w in weights))
        parts = zip(jnp.split(sums, ends[:-1], axis=1), weights, strict=True)
        return tuple(part.reshape(*x.shape[rows], *w.shape[columns]) for part, w in parts)

    outs = tuple(P(*x_spec[rows], *w_spec[columns]) for w_spec in w_specs)
    return _on_each_device(local, (P(*x_spec), *(P(*w_spec) for w_spec in w_specs)), outs)(x, *weights)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """As `layers.rms_norm`."""
    x_spec, scale_spec = (jax.typeof(a).sharding.spec for a in (x, scale))

    def local(x: jax.Array, scale: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        outputs, settings = ((rows.shape, x.dtype),), (("eps", eps),)
        normed = gpu_calls.call(rows, scale, kernel=_rms_norm, grid=(len(rows),), outputs=outputs, settings=settings)
        return normed[0].reshape(x.shape)

    return _on_each_device(local, (x_spec, scale_spec), x_spec)(x, scale)


def row_logprobs(scores: jax.Array, targets: jax.Array, temperature: jax.Array) -> jax.Array:
    """As `logprobs.row_logprobs`; call it on one device."""
    outputs = ((targets.shape, jnp.float32),)
    return gpu_calls.call(scores, targets, temperature, kernel=_row_logprobs, grid=targets.shape, outputs=outputs)[0]


def product(x: jax.Array, weights: Sequence[jax.Array], transposed: bool, dtype: jax.typing.DTypeLike) -> jax.Array:
    """[M, N1 + N2 + ..] in `dtype` of x[M, K] and each w[K, Ni], or w[Ni, K] where `transposed`; on one device."""
    (m, k), widths = x.shape, [w.shape[0 if transposed else 1] for w in weights]
    wide, narrow, depth, stages = _TILES[x.dtype.itemsize]
    columns, parts = (wide, 1) if sum(widths) >= _MANY_COLUMNS else (narrow, pl.cdiv(k, _PART))
    steps = pl.cdiv(k if parts == 1 else _PART, depth)
    # Programs of the same columns run side by side, so that their weights are read from memory once.
    sums = gpu_calls.call(
        x,
        *weights,
        kernel=_product,
        grid=(pl.cdiv(m, _ROWS), sum(pl.cdiv(width, columns) for width in widths), parts),
        outputs=(((parts, m, sum(widths)), dtype if parts == 1 else jnp.float32),),
        settings=(("columns", columns), ("depth", depth), ("steps", steps), ("transposed", transposed)),
        stages=stages,
    )[0].reshape(parts, -1)
    if parts > 1:
        grid, outputs = (pl.cdiv(sums.shape[1], _SUM_BLOCK),), ((sums.shape[1:], dtype),)
        sums = gpu_calls.call(sums, kernel=_product_sum, grid=grid, outputs=outputs)[0]
    return sums.reshape(m, -1)


def _on_each_device(local: Callable, specs: tuple, out: P | tuple[P, ...]) -> Callable:
    return jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False) if in_mesh() else local


def _load(ref, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """ref[rows, columns] for two ranges, 0 outside of the array."""
    rows, columns = rows[:, None], columns[None]
    inside = (rows < ref.shape[0]) & (columns < ref.shape[1])
    return gpu_calls.load(ref.at[rows, columns], inside, 0.0)


def _product(x_ref, *refs, columns: int, depth: int, steps: int, transposed: bool) -> None:
    """Program (tile of rows, tile of columns, part of K): a sum in steps of `depth`, from the first to the last."""
    weight_refs, out_ref = refs[:-1], refs[-1]
    rows = pl.program_id(0) * _ROWS + jnp.arange(_ROWS)
    tile, part = pl.program_id(1), pl.program_id(2)
    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    until = jnp.minimum((part + 1) * steps, pl.cdiv(x_ref.shape[1], depth))

    def add(w_ref, first_tile: jax.Array | int, first_column: int) -> None:
        own = (tile - first_tile) * columns + jnp.arange(columns)

        def step(i: jax.Array, total: jax.Array) -> jax.Array:
            summed = i * depth + jnp.arange(depth)
            x = _load(x_ref, rows, summed)
            w = _load(w_ref, own, summed) if transposed else _load(w_ref, summed, own)
            sums = jax.lax.dot_general(x, w, contracted, precision=precision, preferred_element_type=jnp.float32)
            return total + sums

        total = jax.lax.fori_loop(part * steps, until, step, jnp.zeros((_ROWS, columns), jnp.float32))
        inside = (rows < out_ref.shape[1])[:, None] & (own < w_ref.shape[0 if transposed else 1])[None]
        at = out_ref.at[part, rows[:, None], (first_column + own)[None]]
        gpu_calls.store(at, total.astype(out_ref.dtype), inside)

    first_tile = first_column = 0
    for w_ref in weight_refs:
        width = w_ref.shape[0 if transposed else 1]
        end = first_tile + pl.cdiv(width, columns)
        if len(weight_refs) == 1:
            add(w_ref, first_tile, first_column)
        else:
            pl.when((tile >= first_tile) & (tile < end))(functools.partial(add, w_ref, first_tile, first_column))
        first_tile, first_column = end, first_column + width


def _product_sum(parts_ref, out_ref) -> None:
    """Program (block of numbers): the first part, then the second, and so on."""
    at = pl.program_id(0) * _SUM_BLOCK + jnp.arange(_SUM_BLOCK)
    inside = at < parts_ref.shape[1]
    total = jnp.zeros((_SUM_BLOCK,), jnp.float32)
    for part in range(parts_ref.shape[0]):
        total += gpu_calls.load(parts_ref.at[part, at], inside, 0.0)
    gpu_calls.store(out_ref.at[at], total.astype(out_ref.dtype), inside)


def _rms_norm(x_ref, scale_ref, out_ref, *, eps: float) -> None:
    """Program (row)."""
    row, size = pl.program_id(0), x_ref.shape[1]
    column = jnp.arange(pl.next_power_of_2(size))
    inside = column < size
    x = gpu_calls.load(x_ref.at[row, column], inside, 0.0).astype(jnp.float32)
    scale = gpu_calls.load(scale_ref.at[column], inside, 0.0).astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.sum(x * x) / size + eps)
    gpu_calls.store(out_ref.at[row, column], (x * inverse * scale).astype(out_ref.dtype), inside)


def _row_logprobs(scores_ref, targets_ref, temperature_ref, out_ref) -> None:
    """Program (row): its largest logit, and then the sum of exponentials, block after block of the vocabulary."""
    row, vocabulary = pl.program_id(0), scores_ref.shape[1]
    temperature = temperature_ref[row]
    blocks = pl.cdiv(vocabulary, _VOCABULARY)

    def scaled(i: jax.Array) -> jax.Array:
        column = i * _VOCABULARY + jnp.arange(_VOCABULARY)
        return gpu_calls.load(scores_ref.at[row, column], column < vocabulary, -jnp.inf) / temperature

    first = jnp.full((_VOCABULARY,), -jnp.inf, jnp.float32)
    peak = jnp.max(jax.lax.fori_loop(0, blocks, lambda i, most: jnp.maximum(most, scaled(i)), first))
    add = lambda i, total: total + jnp.exp(scaled(i) - peak)  # noqa: E731
    total = jnp.sum(jax.lax.fori_loop(0, blocks, add, jnp.zeros((_VOCABULARY,), jnp.float32)))
    out_ref[row] = scores_ref[row, targets_ref[row]] / temperature - peak - jnp.log(total)
