"""Versions of the weights: published whole, read as asked for or not at all, every bit and every failure."""

import concurrent.futures
import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import os
import struct
import threading

import ml_dtypes
import numpy as np
import pytest

from jaxagent.fleet import manifest, weight_reader, weights
from jaxagent.fleet.manifest import DamagedError, MismatchError, MissingError
from jaxagent.fleet.weight_reader import hold
from jaxagent.fleet.weights import ConflictError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 64)


def tree(seed=0):
    random = np.random.default_rng(seed)
    return {
        ("embed",): random.standard_normal((10, 7)).astype(np.float32),
        ("layers", 0, "wq"): np.frombuffer(random.bytes(24), ml_dtypes.bfloat16).reshape(2, 3, 2),  # NaNs among them
        ("layers", 1, "wq"): random.standard_normal((4, 3, 2)).astype(ml_dtypes.bfloat16)[
            ::2
        ],  # not in order in memory
        ("scale",): np.array(random.standard_normal(), np.float32),
        ("none",): np.zeros((0, 3), np.int8),
        ("big",): np.arange(5, dtype=">i4"),
        ("zeros",): np.zeros((3, 64), np.int8),  # equal chunks
    }


def publish(folder, leaves, *of, **more):
    return weights.publish(folder, manifest.shares(leaves), *of, **more)


def bits(array):
    return array.astype(array.dtype.newbyteorder("<")).tobytes(), array.shape, array.dtype.name


def read(folder, version=3, lineage="run", **more):
    with hold(folder, version, lineage, **more) as held:
        return held.read()


def test_every_bit_of_every_kind_of_leaf_comes_back(tmp_path):
    flat = tree()
    published = publish(tmp_path, flat, "run", 3)
    found = read(tmp_path, like=flat)
    assert {path: bits(leaf) for path, leaf in found.items()} == {path: bits(leaf) for path, leaf in flat.items()}
    assert weights.versions(tmp_path) == [3] and os.listdir(tmp_path) == ["00000003"]
    assert published.digest == manifest.digest(flat) != manifest.digest(tree(1))
    assert published.size == sum(leaf.nbytes for leaf in flat.values())
    assert max(path.stat().st_size for path in tmp_path.rglob("*.bin")) <= 64
    assert len(published.chunks) < sum(len(leaf.chunks) for leaf in published.leaves)


def test_the_digest_is_of_paths_types_shapes_and_bits_alone():
    base = {("a",): np.arange(6, dtype=np.float32), ("b",): np.zeros(2, np.int8)}
    digest = manifest.digest(base)
    assert manifest.digest(dict(reversed(base.items()))) == digest
    rows = json.dumps(
        [
            [["a"], "float32", [6], [hashlib.sha256(struct.pack("<6f", *range(6))).hexdigest()]],
            [["b"], "int8", [2], [hashlib.sha256(b"\0\0").hexdigest()]],
        ],
        separators=(",", ":"),
    )
    assert digest == hashlib.sha256(rows.encode()).hexdigest()
    negative_zero = np.array([-0.0, 1, 2, 3, 4, 5], np.float32)
    for other in (
        base | {("a",): base["a",].reshape(2, 3)},
        base | {("a",): base["a",].view(np.int32)},
        base | {("a",): negative_zero},
        {("a",): base["a",], ("c",): base["b",]},
    ):
        assert manifest.digest(other) != digest


@pytest.mark.parametrize(("bad", "message"), [
    (np.array(["x"]), "a.0 has the dtype <U1"), (np.array([None]), "a.0 has the dtype object"),
])  # fmt: skip
def test_what_is_no_array_of_numbers_is_refused_by_name(bad, message):
    with pytest.raises(TypeError, match=message):
        manifest.full_share(("a", 0), bad)


