"""Weights over a slow link: they arrive whole, and a round trip is paid for several chunks, not for each."""

import threading
import time

import numpy as np
import pytest

from benchmarks.slow_proxy import SlowProxy
from jaxagent.fleet import manifest, weights
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.weight_reader import hold
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.weights import publish
from jaxagent.fleet.wire import Sources

TOKEN = "a secret of the run"
TREE = {("a",): np.random.default_rng(0).integers(0, 255, 64 * 16, np.uint8)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 64)
    monkeypatch.setattr("jaxagent.fleet.weight_server.LOOK_S", 0.01)


def fetched(folder, url, tree):
    """Seconds that version 1 took; it is compared with `tree`."""
    began = time.monotonic()
    WeightFetcher(folder, TOKEN).fetch(lambda: Sources(1, manifest.digest(tree), "run", (url,)), 0.0)
    took = time.monotonic() - began
    with hold(folder, 1, "run") as held:
        assert all(held.read()[path].tobytes() == leaf.tobytes() for path, leaf in tree.items())
    return took


def test_a_version_comes_whole_and_no_sooner_than_the_link_allows(tmp_path):
    publish(tmp_path / "trainer", manifest.shares(TREE), "run", 1)
    delay_s, bytes_per_s = 0.005, 50_000.0
    with WeightServer([tmp_path / "trainer"], TOKEN) as server, SlowProxy(server.url, delay_s, bytes_per_s) as link:
        took = fetched(tmp_path / "engine", link.url, TREE)
    waits = 2 + 1 + 16 / weights.THREADS  # there and back: to connect and for the manifest; then chunks, likewise
    assert took >= 2 * delay_s * waits and took >= link.passed / bytes_per_s
    assert link.passed > 64 * 16 and link.connections == 1 + weights.THREADS


def test_chunks_are_asked_for_several_at_a_time(tmp_path, monkeypatch):
    """Each is answered only when four are wanted: asked for one after another, they would never come."""
    publish(tmp_path / "trainer", manifest.shares(TREE), "run", 1)
    together = threading.Barrier(4, timeout=20)
    found = WeightServer.find

    def find(self, path):
        if "/chunk/" in path:
            together.wait()
        return found(self, path)

    monkeypatch.setattr(WeightServer, "find", find)
    with WeightServer([tmp_path / "trainer"], TOKEN) as server:
        fetched(tmp_path / "engine", server.url, TREE)


@pytest.mark.slow
def test_two_hundred_milliseconds_each_way_are_paid_per_round_of_chunks(tmp_path):
    publish(tmp_path / "trainer", manifest.shares(TREE), "run", 1)
    with WeightServer([tmp_path / "trainer"], TOKEN) as server, SlowProxy(server.url, 0.2, 20e6) as link:
        took = fetched(tmp_path / "engine", link.url, TREE)
    assert 0.4 * 7 <= took < 0.4 * 19, "7 round trips; one after another it would be 19"
