"""Versions from the devices of a trainer in another process: exactly what was published, or the files."""

import contextlib
import gc
import json
import subprocess
import sys
import threading
import time
import types
import weakref

import jax
import numpy as np
import pytest

from jaxagent.config import MeshConfig
from jaxagent.fleet import weights
from jaxagent.fleet.vitals import Vitals
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.wire import Sources
from jaxagent.models import sharding
from jaxagent.runs.fleet import sink, transfer, trees
from jaxagent.runs.fleet.held import HeldVersions, place
from jaxagent.runs.fleet.transfer import Offers, Puller, TransferError
from tests.fleet.test_trainer_seams import CFG, Publications
from tests.fleet.transfer_trainer import SPEC, TOKEN, VERSION, policy_of

ONE = (1, 1)


def mesh_of(data, fsdp):
    return sharding.make_mesh(MeshConfig(data, fsdp, 1, 1))


@contextlib.contextmanager
def trainer(folder, how="whole", data=1, fsdp=1):
    """Another process; yields (url, digest)."""
    command = [sys.executable, "-m", "tests.fleet.transfer_trainer", str(folder), how, str(data), str(fsdp)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def engine(tmp_path, url, digest, mesh, seen="none", host="127.0.0.1", opened=None):
    """The versions of an engine process, which sees the trainer's folder or has HTTP alone."""
    own = tmp_path / "own"
    own.mkdir(exist_ok=True)
    fetcher = WeightFetcher(own, TOKEN)
    link = types.SimpleNamespace(weights=lambda version: Sources(version, digest, "run", (url,)))
    puller = (opened or contextlib.ExitStack()).enter_context(Puller(SPEC, mesh, fetcher, host, 60.0))
    return HeldVersions(CFG, SPEC, mesh, link, fetcher, own, tmp_path / seen, 5.0, puller)


def forget(tmp_path):
    """What the engine has fetched: else it would be here already."""
    (tmp_path / "own").rename(tmp_path / f"gone-{time.monotonic_ns()}")
    (tmp_path / "own").mkdir()


def is_the_policy(found, mesh):
    """Bit by bit, in dtype and layout, on every device, what an engine takes of the same version from files."""
    expected = place(trees.to_host(policy_of(mesh)), SPEC, mesh)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype and ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
        for here, there in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            assert here.device == there.device
            assert np.asarray(here.data).tobytes() == np.asarray(there.data).tobytes()
    return True


def pulled(versions):
    numbers = versions.numbers()
    return numbers["weights_pulled_bytes"] > 0, numbers["weights_pulls_failed"], numbers["weights_got_bytes"] > 0


@pytest.mark.parametrize("layout", [ONE, (2, 1), (1, 2), (2, 2)])
def test_what_is_pulled_is_what_was_published_on_every_device(tmp_path, layout):
    mesh = mesh_of(*layout)
    with trainer(tmp_path / "trainer", "whole", *layout) as (url, digest):
        versions = engine(tmp_path, url, digest, mesh)
        assert is_the_policy(versions.params(VERSION), mesh)
        assert is_the_policy(versions.params(VERSION), mesh)  # another offer
        assert pulled(versions) == (True, 0, False) and versions.here() == []


@pytest.mark.parametrize("layout", [ONE, (2, 1)])
def test_one_flipped_bit_is_refused_and_the_files_are_taken_and_after_three_of_them_no_more_is_pulled(
    tmp_path, layout, caplog
):
    mesh = mesh_of(*layout)
    with trainer(tmp_path / "trainer", "flipped", *layout) as (url, digest):
        versions = engine(tmp_path, url, digest, mesh)
        for times in range(1, transfer.MOST_FAILED + 2):
            forget(tmp_path)
            assert is_the_policy(versions.params(VERSION), mesh)
            assert pulled(versions) == (False, min(times, transfer.MOST_FAILED), True)
    assert "Version 3 does not come from the trainer's devices, and is taken from files: leaf" in caplog.text
    assert "came with bytes that differ from its digest" in caplog.text
    assert caplog.text.count("This process takes files from now on.") == 1


def test_a_replica_of_other_bits_is_refused():
    """Each device gets a copy of its own, so each is compared."""
    mesh = mesh_of(2, 1)
    whole, other = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.float32)
    other[5] = -5.0
    where = jax.sharding.NamedSharding(mesh, jax.P())
    parts = [jax.device_put(each, device) for each, device in zip((whole, other), mesh.devices.flat, strict=True)]
    array = jax.make_array_from_single_device_arrays((6,), where, parts)
    value = transfer.manifest.manifest("run", 0, [transfer.manifest.describe(("a",), whole)])
    transfer.check(value, {("a",): jax.device_put(whole, where)})
    with pytest.raises(transfer.DamagedError, match="leaf a came with other bytes to"):
        transfer.check(value, {("a",): array})


def test_a_trainer_that_is_killed_in_a_pull_leaves_the_files(tmp_path, caplog):
    mesh = mesh_of(*ONE)
    with trainer(tmp_path / "trainer", "dies") as (url, digest):
        versions = engine(tmp_path, url, digest, mesh, seen="trainer")
        began = time.monotonic()
        assert is_the_policy(versions.params(VERSION), mesh)
        assert time.monotonic() - began < 10 < transfer.LEAST_S
    assert pulled(versions) == (False, 1, False)
    assert "is taken from files: 127.0.0.1:" in caplog.text and "INTERNAL" in caplog.text