def test_never_another_version_lineage_kind_or_model(tmp_path):
    flat = tree()
    publish(tmp_path, flat, "run", 3)
    for version in (2, 4):
        with pytest.raises(MissingError, match=f"{version:08d} is not there"):
            hold(tmp_path, version, "run")
    with pytest.raises(MismatchError, match="with lineage 'run-2', and its lineage is 'run'"):
        hold(tmp_path, 3, "run-2")
    with pytest.raises(MismatchError, match="with kind 'adapter', and its kind is 'full'"):
        hold(tmp_path, 3, "run", base="0" * 64)
    os.rename(tmp_path / "00000003", tmp_path / "00000004")
    with pytest.raises(MismatchError, match="with version 4, and its version is 3"):
        hold(tmp_path, 4, "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {("embed",): np.zeros((7, 10), np.float32)},
            r"leaf embed: published is float32\[10, 7\], .* float32\[7, 10\]",
        ),
        ({("embed",): np.zeros((10, 7), ml_dtypes.bfloat16)}, r"leaf embed: .*the model has bfloat16\[10, 7\]"),
        ({("head",): np.zeros(2)}, r"leaf head: published is no such leaf, and the model has float64\[2\]"),
    ],
)
def test_a_leaf_that_the_model_has_no_room_for_is_named(tmp_path, change, message):
    flat = tree()
    publish(tmp_path, flat, "run", 3)
    with pytest.raises(MismatchError, match=message):
        hold(tmp_path, 3, "run", like=flat | change)
    del flat["embed",]
    with pytest.raises(MismatchError, match=r"leaf embed: .*the model has no such leaf"):
        hold(tmp_path, 3, "run", like=flat)


def test_adapters_say_what_they_change(tmp_path):
    base = manifest.digest(tree())
    flat = {("wq", "a"): np.ones((2, 4), np.float32)}
    assert publish(tmp_path, flat, "run", 3, base=base).kind == "adapter"
    assert list(read(tmp_path, base=base)) == [("wq", "a")]
    with pytest.raises(MismatchError, match="kind is 'adapter'"):
        hold(tmp_path, 3, "run")
    with pytest.raises(MismatchError, match=f"with base '{'0' * 64}', and its base is '{base}'"):
        hold(tmp_path, 3, "run", base="0" * 64)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]), "differs from its"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, and not"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes, and not"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_a_chunk_that_is_damaged_is_never_served(tmp_path, damage, message):
    published = publish(tmp_path, tree(), "run", 3)
    for leaf in published.leaves:
        for chunk in leaf.chunks:
            path = weights.file_of(tmp_path / "00000003", chunk)
            good = path.read_bytes()
            damage(path)
            with pytest.raises(DamagedError, match=rf"^leaf [a-z.0-9]+: {path} .*{message}|^leaf .*{path} {message}"):
                read(tmp_path)
            path.write_bytes(good)
    assert read(tmp_path)


def test_a_manifest_with_any_byte_flipped_is_never_read(tmp_path):
    publish(tmp_path, {("a",): np.arange(3, dtype=np.int8)}, "run", 3)
    path = tmp_path / "00000003/manifest.json"
    good = path.read_bytes()
    for at in range(len(good)):
        for bit in (1, 32):
            with pytest.raises(DamagedError, match=r"^here is damaged"):
                manifest.decode(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :], "here")
    path.write_bytes(good[:-1])
    with pytest.raises(DamagedError, match=rf"^{path} is damaged"):
        hold(tmp_path, 3, "run")


