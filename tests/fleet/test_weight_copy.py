"""A version copied: verified per chunk, going on where it broke off, and never there in part."""

import os
import threading

import numpy as np
import pytest

from jaxagent.fleet import manifest, weights
from jaxagent.fleet.manifest import DamagedError
from jaxagent.fleet.weight_copy import copy
from jaxagent.fleet.weight_reader import hold
from jaxagent.fleet.weights import ConflictError, publish

TREE = {("a",): np.arange(500, dtype=np.int16), ("b",): np.ones(3, np.float32)}


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch):
    """A held version of 17 chunks."""
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 64)
    publish(tmp_path / "source", TREE, "run", 3)
    with hold(tmp_path / "source", 3, "run") as held:
        yield held


def test_a_copy_is_equal_and_a_second_one_reads_nothing(tmp_path, source):
    assert len(source.manifest.chunks) == 17
    assert copy(source.manifest, source.chunk, tmp_path / "there") == source.manifest.size
    with hold(tmp_path / "there", 3, "run") as held:
        found = held.read()
        assert held.manifest == source.manifest
    assert all(found[path].tobytes() == leaf.tobytes() for path, leaf in TREE.items())
    assert copy(source.manifest, pytest.fail, tmp_path / "there") == 0
    assert os.listdir(tmp_path / "there") == ["00000003"]


def test_a_copy_goes_on_where_it_broke_off(tmp_path, source):
    served = []

    def breaks(chunk):
        if len(served) >= 6:
            raise ConnectionResetError("cut")
        served.append(chunk)
        return source.chunk(chunk)

    with pytest.raises(ConnectionResetError, match="cut"):
        copy(source.manifest, breaks, tmp_path / "there")
    assert weights.versions(tmp_path / "there") == []
    (stage,) = (tmp_path / "there").iterdir()
    kept = sorted(stage.iterdir())
    assert 6 <= len(kept) < 17
    kept[0].write_bytes(b"\0" * kept[0].stat().st_size)  # a chunk that went bad meanwhile
    kept[1].write_bytes(b"")
    asked = []
    copy(source.manifest, lambda chunk: (asked.append(chunk), source.chunk(chunk))[1], tmp_path / "there")
    assert len(asked) == 17 - len(kept) + 2
    with hold(tmp_path / "there", 3, "run") as held:
        assert held.read()


@pytest.mark.parametrize(
    "corrupt", [lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: data[:-1], lambda data: b""]
)
def test_a_chunk_that_comes_damaged_is_named_and_not_kept(tmp_path, source, corrupt):
    bad = source.manifest.leaves[0].chunks[2]

    def read(chunk):
        return corrupt(source.chunk(chunk)) if chunk == bad else source.chunk(chunk)

    with pytest.raises(DamagedError, match=f"chunk {bad.digest} came with"):
        copy(source.manifest, read, tmp_path / "there")
    assert weights.versions(tmp_path / "there") == [] and not list(tmp_path.glob(f"there/*/{bad.digest}*"))
    assert copy(source.manifest, source.chunk, tmp_path / "there") >= bad.size  # another source


def test_another_version_of_that_number_is_a_conflict(tmp_path, source):
    publish(tmp_path / "there", {("a",): np.zeros(1)}, "run", 3)
    with pytest.raises(ConflictError, match=source.manifest.digest):
        copy(source.manifest, source.chunk, tmp_path / "there")


def test_two_that_copy_into_one_folder_at_once(tmp_path, source):
    """Two workers of a host: one is done first, and takes the folder that both fill."""
    inner = threading.Event()

    def read(chunk):
        if not inner.is_set():
            inner.set()
            assert copy(source.manifest, source.chunk, tmp_path / "there") == source.manifest.size
        return source.chunk(chunk)

    assert copy(source.manifest, read, tmp_path / "there") == 0
    assert os.listdir(tmp_path / "there") == ["00000003"]
    with hold(tmp_path / "there", 3, "run") as held:
        assert held.read()
