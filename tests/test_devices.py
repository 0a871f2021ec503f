"""Compiled programs are kept in one folder per user and kind of processor."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jaxagent.config import ConfigError, MeshConfig
from jaxagent.runs import devices

# Compiles one program under `keep_compiled_programs` and prints how many came from the folder.
PROGRAM = """
import jax, jax.numpy as jnp
import pytest

from jaxagent.config import MeshConfig
from jaxagent.runs import devices
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event == "/jax/compilation_cache/cache_hits"))
devices.LEAST_COMPILE_S = 0.0
devices.keep_compiled_programs()
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))).block_until_ready()
print(sum(hits))
"""


def run(cache: pathlib.Path, **more: str) -> int:
    """Cache hits of a fresh process whose user keeps caches in `cache`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    env |= {"XDG_CACHE_HOME": str(cache), **more}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_a_second_process_takes_what_the_first_one_compiled(tmp_path):
    assert run(tmp_path) == 0
    assert run(tmp_path) > 0
    assert any((tmp_path / "jaxagent" / "compiled").rglob("*-cache"))


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file") == 0


def test_the_folder_that_the_user_gave_to_jax_wins(tmp_path):
    own = tmp_path / "own"
    run(tmp_path / "cache", JAX_COMPILATION_CACHE_DIR=str(own), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    assert any(own.iterdir())
    assert not (tmp_path / "cache").exists()


def test_other_processors_have_other_folders(monkeypatch):
    here = devices.compiled_folder()
    monkeypatch.setattr(devices.Path, "read_text", lambda *_, **__: "flags : another machine")
    assert devices.compiled_folder() != here


def test_a_process_on_fewer_cores_compiles_for_itself(monkeypatch):
    # A program compiled on one core runs on one core wherever it is loaded: measured, 12 % of a learner's step on two.
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    three = devices.compiled_folder()
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: {2}, raising=False)
    assert devices.compiled_folder() != three
    monkeypatch.setenv("NPROC", "3")  # what XLA reads before it asks the system
    assert devices.threads(explicit=True) == 3
    monkeypatch.setattr(devices, "_FOR_MESH", {"NPROC": "3"})  # set for a mesh: what was asked for is all there is
    assert devices.threads() == 3 and devices.threads(explicit=True) == len(os.sched_getaffinity(0))
    assert devices.compiled_folder() == three


def test_a_user_without_a_home_compiles_anew(monkeypatch):
    import jax

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(devices.Path, "home", no_home)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        devices.keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("plugin", ["jax_cuda12_plugin", "jax_cuda13_plugin", None])
def test_exact_numerics_fix_the_products_of_a_gpu_unless_its_user_says_otherwise(plugin, monkeypatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name == plugin or None)
    monkeypatch.setattr(devices, "_split_cpu", lambda *_: None)
    no_triton, level = "--xla_gpu_enable_triton_gemm=false", "--xla_gpu_autotune_level=0"
    for exact, platforms, user, added in [
        (True, "", "", [no_triton, level]),
        (True, "cuda,cpu", "--xla_gpu_autotune_level=3", [no_triton]),
        (True, "", "--xla_gpu_autotune_level_of_others=3", [no_triton, level]),
        (True, "cpu", "--a", []),
        (True, "tpu,cpu", "--a", []),
        (True, "", "/home/me/xla.flags", []),
        (False, "", "--a", []),
    ]:
        monkeypatch.setenv("XLA_FLAGS", user)
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        monkeypatch.setattr("jax.devices", lambda: [None])
        devices.provide(MeshConfig(1, 1, 1, 1), exact)
        assert os.environ["XLA_FLAGS"].split() == [*filter(None, [user]), *(added if plugin else [])]


@pytest.mark.parametrize(
    ("asked", "error", "remedy"),
    [
        ("cuda", AssertionError(), "pip install 'jaxagent[cuda]'"),
        (
            "tpu,cpu",
            RuntimeError("Failed to open libtpu.so"),
            "(Failed to open libtpu.so): pip install 'jaxagent[tpu]'",
        ),
        ("rocm", RuntimeError("unknown"), "name another, or unset the variable"),
    ],
)
def test_a_platform_that_cannot_be_started_is_told_in_one_sentence(monkeypatch, asked, error, remedy):
    """What jax 0.10 raises; with JAX_PLATFORMS=cuda and no plug-in it is an AssertionError without a word."""

    def devices_of_jax():
        raise error

    monkeypatch.setattr(jax, "devices", devices_of_jax)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", asked)
    try:
        with pytest.raises(ConfigError) as told:
            devices.provide(MeshConfig(1, 1, 1, 1))
    finally:
        jax.config.update("jax_platforms", before)
    assert f"JAX_PLATFORMS is '{asked}'" in str(told.value) and remedy in str(told.value)
