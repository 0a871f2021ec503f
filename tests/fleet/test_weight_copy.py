"""A version copied: verified per chunk, going on where it broke off, and never there in part."""

import contextlib
import errno
import os
import threading

import numpy as np
import pytest

from jaxagent.fleet import manifest, weights
from jaxagent.fleet.manifest import DamagedError, WeightsError
from jaxagent.fleet.weight_copy import copy
from jaxagent.fleet.weight_reader import hold
from jaxagent.fleet.weights import ConflictError, publish
from jaxagent.io import files

TREE = {("a",): np.arange(500, dtype=np.int16), ("b",): np.ones(3, np.float32)}


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch):
    """A held version of 17 chunks."""
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 64)
    publish(tmp_path / "source", manifest.shares(TREE), "run", 3)
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
    (stage / ".x.bin.1.2").write_bytes(b"of a process that was killed")
    asked = []
    copy(source.manifest, lambda chunk: (asked.append(chunk), source.chunk(chunk))[1], tmp_path / "there")
    assert len(asked) == 17 - len(kept) + 2
    assert len(os.listdir(tmp_path / "there/00000003")) == 18
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
    publish(tmp_path / "there", manifest.shares({("a",): np.zeros(1)}), "run", 3)
    with pytest.raises(ConflictError, match=source.manifest.digest):
        copy(source.manifest, source.chunk, tmp_path / "there")


def test_one_of_two_that_copy_into_one_folder_is_sent_away(tmp_path, source):
    """Two workers of a host."""

    def read(chunk):
        with pytest.raises(WeightsError, match="version 3 will be there soon"):
            copy(source.manifest, source.chunk, tmp_path / "there")
        return source.chunk(chunk)

    assert copy(source.manifest, read, tmp_path / "there") == source.manifest.size
    assert copy(source.manifest, pytest.fail, tmp_path / "there") == 0


def test_without_locks_two_copies_do_the_work_twice(tmp_path, source, monkeypatch):
    def none(fd, shared=False):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "try_lock", none)
    inner, gate = [], threading.Lock()

    def read(chunk):
        with gate:
            if not inner:
                inner.append(copy(source.manifest, source.chunk, tmp_path / "there"))
        return source.chunk(chunk)

    with contextlib.suppress(FileNotFoundError):  # the folder that both filled has its name already
        copy(source.manifest, read, tmp_path / "there")
    with hold(tmp_path / "there", 3, "run") as held:
        assert held.read()
    assert copy(source.manifest, pytest.fail, tmp_path / "there") == 0
