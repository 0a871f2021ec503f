"""Data-sheet numbers of chips, per chip: what step times are estimated with.

Dense bf16 peak (no sparsity), HBM size and bandwidth, from the vendors' public data sheets. "cpu" is two cores of a
laptop, as measured with this project's own matrix products in float32.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator."""

    flops: float  # bf16 FLOP/s, dense
    memory_bytes: float
    bandwidth: float  # bytes/s of its memory
    # Fractions of the peak that well-tuned programs reach; assumptions, printed with every plan.
    train_mfu: float
    prefill_mfu: float
    decode_bandwidth_frac: float
    dispatch_s: float  # host time per decode dispatch that no data sheet knows
    platform: str = "cpu"  # as jax calls it


def _accelerator(platform: str, tflops: float, gigabytes: float, gigabytes_per_s: float) -> Chip:
    return Chip(tflops * 1e12, gigabytes * 1e9, gigabytes_per_s * 1e9, 0.40, 0.40, 0.50, 1e-3, platform)


CHIPS: dict[str, Chip] = {
    "cpu": Chip(0.2e12, 16e9, 20e9, 0.30, 0.30, 0.50, 1e-3),
    "a100": _accelerator("gpu", 312, 80, 2039),
    "h100": _accelerator("gpu", 989, 80, 3350),
    "h200": _accelerator("gpu", 989, 141, 4800),
    "v5e": _accelerator("tpu", 197, 16, 819),
    "v5p": _accelerator("tpu", 459, 95, 2765),
    "v6e": _accelerator("tpu", 918, 32, 1640),
}
