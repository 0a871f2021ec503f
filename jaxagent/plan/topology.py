"""The mesh a plan is compiled for: virtual CPU devices, or the topology of an NVIDIA chip or a TPU without the chip.

XLA compiles for a GPU it cannot see when told what the GPU is ("target config"). The facts below are from the
vendor's architecture papers; kernels are not tuned without a device, so temporary sizes stay approximate.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType

from jaxagent.config import ConfigError, MeshConfig
from jaxagent.models import sharding

# By chip: its name, and what XLA's description of it says beside what all have.
_GPUS = {
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * 2**30, 2_039_000_000_000, 40 * 2**20, 164 * 2**10, 1.41),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * 2**30, 3_350_000_000_000, 50 * 2**20, 228 * 2**10, 1.98),
    "h200": ("NVIDIA H200", (9, 0), 132, 141 * 10**9, 4_800_000_000_000, 50 * 2**20, 228 * 2**10, 1.98),
}
_SQUARES = ((1, 1), (2, 2), (4, 4), (8, 8), (16, 16))
_TPU_SLICES = {"v5e": _SQUARES, "v6e": _SQUARES, "v5p": ((2, 2, 1), (2, 2, 4), (4, 4, 4), (8, 8, 8))}


def mesh_for(mesh: MeshConfig, chip: str) -> tuple[jax.sharding.Mesh, str]:
    """The mesh to compile on, and what it is made of: the chip's name or "virtual CPU devices"."""
    if chip in _GPUS and cuda_compiler_installed():
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(chip), topology=f"1x1x{mesh.devices}"
        )
        device_mesh = topologies.make_mesh(topology, sharding.sizes_of(mesh), sharding.AXES)
        explicit = jax.sharding.Mesh(
            device_mesh.devices, device_mesh.axis_names, axis_types=(AxisType.Explicit,) * len(sharding.AXES)
        )
        return explicit, chip
    if chip in _TPU_SLICES and tpu_compiler_installed():
        return _tpu_mesh(mesh, chip), chip
    return sharding.make_mesh(mesh), "virtual CPU devices"


def _tpu_mesh(mesh: MeshConfig, chip: str) -> jax.sharding.Mesh:
    """The first devices of the smallest slice that holds the mesh.

    Raises:
      ConfigError: no slice is that large.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU host to ask
    shape = next((shape for shape in _TPU_SLICES[chip] if math.prod(shape) >= mesh.devices), None)
    if shape is None:
        raise ConfigError(f"config.mesh: {mesh.devices} devices are more than the largest {chip} slice known here.")
    topology = topologies.get_topology_desc(f"{chip}:{'x'.join(map(str, shape))}", platform="tpu")
    devices = np.array(topology.devices[: mesh.devices]).reshape(sharding.sizes_of(mesh))
    return jax.sharding.Mesh(devices, sharding.AXES, axis_types=(AxisType.Explicit,) * len(sharding.AXES))


def tpu_compiler_installed() -> bool:
    """True where libtpu is installed (extra `tpu`): it compiles on any Linux machine, with `JAX_PLATFORMS=cpu`."""
    return importlib.util.find_spec("libtpu") is not None


def cuda_compiler_installed() -> bool:
    """True where the CUDA plug-in of jax is installed (extra `cuda-plan` or `cuda`)."""
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    return bool(installed & {"jax-cuda12-plugin", "jax-cuda13-plugin"})


def target_config(chip: str) -> str:
    """XLA's description of a GPU, as text of its protocol buffer."""
    name, (major, minor), cores, memory_bytes, bandwidth, l2_bytes, shared_bytes, clock_ghz = _GPUS[chip]
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_block_optin": shared_bytes - 2**10,
        "shared_memory_per_core": shared_bytes,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "core_count": cores,  # streaming multiprocessors
        "fpus_per_core": 128 if major >= 9 else 64,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": bandwidth,  # bytes/s
        "l2_cache_size": l2_bytes,
        "clock_rate_ghz": clock_ghz,
        "device_memory_size": memory_bytes,
    }
    fields = "\n".join(f"  {field}: {value}" for field, value in device.items())
    return (
        f"gpu_device_info {{\n{fields}\n  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 10 }}\n'
        f'device_description_str: "{name}"\n'
    )
