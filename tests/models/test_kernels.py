"""The accelerator's kernels are chosen where they can run, and a fallback says why."""

import contextlib
import dataclasses
import sys
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxagent.config import MeshConfig
from jaxagent.models import attention, blockwise, gpu_calls, gpu_kernels, kernels
from jaxagent.models.sharding import ROWS, make_mesh
from tests.models import tiny


def test_other_platforms_run_plain_code_without_comment():
    assert kernels.paged("cpu", 128, 64) == kernels.packed("cpu", "bfloat16", 256) == kernels.Choice("xla")
    assert kernels.report(tiny.spec(), 64, 256) == "attention: pages xla, packed rows xla"
    assert kernels.packed("cpu", "bfloat16", kernels.LONG_ROW) == kernels.Choice("blocks")


def test_gpu_kernels_and_their_conditions(monkeypatch):
    monkeypatch.setattr(kernels.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "_has_tokamax", lambda: True)
    assert kernels.paged("gpu", 128, 64).name == "triton"
    assert "head_dim 80" in kernels.paged("gpu", 80, 64).because
    assert kernels.packed("gpu", "bfloat16", 256).name == "tokamax"
    assert "float32" in kernels.packed("gpu", "float32", 256).because
    assert kernels.experts("gpu", "bfloat16", exact=False).name == "tokamax"
    assert kernels.experts("gpu", "bfloat16", exact=True) == kernels.experts("cpu", "float32", False)
    monkeypatch.setattr(kernels, "platform", lambda: "gpu")
    assert "experts tiles (the GPU's kernel takes bfloat16" in kernels.report(tiny.spec(family="qwen3_moe"), 64, 256)


def test_a_jax_without_tritons_back_end_runs_plain_code_and_says_so(monkeypatch):
    assert kernels.products("gpu", True).name == "pinned" and kernels.products("gpu", False) == kernels.Choice("xla")
    monkeypatch.setattr(gpu_calls, "AVAILABLE", False)
    for choice in (kernels.paged("gpu", 128, 64), kernels.products("gpu", True)):
        assert choice.name == "xla" and "Triton" in choice.because
    monkeypatch.setattr(kernels, "platform", lambda: "gpu")
    assert "products xla (this version of jax" in kernels.report(tiny.spec(), 64, 256, exact=True)


@pytest.mark.parametrize(
    ("version", "used"), [("0.0.9", False), ("0.0.12.post1", False), ("0.0.13", True), ("1.0", True)]
)
def test_a_tokamax_that_masks_wrongly_is_refused(monkeypatch, version, used):
    monkeypatch.setattr(kernels.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "_has_tokamax", lambda: True)
    monkeypatch.setattr(kernels.importlib.metadata, "version", lambda name: {"tokamax": version}[name])
    kernels._refused_tokamax.cache_clear()
    try:
        chosen = kernels.packed("gpu", "bfloat16", 256)
    finally:
        kernels._refused_tokamax.cache_clear()
    assert chosen.name == ("tokamax" if used else "xla")
    because = f"tokamax {version} masks wrongly backward; 0.0.13 is needed, which wants Python 3.12"
    assert chosen.because == ("" if used else because)


def test_tpu_kernels_and_their_conditions():
    assert kernels.paged("tpu", 128, 128).name == "mosaic"
    assert "page_tokens 64" in kernels.paged("tpu", 128, 64).because
    assert kernels.packed("tpu", "float32", 512).name == "splash"
    assert "200 tokens" in kernels.packed("tpu", "bfloat16", 200).because


def test_a_fallback_on_a_gpu_is_in_the_report(monkeypatch):
    monkeypatch.setattr(kernels, "platform", lambda: "gpu")
    monkeypatch.setattr(kernels, "_has_tokamax", lambda: False)
    spec = dataclasses.replace(tiny.spec(), compute_dtype="bfloat16", head_dim=128)
    report = kernels.report(spec, 64, 256)
    assert "pages triton" in report and "packed rows xla (tokamax is not installed" in report


