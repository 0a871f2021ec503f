"""What a trainer has published it can read again as it was trained, every bit, for scoring what was sampled with it."""

import types

import jax
import numpy as np
import pytest

from jaxagent.fleet import weights
from jaxagent.fleet.wire import Sources
from jaxagent.models import params
from jaxagent.runs.fleet import sink
from jaxagent.runs.fleet.sink import PublishedWeights
from tests.fleet.test_adapter_versions import ADAPTERS, SPEC, cfg, flip, mesh, numbers, published, state  # noqa: F401
from tests.fleet.test_trainer_seams import CFG


def reader(cfg, mesh, folder, digests, said):  # noqa: F811
    parts = types.SimpleNamespace(cfg=cfg, spec=SPEC, mesh=mesh)
    known = {version: Sources(version, digest, "run", ()) for version, digest in digests.items()}
    return PublishedWeights(parts, types.SimpleNamespace(weights=known.get), folder, said.append)


def same(found, trained):
    """Whether a tree has the bits, the dtypes and the layout of another: then no program is compiled for it."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(trained), strict=True)
    return jax.tree.structure(found) == jax.tree.structure(trained) and all(
        a.dtype == b.dtype and a.sharding == b.sharding and np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in pairs
    )


def test_a_disk_that_fails_in_one_process_is_told_to_all(tmp_path, monkeypatch):
    said = []

    def failing(*of):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sink.engine_weights, "read", failing)
    assert reader(CFG, None, tmp_path, {0: "digest"}, said).trained(0) is None
    assert said == ["the tokens of version 0 are not scored again: [Errno 5] Input/output error"]


@pytest.mark.parametrize("adapters", [False, True])
def test_a_version_comes_back_as_it_was_trained(cfg, mesh, tmp_path, adapters):  # noqa: F811
    if adapters:
        states = [state(cfg, mesh, 3, seed) for seed in (0, 1)]
    else:
        cfg = CFG
        trained = [numbers(params.param_specs(SPEC), seed, mesh) for seed in (0, 1)]
        states = [types.SimpleNamespace(params=each, policy=each, frozen=None) for each in trained]
    said, folder = [], tmp_path / "weights"
    of = reader(cfg, mesh, folder, published(cfg, folder, *states), said)
    assert same(of.trained(0), states[0].params) and same(of.trained(1), states[1].params)
    assert not same(of.trained(0), states[1].params)
    assert of.trained(7) is None and not said, "nobody has published it"
    flip(next(weights.path_of(folder, 1).glob("*.bin")))
    assert of.trained(1) is None
    (line,) = said
    assert line.startswith("the tokens of version 1 are not scored again: leaf ") and "differs from its digest" in line
    for path in weights.path_of(folder, 0).iterdir():
        path.unlink()
    assert of.trained(0) is None and of.trained(0) is None
    _, line = said  # once
    assert line.startswith("the tokens of version 0 are not scored again: it is deleted.")


def test_a_version_that_another_process_cannot_read_is_scored_by_none(cfg, mesh, tmp_path, monkeypatch):  # noqa: F811
    """Else they would go different ways, and wait for each other in a collective."""
    states, said, folder = [state(cfg, mesh, 3, 0)], [], tmp_path / "weights"
    of = reader(cfg, mesh, folder, published(cfg, folder, *states), said)
    monkeypatch.setattr(sink, "peers", types.SimpleNamespace(meet=lambda what, own: [own, "its disk fails"]))
    assert of.trained(0) is None and said == ["the tokens of version 0 are not scored again: its disk fails"]
