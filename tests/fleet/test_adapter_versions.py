"""Under LoRA the trainer publishes adapters, and engines make the trainer's very weights of them and of one base."""

import dataclasses
import logging
import shutil
import types

import jax
import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent.config import ConfigError, LoraConfig, MeshConfig, parse
from jaxagent.config.fleet import FleetConfig
from jaxagent.fleet import manifest, weight_fetch, weights
from jaxagent.fleet.manifest import MismatchError, WeightsError
from jaxagent.fleet.vitals import Vitals
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.wire import Sources
from jaxagent.learner import programs
from jaxagent.learner.state import Frozen
from jaxagent.models import lora, params, sharding
from jaxagent.runs.fleet import sink, trees
from jaxagent.runs.fleet.engine_weights import EngineVersions, VersionReader, place
from tests.fleet.test_trainer_seams import Publications
from tests.models import tiny

TOKEN = "a secret of the run"
SPEC = tiny.spec(compute_dtype="bfloat16")  # what adapters change is stored in another dtype
LORA = LoraConfig(rank=2, alpha=4.0, rank_stabilised=False, targets="q_proj,down_proj")
ADAPTERS = lora.adapter_specs(SPEC, LORA)


@pytest.fixture(scope="module")
def cfg():
    found = parse(get_config())
    model = dataclasses.replace(found.model, lora=LORA, compute_dtype="bfloat16")
    return dataclasses.replace(found, model=model, numerics="exact", fleet=FleetConfig())


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(MeshConfig(1, 1, 1, 1))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("jaxagent.fleet.weight_server.LOOK_S", 0.01)
    for name, value in {"FIRST_PAUSE_S": 0.01, "MOST_PAUSE_S": 0.02, "AVOID_S": 0.05}.items():
        monkeypatch.setattr(weight_fetch, name, value)


def numbers(specs, seed, mesh):
    """Random arrays on the devices; nothing is compiled for them."""
    rng = np.random.default_rng(seed)
    tree = {path: rng.normal(size=array.shape).astype(array.dtype) for path, array in trees.paths(specs).items()}
    return trees.placed(tree, specs, mesh, lambda path, array: array.dtype)


def state(cfg, mesh, base, adapters):
    """The trainer's, with weights by their seeds."""
    frozen, trained = numbers(params.param_specs(SPEC), base, mesh), numbers(ADAPTERS, adapters, mesh)
    with jax.set_mesh(mesh):
        merged = programs.merger(cfg)(frozen, trained)
    return types.SimpleNamespace(params=trained, policy=merged, frozen=Frozen(frozen, merged))


def published(cfg, folder, *states):
    """What a trainer tells the coordinator of its versions, which lie in `folder` then."""
    link, driver = Publications(), types.SimpleNamespace(update_params=lambda *of: None)
    folder.mkdir(exist_ok=True)
    nothing, missing = (lambda: None), (lambda version: None)
    of = sink.VersionPublisher(
        cfg, driver, link, folder, "run", lambda version: {}, Vitals(), print, nothing, missing, lambda: {100}
    )
    for version, each in enumerate(states):
        of.publish(version, each)
    of.finish()
    return link.digests


def engine(cfg, mesh, own, digests, *urls, seen=None, fetcher=None, fetch_s=0.0):
    """The versions of an engine process; it asks `digests` and `urls` anew every time."""
    link = types.SimpleNamespace(weights=lambda version: Sources(version, digests[version], "run", urls))
    fetcher = fetcher or WeightFetcher(own, TOKEN)
    reader = VersionReader(seen or own.with_name("none"), own, fetcher, fetch_s)
    return EngineVersions(cfg, SPEC, mesh, link, reader)


def manifest_of(folder, version):
    return manifest.decode((weights.path_of(folder, version) / weights.MANIFEST).read_bytes(), "")


def equal(found, state, mesh):
    """Whether an engine's weights are the policy as the trainer serves it, bit by bit."""
    expected = place(trees.paths(jax.device_get(state.policy)), SPEC, mesh)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def flip(path):
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def test_the_base_comes_once_and_every_version_is_the_trainers_policy(cfg, mesh, tmp_path):
    states = [state(cfg, mesh, 3, 0), state(cfg, mesh, 3, 1)]
    digests = published(cfg, tmp_path / "trainer", *states)
    base, first, second = (
        sum(chunk.size for chunk in manifest_of(tmp_path / of, version).chunks.values())
        for of, version in (("trainer/base", 0), ("trainer", 0), ("trainer", 1))
    )
    assert first == second < base / 3
    assert not equal(place(trees.paths(jax.device_get(states[0].policy)), SPEC, mesh), states[1], mesh)
    with WeightServer([tmp_path / "trainer"], TOKEN) as server, WeightServer([tmp_path / "own"], TOKEN) as own:
        of = engine(cfg, mesh, tmp_path / "own", digests, server.url)
        assert equal(of.params(0), states[0], mesh)
        assert of.numbers()["weights_got_bytes"] == base + first and of.versions_to_hand_on() == [0]
        assert equal(of.params(1), states[1], mesh)
        assert of.numbers()["weights_got_bytes"] == base + first + second
        of.forget(2)
        assert equal(of.params(0), states[0], mesh)  # the base is not one of the versions that go
        # Another engine, which the trainer gives nothing: this one hands on both.
        shutil.rmtree(tmp_path / "trainer")
        relayed = engine(cfg, mesh, tmp_path / "relayed", digests, own.url, server.url)
        assert equal(relayed.params(0), states[0], mesh)
        assert of.numbers()["merge_differs"] == relayed.numbers()["merge_differs"] == 0


