"""A version that will be needed comes while another one is in use, and never holds up what is needed now."""

import threading

import pytest

from jaxagent.fleet import manifest, weights
from jaxagent.fleet.manifest import WeightsError
from jaxagent.fleet.weight_ahead import Ahead
from jaxagent.fleet.weight_fetch import GivenUpError, WeightFetcher
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.weights import publish
from jaxagent.fleet.wire import Sources
from tests.fleet.served import until
from tests.fleet.test_weight_http import TOKEN, TREE

WAIT_S = 20.0


class Fetch:
    """Fetches when it is told to, or gives up."""

    def __init__(self):
        self.begun, self.ended, self.go = [], [], threading.Event()

    def __call__(self, version, wanted):
        self.begun.append(version)
        while wanted() and not self.go.wait(0.001):
            pass
        if not wanted():
            raise GivenUpError("not wanted")
        self.ended.append(version)


def test_it_comes_meanwhile_and_who_needs_it_waits_for_it():
    fetch = Fetch()
    ahead = Ahead(fetch)
    ahead.expect(3)
    ahead.expect(4)  # one at a time
    until(lambda: fetch.begun)
    needed = threading.Event()

    def need():
        with ahead.instead(3):
            assert fetch.ended == [3]
            needed.set()

    threading.Thread(target=need, daemon=True).start()
    assert not needed.wait(0.05)
    fetch.go.set()
    assert needed.wait(WAIT_S) and fetch.begun == [3]
    ahead.expect(4)
    until(lambda: fetch.ended == [3, 4])


def test_what_is_needed_now_does_not_wait_for_another_version_which_is_given_up():
    fetch = Fetch()
    ahead = Ahead(fetch)
    ahead.expect(4)
    until(lambda: fetch.begun)
    with ahead.instead(3):
        until(lambda: ahead._version == -1)
        ahead.expect(5)  # nothing beside what is needed
        assert fetch.begun == [4] and fetch.ended == []
    fetch.go.set()
    ahead.expect(5)
    until(lambda: fetch.ended == [5])


def test_a_failure_is_forgotten():
    def fails(version, wanted):
        raise WeightsError("no source has it")

    ahead = Ahead(fails)
    ahead.expect(1)
    with ahead.instead(1):
        pass


def test_a_fetch_that_is_given_up_keeps_its_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 64)
    monkeypatch.setattr(weights, "THREADS", 1)
    monkeypatch.setattr("jaxagent.fleet.weight_server.LOOK_S", 0.01)
    publish(tmp_path / "trainer", manifest.shares(TREE), "run", 3)
    fetcher = WeightFetcher(tmp_path / "engine", TOKEN)
    with WeightServer([tmp_path / "trainer"], TOKEN) as server:

        def ask():
            return Sources(3, manifest.digest(TREE), "run", (server.url,))

        asked = iter([True, True, False])
        with pytest.raises(GivenUpError):
            fetcher.fetch(ask, WAIT_S, still_wanted=lambda: next(asked))
        assert fetcher.numbers()["weights_got_bytes"] == 128 and weights.versions(tmp_path / "engine") == []
        fetcher.fetch(ask, WAIT_S)
        assert fetcher.numbers()["weights_got_bytes"] == 1012
