"""The mesh a plan is compiled for: virtual CPU devices, or an NVIDIA chip's topology without the chip.

XLA compiles for a GPU it cannot see when told what the GPU is ("target config"). The facts below are from the
vendor's architecture papers; kernels are not tuned without a device, so temporary sizes stay approximate.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata

import jax
from jax.experimental import topologies
from jax.sharding import AxisType

from jaxagent.config import MeshConfig
from jaxagent.devices import count
from jaxagent.models import sharding


@dataclasses.dataclass(frozen=True)
class _Gpu:
    name: str
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    memory_bytes: int
    bandwidth: int  # bytes/s
    l2_bytes: int
    shared_bytes_per_core: int
    clock_ghz: float


_GPUS = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * 2**30, 2_039_000_000_000, 40 * 2**20, 164 * 2**10, 1.41),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * 2**30, 3_350_000_000_000, 50 * 2**20, 228 * 2**10, 1.98),
    "h200": _Gpu("NVIDIA H200", (9, 0), 132, 141 * 10**9, 4_800_000_000_000, 50 * 2**20, 228 * 2**10, 1.98),
}


def mesh_for(mesh: MeshConfig, chip: str) -> tuple[jax.sharding.Mesh, str]:
    """The mesh to compile on, and what it is made of: the chip's name or "virtual CPU devices"."""
    if chip in _GPUS and cuda_compiler_installed():
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(_GPUS[chip]), topology=f"1x1x{count(mesh)}"
        )
        made = topologies.make_mesh(topology, (mesh.data, mesh.fsdp, mesh.tensor), ("data", "fsdp", "tensor"))
        explicit = jax.sharding.Mesh(made.devices, made.axis_names, axis_types=(AxisType.Explicit,) * 3)
        return explicit, chip
    return sharding.make_mesh(mesh), "virtual CPU devices"


def cuda_compiler_installed() -> bool:
    """True where the CUDA plug-in of jax is installed (extra `cuda-plan` or `cuda`)."""
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    return bool(installed & {"jax-cuda12-plugin", "jax-cuda13-plugin"})


def target_config(gpu: _Gpu) -> str:
    """XLA's description of a GPU, as text of its protocol buffer."""
    major, minor = gpu.capability
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_block_optin": gpu.shared_bytes_per_core - 2**10,
        "shared_memory_per_core": gpu.shared_bytes_per_core,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "core_count": gpu.cores,
        "fpus_per_core": 128 if major >= 9 else 64,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": gpu.bandwidth,
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": gpu.memory_bytes,
    }
    fields = "\n".join(f"  {name}: {value}" for name, value in device.items())
    return (
        f"gpu_device_info {{\n{fields}\n  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 10 }}\n'
        f'device_description_str: "{gpu.name}"\n'
    )