def test_a_manifest_that_does_not_fit_itself_is_refused():
    """Its checksum is right, so somebody wrote it so."""
    good = manifest.manifest("run", 3, [manifest.describe(("a",), np.arange(3, dtype=np.int8))])
    row = json.loads(json.loads(manifest.encode(good))["manifest"])
    leaf, chunk = row["leaves"][0], row["leaves"][0]["chunks"][0]

    for change, message in (
        (row | {"leaves": [leaf | {"shape": [4]}]}, "another size"),
        (row | {"leaves": [leaf | {"dtype": "int16"}]}, "another size"),
        (row | {"leaves": [leaf | {"dtype": "float7"}]}, "another size"),
        (row | {"leaves": [leaf | {"path": ["b"]}]}, "another digest"),
        (row | {"leaves": [leaf | {"chunks": [chunk | {"digest": "../../../etc/passwd"}]}]}, "without a digest"),
        (row | {"kind": "delta"}, "another digest"),
        (row | {"weights": 2}, "format 2"),
    ):
        text = json.dumps(change)
        content = json.dumps({"sha256": manifest.chunk_of(text.encode()).digest, "manifest": text})
        with pytest.raises(DamagedError, match=message):
            manifest.decode(content.encode(), "here")


def test_the_same_again_changes_nothing_and_another_is_a_conflict(tmp_path):
    flat = tree()
    first = publish(tmp_path, flat, "run", 3)
    before = (tmp_path / "00000003").stat()
    assert publish(tmp_path, flat, "run", 3) == first
    assert (tmp_path / "00000003").stat().st_ino == before.st_ino
    other = tree(1)
    with pytest.raises(ConflictError, match=f"{first.digest}.*{manifest.digest(other)}"):
        publish(tmp_path, other, "run", 3)
    with pytest.raises(ConflictError, match="lineage 'run-2'"):
        publish(tmp_path, flat, "run-2", 3)
    assert os.listdir(tmp_path) == ["00000003"] and read(tmp_path)


def test_the_same_again_mends_what_was_damaged_meanwhile(tmp_path):
    flat = tree()
    first, second, *_ = publish(tmp_path, flat, "run", 3).chunks.values()
    weights.file_of(tmp_path / "00000003", first).write_bytes(b"\0" * first.size)
    weights.file_of(tmp_path / "00000003", second).unlink()
    with pytest.raises(DamagedError):
        read(tmp_path)
    publish(tmp_path, flat, "run", 3)
    assert read(tmp_path) and os.listdir(tmp_path) == ["00000003"]


def together(folder, shares, fails=None):
    """Publishes from as many threads as there are shares, as processes do; what each returned or raised."""
    count, said, barrier = len(shares), {}, threading.Barrier(len(shares))
    threads = concurrent.futures.ThreadPoolExecutor(count)

    def meet(what, own, rank):
        assert not weights.versions(folder), "before all have written there is none"
        said[what, rank] = own
        barrier.wait(10)
        return [said[what, other] for other in range(count)]

    def one(rank):
        def tick():
            if rank == fails:
                raise OSError(errno.ENOSPC, "No space left on device")

        met = functools.partial(meet, rank=rank)
        return weights.publish(folder, shares[rank], "run", 3, tick=tick, rank=rank, meet=met)

    pending = [threads.submit(one, rank) for rank in range(count)]
    return [each.exception(20) or each.result() for each in pending]


def spread(flat, count):
    """The chunks of all leaves in turn, for so many processes."""
    shares, turn = [[] for _ in range(count)], itertools.count()
    for path, leaf in flat.items():
        whole = manifest.full_share(path, leaf)
        owner = {number: next(turn) % count for number in whole.pieces}
        for rank, of in enumerate(shares):
            pieces = {number: piece for number, piece in whole.pieces.items() if owner[number] == rank}
            of.append(dataclasses.replace(whole, pieces=pieces))
    return shares


def test_several_processes_make_one_version_of_the_chunks_that_each_has(tmp_path):
    flat = tree()
    value, *others = together(tmp_path, spread(flat, 3))
    assert value.digest == manifest.digest(flat) and others == [None, None]
    assert read(tmp_path).keys() == flat.keys()
    assert os.listdir(tmp_path) == ["00000003"]
    names = {path.name for path in (tmp_path / "00000003").iterdir()}
    assert names == {"manifest.json", *(f"{digest}.bin" for digest in value.chunks)}