def test_an_engine_with_another_base_refuses_with_both_digests(cfg, mesh, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    digests = published(cfg, ours, state(cfg, mesh, 3, 0))
    others = published(cfg, theirs, state(cfg, mesh, 4, 0), state(cfg, mesh, 4, 1))
    had, wanted = manifest_of(ours, 0).base, manifest_of(theirs, 1).base
    assert had != wanted
    assert digests[0] != others[0]  # equal adapters to another base are another version
    of = engine(cfg, mesh, tmp_path / "own", digests, seen=ours)
    of.params(0)
    with WeightServer([theirs], TOKEN) as server:
        again = engine(cfg, mesh, tmp_path / "own", digests | {1: others[1]}, server.url, seen=ours)
        again.params(0)
        with pytest.raises(
            MismatchError, match=f"version 1 was asked for with base '{had}', and its base is '{wanted}'"
        ):
            again.params(1)


def test_a_base_that_is_missing_or_damaged_is_told_with_its_digest_and_had_from_elsewhere(cfg, mesh, tmp_path, caplog):
    states = [state(cfg, mesh, 3, 0), state(cfg, mesh, 3, 1)]
    trainer, spare = tmp_path / "trainer", tmp_path / "spare"
    digests = published(cfg, trainer, *states)
    shutil.copytree(trainer, spare)
    digest = manifest_of(trainer / weights.BASE, 0).digest
    damaged = next(weights.path_of(trainer / weights.BASE, 0).glob("*.bin"))
    flip(damaged)
    with WeightServer([trainer], TOKEN) as bad, WeightServer([spare], TOKEN) as good:
        of = engine(cfg, mesh, tmp_path / "own", digests, bad.url, seen=trainer)
        with pytest.raises(
            WeightsError, match=f"frozen weights .* version 0 .*{digest}.* cannot be had.*another digest"
        ):
            of.params(0)
        assert f"{damaged} differs from its digest" in caplog.text
        assert equal(engine(cfg, mesh, tmp_path / "own", digests, bad.url, good.url).params(0), states[0], mesh)
        # What lies here is damaged later, and this process begins anew.
        own = weights.path_of(tmp_path / "own" / weights.BASE, 0)
        flip(own / damaged.name)
        assert equal(engine(cfg, mesh, tmp_path / "own", digests, good.url).params(1), states[1], mesh)
        assert manifest.chunk_of((own / damaged.name).read_bytes()).digest == damaged.stem

        shutil.rmtree(trainer / weights.BASE)
        nobody = engine(cfg, mesh, tmp_path / "other", digests, bad.url, seen=trainer)
        with pytest.raises(WeightsError, match=f"frozen weights .*{digest}.* cannot be had.* answered 404"):
            nobody.params(0)
    # A trainer that starts again mends what is not there, or not as it was.
    published(cfg, trainer, *states)
    assert equal(nobody.params(0), states[0], mesh)


def test_an_engine_that_multiplies_otherwise_ends_or_says_so(cfg, mesh, tmp_path, caplog):
    """As if its devices summed in another order: the trainer's version says that another policy came out."""
    of = state(cfg, mesh, 3, 1)
    other = dataclasses.replace(of.frozen, merged=of.policy.replace(layers=state(cfg, mesh, 3, 2).policy.layers))
    spoilt = types.SimpleNamespace(params=of.params, policy=other.merged, frozen=other)
    digests = published(cfg, tmp_path / "trainer", spoilt)
    with pytest.raises(
        ConfigError, match=r"does not multiply .* version 0 has adapters that make \w{32} there and \w{32} here"
    ):
        engine(cfg, mesh, tmp_path / "own", digests, seen=tmp_path / "trainer").params(0)
    fast = engine(dataclasses.replace(cfg, numerics="fast"), mesh, tmp_path / "own", digests, seen=tmp_path / "trainer")
    with caplog.at_level(logging.WARNING):
        assert equal(fast.params(0), of, mesh) and equal(fast.params(0), of, mesh)
    assert caplog.text.count("does not multiply adapters out as the trainer does") == 1
    assert fast.numbers()["merge_differs"] == 1.0


def test_a_trainer_whose_base_was_replaced_ends_with_both_digests(cfg, mesh, tmp_path):
    published(cfg, tmp_path, state(cfg, mesh, 3, 0))
    before = manifest_of(tmp_path / weights.BASE, 0).digest
    with pytest.raises(
        ConfigError, match=f"not those that this run has published: .*{before}.*another came: [0-9a-f]{{64}}"
    ):
        published(cfg, tmp_path, state(cfg, mesh, 4, 0))
