"""The parity tests' small brother: committed folders and the logits transformers gave. Needs neither torch nor it."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxagent.config import MeshConfig
from jaxagent.models import hf, params, sharding
from tests.models import tiny
from tests.models.forward import all_logits

FOLDERS = sorted(path.parent for path in pathlib.Path(__file__).parent.glob("golden/*/config.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_logits(folder):
    expected = np.load(folder / "expected.npz")
    spec = hf.read_spec(folder, tiny.model_config())
    actual = all_logits(hf.load(folder, spec, None), spec, expected["tokens"])
    np.testing.assert_allclose(actual, expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_import_then_export_is_byte_identical(folder, tmp_path):
    """bfloat16 -> float32 masters -> bfloat16 loses nothing, and neither does padding the vocabulary."""
    spec = hf.read_spec(folder, tiny.model_config())
    assert spec.padded_vocab_size % 16 == 0 and spec.param_dtype == "float32"
    hf.save(tmp_path, hf.load(folder, spec, None), spec, "bfloat16", assets=folder)
    theirs = safetensors.numpy.load_file(folder / "model.safetensors")
    ours = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert {k: (v.shape, v.dtype, v.tobytes()) for k, v in theirs.items()} == {
        k: (v.shape, v.dtype, v.tobytes()) for k, v in ours.items()
    }
    assert hf.read_spec(tmp_path, tiny.model_config()) == spec


def test_load_into_shardings():
    """Slices read for 8 devices are the whole arrays."""
    folder = next(folder for folder in FOLDERS if folder.name == "qwen2-untied")
    spec = hf.read_spec(folder, tiny.model_config())
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, context=1))
    where = params.shardings(spec, mesh, sharding.TRAIN)
    split, whole = hf.load(folder, spec, where), hf.load(folder, spec, None)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), split, whole)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b, split, where)))
    assert split.layers.wq.addressable_shards[0].data.size * 4 == whole.layers.wq.size
