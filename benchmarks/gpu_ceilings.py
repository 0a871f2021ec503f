"""What one accelerator can do at best: bytes a second of a copy, FLOP/s of a bfloat16 product.

    python -m benchmarks.gpu_ceilings [--gib=4] [--size=8192]

Random data (a chip that multiplies zeros draws less power and runs faster), and twenty calls in a row between two looks
at the clock, so that the host's share of a call is not in them. The last line is JSON: `copy_gb_per_s` (bytes read and
written), `product_tflops`. The other GPU benchmarks measure both again, in their own process, unless they are given
the numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxagent.models import kernels

CALLS = 20
ROUNDS = 3


def seconds_per_call(call: Callable[[], jax.Array]) -> float:
    """Seconds of one of `CALLS` calls in a row, best of `ROUNDS`; the first call compiles and is not counted."""
    jax.block_until_ready(call())
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        results = [call() for _ in range(CALLS)]
        jax.block_until_ready(results[-1])
        best = min(best, (time.perf_counter() - started) / CALLS)
    return best


def copy_bandwidth(gib: float) -> float:
    """Bytes per second that a copy of random bits reads and writes. Each call overwrites the array before it."""
    x = jax.random.bits(jax.random.key(0), (int(gib * 2**30) // 4,), jnp.uint32)
    flip = jax.jit(lambda x: ~x, donate_argnums=0)

    def call() -> jax.Array:
        nonlocal x
        x = flip(x)
        return x

    size = x.nbytes
    return 2 * size / seconds_per_call(call)


def product_flops(size: int) -> float:
    """FLOP/s of the bfloat16 product of two random square matrices."""
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in jax.random.split(jax.random.key(1)))
    dot = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.bfloat16))
    return 2 * size**3 / seconds_per_call(lambda: dot(a, b))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The ceilings that a benchmark may be given instead of measuring them."""
    parser.add_argument("--copy_gb_per_s", type=float, default=0.0, help="measured before; 0 = measure now")
    parser.add_argument("--product_tflops", type=float, default=0.0, help="measured before; 0 = measure now")
    parser.add_argument("--gib", type=float, default=4.0, help="of the copy")
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the product's matrices")


def add_products(parser: argparse.ArgumentParser) -> None:
    """What multiplies matrices in exact numerics."""
    parser.add_argument("--products", choices=("kernels", "xla"), default="kernels", help="in exact numerics on a GPU")


def choose_products(args: argparse.Namespace) -> None:
    """Takes XLA's products in exact numerics, too, where the command asks for them. Before anything is traced."""
    if args.products == "xla":
        kernels.products = lambda on, exact: kernels.Choice("xla", "--products=xla")


def bandwidth_of(args: argparse.Namespace) -> float:
    """Bytes per second of a copy, given or measured."""
    return args.copy_gb_per_s * 1e9 or copy_bandwidth(args.gib)


def flops_of(args: argparse.Namespace) -> float:
    """FLOP/s of a product, given or measured."""
    return args.product_tflops * 1e12 or product_flops(args.size)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    result = {
        "device": jax.devices()[0].device_kind,
        "copy_gb_per_s": round(bandwidth_of(args) / 1e9, 1),
        "product_tflops": round(flops_of(args) / 1e12, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
