"""The ledger: what was acknowledged is there after any death, once and in order; damage is refused by file and line."""

import concurrent.futures
import contextlib
import errno
import json
import os
import queue
import threading
import zlib

import pytest

from jaxagent.config import ConfigError
from jaxagent.fleet import fence, ledger, segments
from jaxagent.fleet.fence import FencedError
from jaxagent.fleet.ledger import Ledger


def append(log, *values):
    log.append([{"v": value} for value in values]).result(20)


def recovered(folder):
    with Ledger(folder) as log:
        return [record["v"] for record in log.recovered()]


def segment(folder, which=-1):
    return sorted((folder / "segments").iterdir())[which]


def test_a_line_is_json_with_the_checksum_of_what_follows_it():
    raw = segments.encode(7, {"kind": "stored", "text": "é\n"})
    line = json.loads(raw)
    assert (line["n"], line["record"]) == (7, {"kind": "stored", "text": "é\n"}) and raw.count(b"\n") == 1
    assert line["crc"] == f"{zlib.crc32(raw[18:-1]):08x}" and raw[18:].startswith(b'"n":7,')


def test_what_was_appended_comes_back_in_order_through_many_writers(tmp_path):
    with Ledger(tmp_path / "run") as log:
        assert log.recovered() == [] and log.epoch == 1
        append(log, 0, 1)
        append(log, 2)
    for epoch in range(2, 6):
        with Ledger(tmp_path / "run") as log:
            assert log.epoch == epoch
            assert [record["v"] for record in log.recovered()] == list(range(epoch + 1))
            assert log.recovered() == []
            append(log, epoch + 1)
    for _ in range(3):  # writers that write nothing leave nothing
        assert recovered(tmp_path / "run") == list(range(7))
    assert len(os.listdir(tmp_path / "run/segments")) == 6 and len(os.listdir(tmp_path / "run/epochs")) == 1


def test_appends_that_wait_together_share_a_write(tmp_path, monkeypatch):
    synced, held = [], threading.Event()
    with Ledger(tmp_path) as log:
        monkeypatch.setattr(ledger.os, "fsync", lambda fd: (held.wait(20), synced.append(fd)))
        waiting = [log.append([{"v": value}]) for value in range(50)]
        assert not any(future.done() for future in waiting)  # nothing is told before its fsync
        held.set()
        assert not concurrent.futures.wait(waiting, 20).not_done
        assert len(synced) <= 3
    monkeypatch.undo()
    assert recovered(tmp_path) == list(range(50))


