"""What a process sets up before jax works: devices for the mesh, memory pages, the folder of compiled programs.

On a machine without accelerators a mesh of N devices runs on N virtual CPU devices, through the same code as on
N chips. jax fixes the number of CPU devices when it first touches them, so this runs before everything else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path

from jaxagent.config import ConfigError, MeshConfig

MOST_COMPILED_BYTES = 4 * 2**30  # of the folder of compiled programs; the least recently used go first
LEAST_COMPILE_S = 0.2  # what compiles faster is not worth a file


def count(mesh: MeshConfig) -> int:
    """Number of devices the mesh uses."""
    return mesh.data * mesh.fsdp * mesh.tensor


def provide(mesh: MeshConfig) -> None:
    """Makes `count(mesh)` devices available, virtual ones where the machine has no accelerator.

    Raises:
      ConfigError: the machine has accelerators, but fewer than the mesh needs.
    """
    import jax

    _split_cpu(count(mesh))
    found = jax.devices()
    if len(found) < count(mesh):
        raise ConfigError(
            f"config.mesh needs {count(mesh)} devices (data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}), "
            f"this machine has {len(found)} ({found[0].platform})."
        )


def use_huge_pages() -> None:
    """Starts the process again, once, with an allocator that asks Linux for huge pages. Call before importing jax.

    XLA's CPU back end takes the scratch memory of every call anew from malloc, so that a small model's train step
    spends a quarter of its time on page faults (80,000 of them; 1,200 with huge pages). glibc reads the setting when
    a process starts, and a user's own wins.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        with contextlib.suppress(OSError):  # an interpreter that cannot be started again: slower, and no mistake
            os.execv(sys.executable, sys.orig_argv)


def keep_compiled_programs() -> None:
    """Keeps compiled programs in one folder for all runs of this user, so that a second run starts in seconds.

    A folder that the user gave to jax (JAX_COMPILATION_CACHE_DIR) wins. A folder that cannot be written costs the time
    to compile again and nothing else: jax says so and goes on.
    """
    import jax

    if jax.config.jax_compilation_cache_dir:
        return
    try:
        folder = compiled_folder()
    except RuntimeError:  # a user without a home, as containers have them
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_COMPILE_S)
    jax.config.update("jax_compilation_cache_max_size", MOST_COMPILED_BYTES)


def compiled_folder() -> Path:
    """`jaxagent/compiled/PROCESSOR` in the user's cache folder.

    Programs for a CPU use the instructions of the machine that compiled them, and a home folder may be shared by
    different machines: each kind of processor has a folder of its own.

    Raises:
      RuntimeError: the user has neither a home nor a cache folder.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "jaxagent" / "compiled" / processor()


def processor() -> str:
    """A short name for what this machine's CPU can do."""
    features = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def use_virtual_cpus(mesh: MeshConfig) -> None:
    """Points jax at `count(mesh)` virtual CPU devices, whatever the machine has: a dry run needs no chip."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    _split_cpu(count(mesh))


def _split_cpu(devices: int) -> None:
    import jax

    if devices > 1:
        # XLA's CPU back end runs every virtual device on one pool of max(cores, devices) threads, and a collective
        # holds its thread until its peers arrive. A program with independent collectives can so fill the pool with
        # waiting threads and hang (2 of 8 runs of one test on two cores; 0 of 30 with a larger pool).
        os.environ.setdefault("NPROC", str(4 * devices))
    # A user's own XLA flag wins; jax refuses both at once.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Back ends already started, by a test or an embedding program: what exists must do.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)
