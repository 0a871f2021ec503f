"""Compiling for a GPU that is not there: the description XLA gets, and the choice of what to compile for."""

import pytest

from jaxagent.config import ConfigError, MeshConfig
from jaxagent.plan import topology


def test_without_the_cuda_compiler_the_plan_is_for_virtual_devices(monkeypatch):
    monkeypatch.setattr(topology, "cuda_compiler_installed", lambda: False)
    mesh, name = topology.mesh_for(MeshConfig(1, 1, 1, 1), "h100")
    assert name == "virtual CPU devices"
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "context": 1, "expert": 1, "tensor": 1}


def test_the_description_names_the_chip():
    text = topology.target_config("h200")
    assert "core_count: 132" in text and "major: 9" in text and 'platform_name: "CUDA"' in text
    assert text.count("{") == text.count("}")


@pytest.mark.skipif(not topology.cuda_compiler_installed(), reason="jax's CUDA plug-in is not installed")
def test_a_topology_without_a_gpu():
    mesh, name = topology.mesh_for(MeshConfig(1, 2, 2, 1), "h100")
    assert name == "h100" and mesh.size == 4


def test_without_libtpu_a_tpu_plan_is_for_virtual_devices(monkeypatch):
    monkeypatch.setattr(topology, "tpu_compiler_installed", lambda: False)
    assert topology.mesh_for(MeshConfig(1, 1, 1, 1), "v5e")[1] == "virtual CPU devices"


@pytest.mark.skipif(not topology.tpu_compiler_installed(), reason="libtpu is not installed")
def test_a_slice_without_a_tpu():
    mesh, name = topology.mesh_for(MeshConfig(1, 4, 2, 1), "v5e")
    assert name == "v5e" and mesh.size == 8
    with pytest.raises(ConfigError, match="largest v5e slice"):
        topology.mesh_for(MeshConfig(512, 1, 1, 1), "v5e")