def test_a_line_that_was_cut_off_is_left_out_and_told(tmp_path):
    with Ledger(tmp_path) as log:
        append(log, 0, 1)
    for tail in (segments.encode(2, {"v": 2})[:-1], b'{"crc":"', b"\0" * 4096, b'{"cr' + b"\0" * 9):
        path = segment(tmp_path)
        with path.open("ab") as file:
            file.write(tail)
        with Ledger(tmp_path) as log:
            assert [record["v"] for record in log.recovered()] == [0, 1]
            assert len(log.notes) >= 1 and f"{path}: the last {len(tail)} bytes" in log.notes[-1]
    with Ledger(tmp_path) as log:
        append(log, 2)
    assert recovered(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("row", [1, 2, 3, 4])
def test_every_flipped_byte_is_refused_by_file_and_line(tmp_path, row):
    with Ledger(tmp_path) as log:
        append(log, 10, 11, 12)
    path, good = segment(tmp_path), segment(tmp_path).read_bytes()
    lines = good.splitlines(keepends=True)
    start = sum(map(len, lines[: row - 1]))
    for at in range(start, start + len(lines[row - 1]) - (row == 4)):  # without the file's last byte: a line cut off
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(ConfigError, match=rf"{path}, line {row}: its checksum"):
            segments.read(tmp_path / "segments")
    path.write_bytes(good)
    assert recovered(tmp_path) == [10, 11, 12]


def test_lines_and_segments_that_are_missing_are_refused(tmp_path):
    for value in range(4):
        with Ledger(tmp_path) as log:
            append(log, value * 2, value * 2 + 1)
    first, second = segment(tmp_path, 0), segment(tmp_path, 1)
    good = second.read_bytes()
    lines = good.splitlines(keepends=True)
    for content, message in (
        (lines[0] + lines[2] + lines[1], "line 2: line 2 of the ledger is missing"),
        (lines[0] + lines[1] + lines[1], "line 3: line 3 of the ledger is missing"),
        (lines[0] + lines[1], "it was changed"),
    ):
        second.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            Ledger(tmp_path)
    second.unlink()
    with pytest.raises(ConfigError, match=f"{second} is gone"):
        Ledger(tmp_path)
    second.write_bytes(good)
    os.remove(first)
    with pytest.raises(ConfigError, match=f"{first} is gone"):
        Ledger(tmp_path)


def test_a_writer_that_was_replaced_is_told_and_its_lines_do_not_count(tmp_path):
    with Ledger(tmp_path) as old:
        append(old, 0)
        with Ledger(tmp_path) as new:
            append(new, 1)
            with pytest.raises(FencedError, match="epoch 2 has taken over from epoch 1"):
                append(old, 99)
            append(new, 2)
            with pytest.raises(FencedError):  # for good
                append(old, 99)
            with pytest.raises(FencedError):
                old.compact(lambda record: False).result(20)
    assert b"99" in segment(tmp_path, 0).read_bytes()
    assert recovered(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("moment", ["before it reads", "before its segment", "after its segment"])
def test_a_compaction_of_a_writer_that_is_replaced_meanwhile_loses_nothing(tmp_path, monkeypatch, moment):
    """The old writer makes its compacted segment at some moment of the new one's start."""
    with Ledger(tmp_path) as old:
        append(old, 0, 1)
        read, begin, done = segments.read, Ledger._begin, []

        def compact():
            if not done:
                done.append(True)
                with pytest.raises(FencedError):
                    old.compact(lambda record: record["v"] != 0).result(20)

        def reading(folder):
            if threading.current_thread() is threading.main_thread() and moment == "before it reads":
                compact()
            return read(folder)

        def beginning(self, *arguments):
            mine = threading.current_thread() is threading.main_thread()
            if mine and moment == "before its segment":
                compact()
            file = begin(self, *arguments)
            if mine and moment == "after its segment":
                compact()
            return file

        monkeypatch.setattr(segments, "read", reading)
        monkeypatch.setattr(Ledger, "_begin", beginning)
        with Ledger(tmp_path) as new:
            append(new, 2)
        assert done
    assert set(recovered(tmp_path)) - {0} == {1, 2}


def test_two_that_start_at_once(tmp_path, monkeypatch):
    first = fence.take(tmp_path)
    monkeypatch.setattr(fence, "epochs", lambda place: [])  # what both saw
    with pytest.raises(ConfigError, match="just been opened by another process as epoch 1"):
        fence.take(tmp_path)
    first.check()


def test_an_epoch_is_never_used_twice(tmp_path):
    for epoch in (1, 2):
        with Ledger(tmp_path) as log:
            assert log.epoch == epoch
            append(log, epoch)
    (tmp_path / "epochs/00000002").unlink()  # somebody cleaned up
    with Ledger(tmp_path) as log:
        assert log.epoch == 3


def test_what_is_compacted_away_is_gone_and_the_rest_keeps_its_order(tmp_path):
    with Ledger(tmp_path) as log:
        append(log, *range(10))
    with Ledger(tmp_path) as log:
        append(log, *range(10, 15))
        waiting = log.append([{"v": 15}])
        assert log.compact(lambda record: record["v"] % 5 == 0).result(20) == 12  # with what waited before it
        assert waiting.done()
        append(log, 16)
        assert len(os.listdir(tmp_path / "segments")) == 1
    assert recovered(tmp_path) == [0, 5, 10, 15, 16]
    with Ledger(tmp_path) as log:
        append(log, 17)
        assert log.compact(lambda record: record["v"] > 16).result(20) == 5
        assert log.compact(lambda record: False).result(20) == 1
    with Ledger(tmp_path) as log:
        assert log.recovered() == []
        append(log, 18)
    assert recovered(tmp_path) == [18]
    kept = segment(tmp_path, 0).read_bytes().splitlines(keepends=True)
    assert json.loads(kept[0])["n"] == 18  # numbers go on


@pytest.mark.parametrize("step", ["write", "rename", "segment removed"])
def test_a_compaction_that_is_killed_anywhere_is_whole_or_has_not_been(tmp_path, monkeypatch, step):
    with Ledger(tmp_path) as log:
        append(log, 0, 1, 2)

        def die(*_, **__):
            raise SystemExit("killed")

        monkeypatch.setattr(
            *{"write": (ledger.files.os, "fsync", die), "rename": (ledger.files, "sync_folder", die)}.get(
                step, (Ledger, "_remove", die)
            )
        )
        with pytest.raises(SystemExit):
            log.compact(lambda record: record["v"] != 1).result(20)
        monkeypatch.undo()
    assert recovered(tmp_path) == ([0, 1, 2] if step == "write" else [0, 2])
    assert not [path for path in (tmp_path / "segments").iterdir() if path.name.startswith(".")] or step == "write"


def test_a_disk_that_fails_is_final_for_lines_but_not_for_a_compaction(tmp_path, monkeypatch):
    with Ledger(tmp_path) as log:
        append(log, 0)
        with monkeypatch.context() as patched:
            patched.setattr(ledger.files, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            with pytest.raises(OSError, match="full"):
                log.compact(lambda record: False).result(20)
        append(log, 1)
        with monkeypatch.context() as patched:
            patched.setattr(ledger.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
            with pytest.raises(OSError, match="broken"):
                append(log, 2)
        with pytest.raises(OSError, match="broken"):  # what follows was decided with it
            append(log, 3)
        with pytest.raises(OSError, match="broken"):
            log.compact(lambda record: True).result(20)
    assert recovered(tmp_path) == [0, 1, 2]  # nobody was told of 2: whoever asks again gets "duplicate"


def test_a_compaction_that_may_be_what_the_next_writer_reads_is_final_when_it_fails(tmp_path, monkeypatch):
    """Its segment has its name already: lines that were added to the one before would be lost."""
    with Ledger(tmp_path) as log:
        append(log, 0, 1)
        with monkeypatch.context() as patched:
            patched.setattr(ledger.files, "sync_folder", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
            with pytest.raises(OSError, match="broken"):
                log.compact(lambda record: record["v"] > 0).result(20)
        with pytest.raises(OSError, match="broken"):
            append(log, 2)
    assert recovered(tmp_path) == [1]


def test_a_real_full_disk_loses_nothing_that_was_acknowledged(small_disk):
    acknowledged = []
    with Ledger(small_disk / "run") as log, pytest.raises(OSError) as raised:
        for value in range(10_000):
            log.append([{"v": value, "filler": "x" * 2_000}]).result(20)
            acknowledged.append(value)
    assert raised.value.errno == errno.ENOSPC and len(acknowledged) > 100
    with pytest.raises(OSError):
        Ledger(small_disk / "run")  # it says so; a supervisor tries again later
    found = segments.read(small_disk / "run/segments")
    assert [record["v"] for record in found.records] == acknowledged and found.notes


def test_a_record_that_is_no_json_is_told_and_final(tmp_path):
    with Ledger(tmp_path) as log:
        with pytest.raises(ValueError, match="JSON compliant"):
            append(log, float("nan"))
        with pytest.raises(ValueError):
            append(log, 1)
    assert recovered(tmp_path) == []


def test_closed_or_hanging_takes_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "MOST_WAITING", 3)
    held = threading.Event()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(Ledger(tmp_path))
        stack.callback(held.set)
        monkeypatch.setattr(ledger.os, "fsync", lambda fd: held.wait(20))
        with pytest.raises(RuntimeError, match="it hangs"):
            for value in range(20):
                log.append([{"v": value}])
        with pytest.raises(RuntimeError, match="it hangs"):  # for good: a line is missing now
            held.set()
            for _ in range(100):
                with contextlib.suppress(queue.Full):
                    log.append([{"v": 99}]).result(20)
    with pytest.raises(RuntimeError, match="closed"):
        log.append([])
    log.close()