def test_no_two_tries_write_into_one_folder(tmp_path):
    """Containers on one shared folder have the same few numbers of processes: parts of two tries would be one."""
    places = []

    def meet(what, own):
        places.append(own)
        return [own]

    for _ in range(2):
        publish(tmp_path, tree(), "run", 3, meet=meet)
    assert len({*places[::2]}) == 2


def test_what_one_process_cannot_write_is_published_by_none_and_each_says_why(tmp_path):
    raised = together(tmp_path, spread(tree(), 3), fails=1)
    assert all(isinstance(each, OSError) for each in raised)
    assert all("process 1 could not write version 3: [Errno 28]" in str(each) for each in raised[::2])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("change", "message"), [
    (lambda shares: shares[1].pop(), "lacks a chunk that no process has written"),
    (lambda shares: shares[1].append(shares[0][0]), "has a chunk that two processes have written"),
])  # fmt: skip
def test_a_chunk_that_none_or_two_have_written_makes_no_version(tmp_path, change, message):
    shares = spread(tree(), 2)
    change(shares)
    value, other = together(tmp_path, shares)
    assert isinstance(value, ValueError) and message in str(value) and other is None
    assert weights.versions(tmp_path) == []


@pytest.mark.parametrize("failing", (1, 5, 9, 13))
def test_a_disk_that_fills_up_anywhere_leaves_no_version(tmp_path, monkeypatch, failing):
    calls, fsync = [], os.fsync

    def full(fd):
        calls.append(fd)
        if len(calls) >= failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(weights.files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        publish(tmp_path, tree(), "run", 3)
    monkeypatch.undo()
    assert all(not path.name.startswith(".") for path in tmp_path.iterdir())
    for version in weights.versions(tmp_path):  # its name was written, and not said to be on disk
        assert read(tmp_path, version)


def test_what_a_reader_holds_is_not_deleted(tmp_path):
    for version in range(1, 6):
        publish(tmp_path, tree(version), "run", version)
    (tmp_path / ".writing-00000002-1-1").mkdir()
    (tmp_path / ".copying-00000005-abc").mkdir()
    (tmp_path / ".deleting-00000000-1").mkdir()
    with hold(tmp_path, 2, "run") as held, hold(tmp_path, 2, "run"):
        assert weights.delete(tmp_path, 4) == ([1, 3], [2])
        assert weights.versions(tmp_path) == [2, 4, 5] and held.read()
        with pytest.raises(MissingError):
            hold(tmp_path, 1, "run")
    assert weights.delete(tmp_path, 4) == ([2], [])
    assert sorted(os.listdir(tmp_path)) == [".copying-00000005-abc", "00000004", "00000005"]


def test_the_first_version_stays_for_those_who_come_later(tmp_path):
    for version in range(4):
        publish(tmp_path, tree(version), "run", version)
    assert weights.delete(tmp_path, 2) == ([1], [])
    assert weights.delete(tmp_path, 3, keep=()) == ([0, 2], [])
    assert weights.versions(tmp_path) == [3]


def test_a_reader_that_comes_while_a_version_is_deleted_gets_none_of_it(tmp_path, monkeypatch):
    publish(tmp_path, tree(), "run", 3)
    rename = os.rename

    def reader_comes(*names):
        with pytest.raises(MissingError, match="is being deleted"):
            hold(tmp_path, 3, "run")
        rename(*names)

    monkeypatch.setattr(weights.os, "rename", reader_comes)
    assert weights.delete(tmp_path, 9) == ([3], [])
    monkeypatch.undo()

    publish(tmp_path, tree(), "run", 3)

    def deleted_before_it_locks(fd, shared=False):
        monkeypatch.undo()
        assert weights.delete(tmp_path, 9) == ([3], [])
        return weights.files.try_lock(fd, shared)

    monkeypatch.setattr(weight_reader.files, "try_lock", deleted_before_it_locks)
    with pytest.raises(MissingError, match="is being deleted"):
        hold(tmp_path, 3, "run")
    assert os.listdir(tmp_path) == []