def test_a_pull_that_does_not_come_is_given_up_in_time_and_no_second_one_is_tried(tmp_path, monkeypatch, caplog):
    """It goes on, since cutting it off would harm the trainer, until the process ends."""
    monkeypatch.setattr(transfer, "LEAST_S", 0.5)
    mesh, opened = mesh_of(*ONE), contextlib.ExitStack()
    with trainer(tmp_path / "trainer", "silent") as (url, digest):
        versions = engine(tmp_path, url, digest, mesh, opened=opened)
        for _ in range(2):
            forget(tmp_path)
            began = time.monotonic()
            assert is_the_policy(versions.params(VERSION), mesh)
            assert time.monotonic() - began < 10
        assert [thread.name for thread in threading.enumerate()].count("pulls weights") == 1
        opened.close()
        assert "pulls weights" not in [thread.name for thread in threading.enumerate()]
    assert pulled(versions) == (False, 1, True)
    assert "bytes within 0.5 s. This process takes files from now on." in caplog.text


def test_what_was_fetched_ahead_of_time_is_not_pulled(tmp_path):
    mesh = mesh_of(*ONE)
    with trainer(tmp_path / "trainer") as (url, digest):
        versions = engine(tmp_path, url, digest, mesh)
        versions.expect(VERSION)
        until = time.monotonic() + 30
        while weights.versions(tmp_path / "own") != [VERSION] and time.monotonic() < until:
            time.sleep(0.01)
        assert is_the_policy(versions.params(VERSION), mesh)
        assert pulled(versions) == (False, 0, True)


def refused(tmp_path, caplog, offer, mesh, host="127.0.0.1", for_good=False):
    """Takes version 3 where `offer` answers; what the engine said. Refusals do not add up, if none is `for_good`."""
    digest = weights.publish(tmp_path / "trainer", trees.to_host(policy_of(mesh)), "run", VERSION).digest
    with WeightServer([tmp_path / "trainer"], TOKEN, offer=offer) as server:
        versions = engine(tmp_path, server.url, digest, mesh, host=host)
        for times in range(1, transfer.MOST_FAILED + 2):
            forget(tmp_path)
            assert is_the_policy(versions.params(VERSION), mesh)
            assert pulled(versions) == (False, 1 if for_good else times, True)
    assert ("This process takes files from now on." in caplog.text) == for_good
    said = caplog.text
    caplog.clear()
    return said


def test_offers_that_do_not_fit_are_refused_before_anything_is_pulled(tmp_path, caplog):
    one, two = mesh_of(*ONE), mesh_of(2, 1)
    offers = Offers("127.0.0.1", two)
    offers.keep(VERSION, policy_of(two))
    # Every offer holds a version until its time is over, so an engine of another layout asks for one alone.
    said = refused(tmp_path, caplog, offers.offer, one, for_good=True)
    assert "the trainer's devices are {'kind': 'cpu', 'mesh': [['data', 2]" in said
    offers.keep(VERSION + 1, policy_of(two))
    assert "404: version 3 is not on the trainer's devices, but [4]" in refused(tmp_path, caplog, offers.offer, two)
    assert "404: this process offers nothing from its devices" in refused(tmp_path, caplog, None, two)


def test_as_many_versions_are_kept_as_engines_may_want(tmp_path):
    mesh = mesh_of(*ONE)
    offers, policy = Offers("127.0.0.1", mesh, 2), policy_of(mesh)
    gone = [weakref.ref(jax.tree.leaves(policy)[0])]
    offers.keep(0, policy)
    for version in (1, 2):
        offers.keep(version, policy_of(mesh))
    del policy
    gc.collect()
    assert gone[0]() is None
    with pytest.raises(LookupError, match=r"version 0 is not .* but \[1, 2\]"):
        offers.offer(0)
    numbers = [json.loads(offers.offer(version))["uuid"] for version in (1, 2, 2)]
    assert len(set(numbers)) == 3


def test_an_offer_needs_the_token(tmp_path):
    with WeightServer([tmp_path], TOKEN, offer=lambda version: b"never") as server:
        with pytest.raises(transfer.WeightsError, match="401"):
            WeightFetcher(tmp_path, "another").offer(server.url, VERSION)
        assert WeightFetcher(tmp_path, TOKEN).offer(server.url, VERSION) == b"never"


def test_a_host_without_a_transfer_server_is_told(tmp_path, monkeypatch):
    with pytest.raises(TransferError, match=r"no transfer server on '192\.0\.2\.1'"):
        Offers("192.0.2.1", mesh_of(*ONE))  # no address of this machine
    monkeypatch.delattr("jax.experimental.transfer")
    monkeypatch.setitem(sys.modules, "jax.experimental.transfer", None)  # as where it is not installed
    with pytest.raises(TransferError, match=r"no transfer server on '127\.0\.0\.1': ModuleNotFoundError"):
        Offers("127.0.0.1", mesh_of(*ONE))


def test_a_published_version_is_kept_before_anybody_is_told(tmp_path):
    """Else the first engines would ask too early, and take the files."""
    order, state = [], types.SimpleNamespace(policy=policy_of(mesh_of(*ONE)))
    link = Publications()
    publish, link.publish = link.publish, lambda *of: order.append("told") or publish(*of)
    driver, gone = types.SimpleNamespace(update_params=lambda *of: None), (lambda version: None)
    nothing, tasks = (lambda: None), (lambda version: {})

    def keep(version, policy):
        order.append((version, policy is state.policy, weights.versions(tmp_path)))

    of = sink.Versions(CFG, driver, link, tmp_path, "run", tasks, Vitals(), print, nothing, gone, lambda: {0}, keep)
    of.publish(0, state)
    assert order == [(0, True, [0]), "told"]
