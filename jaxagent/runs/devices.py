"""What a process sets up before jax works: devices for the mesh, memory pages, the folder of compiled programs.

On a machine without accelerators a mesh of N devices runs on N virtual CPU devices, through the same code as on
N chips. jax fixes the number of CPU devices when it first touches them, so this runs before everything else.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxagent.config import Config, ConfigError, MeshConfig
from jaxagent.config.errors import Stopped
from jaxagent.io.files import cache_directory
from jaxagent.learner import peers

MOST_COMPILED_BYTES = 4 * 2**30  # of the folder of compiled programs; the least recently used go first
_FOR_MESH: dict[str, str] = {}  # variables of XLA's that this process has set, not its user
LEAST_COMPILE_S = 0.2  # what compiles faster is not worth a file
# All of XLA's flags for GPUs that a run sets. None helped fast numerics (docs/gpu.md).
EXACT_GPU_FLAGS = ("xla_gpu_enable_triton_gemm=false", "xla_gpu_autotune_level=0")


def provide_for(cfg: Config) -> Config:
    """Provides the devices of a run's mesh; returns its config with the sizes of the engine that suit them.

    Raises:
      ConfigError: as `provide`.
    """
    provide(cfg.mesh, cfg.numerics == "exact")
    return cfg.for_platform(available()[0].platform)


def provide(mesh: MeshConfig, exact: bool = False) -> None:
    """Makes as many devices available as the mesh has, virtual ones where the machine has no accelerator.

    Inside `distributed` they are those of all processes, of each equally many. `exact`: for exact numerics.

    Raises:
      ConfigError: the machine has accelerators, but fewer than the mesh needs; or as `available`.
    """
    processes = peers.count()
    if exact:
        _fix_gpu_products()
    _split_cpu(-(-mesh.devices // processes), processes)
    devices = available()
    if len(devices) < mesh.devices:
        where = "this machine has" if processes == 1 else f"the {processes} trainer processes have"
        raise ConfigError(
            f"config.mesh needs {mesh.devices} devices (data {mesh.data} x fsdp {mesh.fsdp} x context "
            f"{mesh.context} x expert {mesh.expert} x tensor {mesh.tensor}), "
            f"{where} {len(devices)} ({devices[0].platform})."
        )


def available() -> list[Any]:
    """The `jax.Device`s of all processes.

    Raises:
      ConfigError: those that JAX_PLATFORMS asks for cannot be started; says what to install.
    """
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a word, where a plug-in is not installed
        platforms = jax.config.jax_platforms
        if not platforms:
            raise
        extra = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}.get(platforms.partition(",")[0])
        remedy = f"pip install 'jaxagent[{extra}]'" if extra else "name another"
        because = f" ({' '.join(str(error).split())})" if str(error) else ""
        problem = f"JAX_PLATFORMS is '{platforms}', and jax cannot start that here{because}"
        raise ConfigError(f"{problem}: {remedy}, or unset the variable to use what this machine has.") from error


@contextlib.contextmanager
def distributed(process: int, processes: int, address: str) -> Iterator[None]:
    """Connects the processes of one trainer; before jax works, and before `provide`.

    Process 0 runs the coordination service at `address`, and is a single point of failure: when it or any other ends,
    the others end, too, and all are started again, at a port that no earlier attempt has used. On a normal end, and
    when all have saved after a signal, every process waits for the others; after a failure nobody does.

    Args:
      process, processes: this one's number, and how many there are. One process connects to nobody.
      address: HOST:PORT of process 0 that the others reach.

    Raises:
      ConfigError: a process number that cannot be.
      PeerError: the others did not come in `peers.INIT_S`.
    """
    if not 0 <= process < processes:
        raise ConfigError(f"--rank={process} must be at least 0 and below {processes}, the number of processes.")
    if processes == 1:
        yield
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise ConfigError(f"--meet must be HOST:PORT of process 0, got '{address}'.")
    peers.connect(process, processes, address)
    try:
        yield
    except BaseException as error:
        if isinstance(error, Stopped) and peers.ending_together:
            peers.disconnect()
        else:
            peers.abandon()
        raise
    peers.disconnect()


def _fix_gpu_products() -> None:
    """Has XLA compute a matrix product of one shape by one kernel on NVIDIA GPUs, in whatever program it stands.

    Otherwise it fuses products with their surroundings and times several kernels, program by program: on an H200,
    engine and trainer then differ in 1 to 5 % of bfloat16 log-probs and in half of the float32 ones, and in none with
    these flags (docs/gpu.md). A flag that the user set wins, and so does a file of flags (its name in
    XLA_FLAGS). XLA reads them before it first touches a device.
    """
    flags, platforms = os.environ.get("XLA_FLAGS", "").strip(), os.environ.get("JAX_PLATFORMS", "").strip().lower()
    plugins = (f"jax_cuda{version}_plugin" for version in (12, 13))
    if (platforms and "cuda" not in platforms and "gpu" not in platforms) or not any(
        map(importlib.util.find_spec, plugins)
    ):
        return
    if flags and not flags.startswith("-"):
        return  # the name of a user's file of flags, which holds all there are
    names = [flag.lstrip("-").partition("=")[0] for flag in flags.split()]
    missing = [f"--{flag}" for flag in EXACT_GPU_FLAGS if flag.partition("=")[0] not in names]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, (flags, *missing)))


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
    """`jaxagent/compiled/PROCESSOR-THREADS` in the user's cache folder.

    Programs for a CPU use the instructions of the machine that compiled them, and a home folder may be shared by
    different machines: each kind of processor has a folder of its own. They also split their loops over the threads
    that the compiler saw, which jax's own key leaves out: what a process on one core (`taskset`, a container) compiled
    would run on one core for everybody after it.

    Raises:
      RuntimeError: the user has neither a home nor a cache folder.
    """
    return cache_directory() / "compiled" / f"{processor()}-{threads()}"


def processor() -> str:
    """A short name for what this machine's CPU can do."""
    features = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def threads(explicit: bool = False) -> int:
    """The threads over which XLA's CPU back end splits its work in this process: what its two variables say, or all.

    Args:
      explicit: leaves out what `provide` itself says for the virtual devices of a mesh.
    """
    for name in ("PJRT_NPROC", "NPROC"):
        if (value := os.environ.get(name, "")).isdigit() and not (explicit and value == _FOR_MESH.get(name)):
            return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_virtual_cpus(mesh: MeshConfig) -> None:
    """Points jax at as many virtual CPU devices as the mesh has, whatever the machine has: a dry run needs no chip."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    _split_cpu(mesh.devices)


def _split_cpu(devices: int, processes: int = 1) -> None:
    import jax

    if devices * processes > 1 and "NPROC" not in os.environ:
        # XLA's CPU back end runs every virtual device on one pool of max(cores, devices) threads, and a collective
        # holds its thread until its peers arrive. A program with independent collectives can so fill the pool with
        # waiting threads and hang (2 of 8 runs of one test on two cores; 0 of 30 with a larger pool).
        os.environ["NPROC"] = _FOR_MESH["NPROC"] = str(4 * devices)
    # A user's own XLA flag wins; jax refuses both at once.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Back ends already started, by a test or an embedding program: what exists must do.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)


@contextlib.contextmanager
def collector_frozen() -> Iterator[None]:
    """Inside, the collector passes over all that exists when this begins.

    Its full rounds, one in some eight steps, look at everything that Python holds. With jax, the libraries and a run's
    traced programs that is 375,000 objects and 0.22 s in which every thread of the process waits.
    What is garbage by now is collected first; what becomes garbage of what is passed over, where a cycle still holds
    it, is collected after this has ended.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