def test_beginnings_are_shared_where_plain_code_attends_and_else_the_report_says_why_not(monkeypatch):
    spec = dataclasses.replace(tiny.spec(), compute_dtype="bfloat16", head_dim=128)
    assert kernels.report(spec, 64, 256, share_prefix=True, exact=True).endswith("prefixes shared")
    assert "splash" in kernels.prefixes("tpu", spec, 128, 256, False).because
    monkeypatch.setattr(kernels, "_has_tokamax", lambda: False)
    assert kernels.prefixes("gpu", spec, 64, 256, False) == kernels.Choice("shared")
    assert "triton" in kernels.prefixes("gpu", spec, 64, 256, True).because
    monkeypatch.setattr(kernels, "platform", lambda: "gpu")
    monkeypatch.setattr(kernels, "_has_tokamax", lambda: True)
    monkeypatch.setattr(kernels.jax, "default_backend", lambda: "gpu")
    assert kernels.report(spec, 64, 256, share_prefix=True).endswith(
        "whole (tokamax has no mask for shared beginnings)"
    )
    assert "prefixes" not in kernels.report(spec, 64, 256)


@pytest.mark.parametrize("devices", [0, 4])
def test_long_rows_in_blocks_are_short_rows_at_once(monkeypatch, devices):
    """Packed rows of three sequences and padding: outputs and gradients, without a mesh and on a mesh of four."""
    rng = np.random.default_rng(0)
    b, t, heads, kv_heads, d = 2, 160, 4, 2, 8
    segments = jnp.asarray([[1] * 70 + [2] * 5 + [3] * 75 + [0] * 10, [1] * 160], jnp.int32)
    q, k, v, weight = (
        jnp.asarray(rng.normal(size=(b * t, n, d)), jnp.float32) for n in (heads, kv_heads, kv_heads, heads)
    )
    weight = weight * (segments.reshape(-1) > 0)[:, None, None]

    def found(q, k, v, weight, segments):
        def loss(q, k, v):
            return (attention.packed(segments)(None, q, k, v)[0] * weight).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

    arrays = (q, k, v, weight, segments)
    with jax.set_mesh(make_mesh(MeshConfig(2, 1, 2, 1))) if devices else contextlib.nullcontext():
        if devices:
            arrays = tuple(jax.reshard(x, P(ROWS, "tensor", None) if x.ndim == 3 else P(ROWS, None)) for x in arrays)
        wanted = found(*arrays)
        monkeypatch.setattr(kernels, "LONG_ROW", t)
        monkeypatch.setattr(blockwise, "BLOCK", 32)
        blocks = []
        monkeypatch.setattr(blockwise, "attend", lambda *x, attend=blockwise.attend: blocks.append(x) or attend(*x))
        in_blocks = found(*arrays)
    assert blocks, "Long rows do not attend in blocks."
    chex.assert_trees_all_close(in_blocks, wanted, rtol=2e-5, atol=2e-5)


def test_rows_over_context_are_reported():
    assert "mesh.context" in kernels.packed("tpu", "bfloat16", 512, split=True).because
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1, 2), ("data", "context"))):
        assert kernels.report(tiny.spec(), 64, 256, share_prefix=True, exact=True) == (
            "attention: pages xla, packed rows blocks, prefixes whole (mesh.context splits rows, and plain code for "
            "shared beginnings takes them whole), exact scoring whole rows (on every device of mesh.context)"
        )


def test_the_gpu_kernel_sees_the_keys_from_first_to_last(monkeypatch):
    """tokamax's mask, by its documentation: k_start is the first key that a query sees, k_end one past the last."""
    masks = types.SimpleNamespace(Mask=lambda **fields: types.SimpleNamespace(**fields))
    monkeypatch.setitem(sys.modules, "tokamax._src.ops.attention.base", masks)

    def kernel(q, k, v, mask):
        keys = np.arange(k.shape[1])
        seen = (mask.k_start[..., None] <= keys) & (keys < mask.k_end[..., None])
        return attention.attend_dense(q, k, v, seen[:, 0])

    monkeypatch.setattr(gpu_kernels, "_flash_attention", lambda: kernel)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, t, 2, 8)), jnp.float32) for t in (4, 8, 8))
    first, last = (jnp.array([rows] * 2, jnp.int32) for rows in ([0, 0, 3, 6], [1, 2, 3, 7]))
    expected = blockwise.attend(q, k, v, first, last)
    np.testing.assert_allclose(gpu_kernels.attend_between(q, k, v, first, last), expected, atol=1e-6)


def test_where_segments_begin():
    segments = np.array([[1, 1, 2, 0, 0], [3, 3, 3, 3, 3]])
    assert gpu_kernels.first_of_segment(segments).tolist() == [[0, 0, 2, 3, 3], [0, 0, 0, 0, 0]]
