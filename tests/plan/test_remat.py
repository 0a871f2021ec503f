"""`model.remat = "auto"`: the setting that computes least again and fits, of a model of three billion parameters."""

import dataclasses

import pytest

from benchmarks import gpu_shapes
from jaxagent.plan import memory, programs


@pytest.fixture(scope="module")
def shape() -> gpu_shapes.Shape:
    """36 layers, 4 rows of 4,096 tokens."""
    return gpu_shapes.shape("3b", remat="auto", row_tokens=4096, micro_rows=4)


def _kept(shape: gpu_shapes.Shape, remat: str) -> int:
    return memory.gradient_bytes(shape.cfg, dataclasses.replace(shape.spec, remat=remat), shape.mesh)


def test_what_settings_keep_is_what_their_names_say(shape):
    tokens, spec = 4 * 4096 * shape.spec.num_layers, shape.spec
    kept = {remat: _kept(shape, remat) for remat in ("products", "dots", "attention", "layer")}
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    # bfloat16: the stream twice, q k v and attention's output; in float32 its log-sum-exp.
    attention = 2 * (spec.embed_dim + 2 * heads + 2 * kv) + 4 * spec.num_heads
    assert kept["attention"] - kept["layer"] == pytest.approx(tokens * attention, rel=0.02)
    assert kept["products"] - kept["dots"] == pytest.approx(tokens * (2 * heads + 4 * spec.num_heads), rel=0.02)
    # and gate and up
    assert kept["products"] - kept["attention"] == pytest.approx(tokens * 2 * 2 * spec.mlp_dim, rel=0.02)


def test_auto_is_the_first_that_fits(shape):
    fixed = sum(programs.resident_bytes(shape.cfg, shape.spec, shape.mesh).values())

    def chosen(device_bytes: float) -> str:
        return memory.resolved(shape.cfg, shape.spec, shape.mesh, device_bytes).model.remat

    for setting in ("products", "attention"):
        least = (fixed + _kept(shape, setting)) / memory.USABLE
        assert chosen(least + 1) == setting != chosen(least - 1e6)
    assert (chosen(1e15), chosen(1e9)) == ("none", "layer")
    assert memory.for_devices(dataclasses.replace(shape.cfg, model=dataclasses.replace(shape.cfg.model, remat="dots")))
