"""One call of a kernel of ours on an NVIDIA GPU: the file that knows which back end of Pallas compiles them.

Triton's rather than Mosaic GPU, although jax has announced its end: XLA compiles its kernels down to machine code
without a GPU (tests/models/test_gpu_programs.py; Mosaic's only where the GPU is), and they can be interpreted. In a jax
without it `AVAILABLE` is False, and plain code runs (kernels.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton
except ImportError:  # a jax that has dropped it
    triton = None

AVAILABLE = triton is not None
_WARPS = 4  # of a program


def load(ref: Any, mask: jax.Array, other: float) -> jax.Array:
    """The numbers at `ref`, an array's `.at[...]`, where `mask` is True, and `other` elsewhere."""
    return triton.load(ref, mask=mask, other=other)


def store(ref: Any, numbers: jax.Array, mask: jax.Array) -> None:
    """Writes numbers to `ref`, an array's `.at[...]`, where `mask` is True."""
    triton.store(ref, numbers, mask=mask)


# Compiled as a function of its own, so that a kernel that every layer calls is traced and lowered once.
@functools.partial(
    jax.jit, static_argnames=("kernel", "grid", "outputs", "settings", "stages", "in_place", "interpret")
)
def call(
    *arguments: jax.Array,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    outputs: tuple[tuple[tuple[int, ...], Any], ...],
    settings: tuple[tuple[str, Any], ...] = (),
    stages: int = 1,
    in_place: tuple[tuple[int, int], ...] = (),
    interpret: bool = False,
) -> list[jax.Array]:
    """Runs `kernel(*arguments' refs, *outputs' refs, **settings)` in every program of `grid`, on one device.

    Args:
      arguments: arrays, which the kernel indexes itself.
      kernel: its name in a profile is its own.
      grid: programs along up to three axes; those of the first axis run side by side.
      outputs: shape and dtype of each.
      settings: static.
      stages: steps of a loop whose numbers are on their way at a time.
      in_place: (argument, output) that are the same memory.
      interpret: runs it without a GPU, for tests.
    """
    unblocked, vma = pl.BlockSpec(memory_space=pl.ANY), jax.typeof(arguments[0]).manual_axis_type
    return pl.pallas_call(
        functools.partial(kernel, **dict(settings)),
        grid=grid,
        in_specs=[unblocked] * len(arguments),
        out_specs=[unblocked] * len(outputs),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=vma) for shape, dtype in outputs],
        input_output_aliases=dict(in_place),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=stages),
        interpret=interpret,
        name=kernel.__name__.lstrip("_"),
    )(*arguments)
